"""Batches that all ranks agree on: every rank loads its part of the samples, and nothing else."""

import json

import pytest
import torch
from torch.utils.data import Dataset, StackDataset, TensorDataset

from stagewright.core.errors import InvalidInput
from stagewright.data import PipelineLoader
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.pipeline import Pipeline
from tests.runtime.forked import run_worker
from tests.runtime.loader_worker import make_data
from tests.torch_models import make_case, make_plan

SAMPLES = 37


class Watched(Dataset):
    """Numbers; remembers which were loaded."""

    def __init__(self, offset=0):
        self.offset, self.loaded = offset, []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.loaded.append(index)
        return torch.tensor([float(index + self.offset)])


def rank_with(*stages):
    """As much of a rank of a plan with three stages as a loader needs."""
    pipeline = object.__new__(DistributedPipeline)
    pipeline.plan = make_plan(make_case("mlp"), 3, num_microbatches=2)
    pipeline.stages = dict.fromkeys(stages)
    pipeline.check_agreement = lambda facts: None
    return pipeline


def test_ranks_load_what_their_stages_use_in_one_order():
    inputs = [Watched() for _ in range(3)]
    targets = [Watched(100) for _ in range(3)]
    loaders = [PipelineLoader(rank_with(r), inputs[r], targets[r], seed=3) for r in range(3)]
    assert [len(loader) for loader in loaders] == [4, 4, 4]  # 37 samples in batches of 8
    for (first, none), (nothing, neither), (no, last) in zip(
        *(loader.epoch(0) for loader in loaders), strict=True
    ):
        assert none is neither is None
        assert nothing == no == ()
        assert torch.equal(first[0] + 100, last)
    assert len(inputs[0].loaded) == len(targets[2].loaded) == 32
    assert not any(data.loaded for data in [*inputs[1:], *targets[:2]])


def order(loader, epoch):
    return torch.cat([inputs[0] for inputs, _ in loader.epoch(epoch)]).flatten().tolist()


def test_every_epoch_has_an_order_of_its_own_that_can_be_repeated():
    loader = PipelineLoader(rank_with(0), Watched(), Watched(), seed=0)
    first, second = order(loader, 0), order(loader, 1)
    assert first != second
    assert order(loader, 0) == first
    assert len(set(first)) == 32
    assert order(PipelineLoader(rank_with(0), Watched(), Watched(), seed=1), 0) not in (
        first, second,
    )  # fmt: skip
    plain = PipelineLoader(rank_with(0), Watched(), Watched(), shuffle=False)
    assert order(plain, 5) == list(range(32))


@pytest.mark.parametrize("stages", [(0,), (2,), (0, 2)])
def test_pairs_are_loaded_whole(stages):
    data = TensorDataset(torch.arange(SAMPLES), torch.arange(SAMPLES) + 100)
    for inputs, target in PipelineLoader(rank_with(*stages), data).epoch(0):
        assert (len(inputs), target is None) == (0 in stages, 2 not in stages)
        if stages == (0, 2):
            assert torch.equal(inputs[0] + 100, target)


def test_one_process_loads_both_and_samples_may_have_several_inputs():
    case = make_case("mlp")
    pipeline = Pipeline(case.model, make_plan(case, 2))
    both = TensorDataset(torch.arange(SAMPLES), torch.arange(SAMPLES) + 1)
    loader = PipelineLoader(pipeline, both, Watched(), batch_size=5)
    assert len(loader) == 7
    for (one, two), target in loader.epoch(0):
        assert torch.equal(one + 1, two)
        assert torch.equal(one, target.flatten())


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidInput, match="there are 37 inputs and 3 targets for batches of 8"):
        PipelineLoader(rank_with(0), Watched(), TensorDataset(torch.zeros(3)))
    with pytest.raises(InvalidInput, match=r"for batches of 50; .* at least one batch"):
        PipelineLoader(rank_with(0), Watched(), Watched(), batch_size=50)


def test_items_of_three_are_no_pairs():
    """The mask between tokens and label was dropped."""
    three = TensorDataset(*[torch.arange(SAMPLES)] * 3)
    with pytest.raises(InvalidInput, match="have 3 parts"):
        next(PipelineLoader(rank_with(0), three).epoch(0))


def run_ranks(executable, what):
    output = run_worker(executable, "tests.runtime.loader_worker", what, timeout_s=120)
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.distributed
@pytest.mark.timeout(180)
def test_ranks_that_load_their_parts_train_as_the_unsplit_model_does(forking_executable):
    case, data = make_case("mlp"), make_data()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    both = StackDataset(*data)
    expected = []
    # In one process and by another loader: only the order is the loader's.
    order = PipelineLoader(rank_with(0, 2), StackDataset(torch.arange(len(both)), data[1]))
    for epoch in range(2):
        for (numbers,), _ in order.epoch(epoch):
            loss = case.loss_fn(case.model(data[0][numbers]), data[1][numbers])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss.detach()))
    found = [line["loss"] for line in run_ranks(forking_executable, "losses")]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.distributed
@pytest.mark.timeout(180)
def test_ranks_whose_orders_differ_are_refused_before_they_load(forking_executable):
    said = {line["rank"]: line["error"] for line in run_ranks(forking_executable, "seeds")}
    assert set(said) == {0, 1, 2}
    assert set(said.values()) == {said[0]}
    words = "the ranks disagree on the order of the data: seed 1, 40 inputs and"
    assert said[0].startswith(words)
    assert "on rank 1, but seed 0" in said[0]
