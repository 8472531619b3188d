"""Layers that keep their inputs and run again in the backward, inside a stage."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import stagewright
from stagewright import Pipeline
from stagewright.capture.capture import trace
from stagewright.core.errors import PlanMismatch
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.profiler.measure.profile import profile
from stagewright.runtime.verify import verify
from tests.runtime.aux_losses_worker import loss_fn as aux_loss_fn
from tests.runtime.aux_losses_worker import make_data, make_net
from tests.runtime.tensor_parallel.models import make_example
from tests.runtime.tensor_parallel.plans import Mix, write_plan

WIDTH, LENGTH, MICROBATCHES = 8, 4, 4
LAYERS = PlanOptions(num_microbatches=MICROBATCHES, recompute="layers", num_stages=2)


class Block(nn.Module):
    """Writes in place, draws random numbers, moves running statistics and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.grow = nn.Linear(WIDTH, 8 * WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.shrink = nn.Linear(8 * WIDTH, WIDTH)
        self.statistics = nn.BatchNorm1d(LENGTH)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shrink(self.relu(self.grow(self.norm(x))))
        return x + self.drop(self.statistics(y))


class Net(nn.Module):
    """Blocks that all read the first table's output besides their own input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.register_buffer("offsets", torch.arange(LENGTH, dtype=torch.float64)[:, None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = x = self.table(ids) + self.offsets
        for block in self.blocks:
            x = block(x) + first * 0.5
        return self.head(x)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = Net().double()
    ids = torch.randint(0, 20, (2 * MICROBATCHES, LENGTH))
    measured = profile(model, ids[:2], loss_fn=loss_fn, target=ids[:2])
    return model, ids, measured, stagewright.plan(measured, "2xcpu", LAYERS)


def run(model, plan, ids, **options):
    """Return loss, gradients and buffers after a step with equal random numbers."""
    model = copy.deepcopy(model)
    pipeline = Pipeline(model, plan, **options)
    torch.manual_seed(3)
    loss = loss_fn(pipeline(ids), ids)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return loss, gradients, dict(model.named_buffers())


def test_one_process_computes_what_it_computes_without(case):
    model, ids, _, plan = case
    assert all(stage.checkpoints for stage in plan.stages)
    expected = run(model, plan, ids, checkpoint="never")
    for options in ({}, {"devices": ["cpu", "cpu"]}, {"keyed_dropout": 5}):
        if "keyed_dropout" in options:
            expected = run(model, plan, ids, checkpoint="never", **options)
        found = run(model, plan, ids, **options)
        assert torch.equal(found[0], expected[0])
        for kind in (1, 2):
            assert found[kind].keys() == expected[kind].keys()
            for name, value in expected[kind].items():
                assert torch.equal(found[kind][name], value), name


def test_blocks_run_twice_and_the_rest_once(case):
    model, ids, _, plan = case
    model, calls = copy.deepcopy(model), Counter()
    for name in ("table", "blocks.1.grow", "blocks.3.grow", "head"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    pipeline = Pipeline(model, plan)
    calls.clear()  # capture has run it, too
    loss = loss_fn(pipeline(ids), ids)
    assert set(calls.values()) == {MICROBATCHES}
    loss.backward()
    twice = {name for name, count in calls.items() if count == 2 * MICROBATCHES}
    assert twice == {"blocks.1.grow", "blocks.3.grow"}


def test_nothing_runs_twice_without_gradients(case):
    model, ids, _, plan = case
    model, calls = copy.deepcopy(model), Counter()
    model.blocks[1].grow.register_forward_hook(lambda *_: calls.update(["grow"]))
    pipeline = Pipeline(model, plan)
    calls.clear()
    with torch.no_grad():
        pipeline(ids)
    pipeline.eval()
    pipeline(ids)
    assert calls["grow"] == 2 * MICROBATCHES


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_processes_compute_what_the_model_computes(case, schedule, dtype):
    model, ids, measured, _ = case
    options = LAYERS.model_copy(update={"schedule": schedule, "num_stages": None})
    balance = [len(measured.layers) - 4, 1, 1, 2] if "inter" in schedule else [3, 3]
    if "inter" not in schedule:
        balance = [3, len(measured.layers) - 3]
    plan = plan_from_balance(measured, "2xcpu", options, balance)
    assert sum(len(stage.checkpoints) for stage in plan.stages) >= 4
    found = verify(model, plan, ids, ids, loss_fn, dtype=dtype)
    assert found.equal(1e-12 if dtype is None else 0.05)


@pytest.mark.parametrize("replicas", [(), (2, 1)])
def test_a_weight_of_several_layers_is_summed_once_it_is_whole(replicas):
    """Each checkpoint's backward adds to it by itself; T5 lost 0.3 of its table's gradient."""
    example = make_example("t5")
    plan = write_plan(
        trace(example.model, example.sample, check=False),
        Mix(("r2", "t1") if replicas else ("t1", "t1"), "1f1b", "layers"),
    )
    batch, target = example.draw_batch(MICROBATCHES)
    assert verify(example.model, plan, batch, target, example.loss_fn).equal(1e-12)


def test_little_is_held_until_the_backward(case):
    """Tensors that autograd holds of one stage; `benchmarks/stage_memory.py` measures the rest."""
    model, ids, measured, _ = case
    held = {}
    for recompute in ("never", "layers"):
        options = LAYERS.model_copy(update={"recompute": recompute, "num_stages": 1})
        plan = plan_from_balance(measured, "1xcpu", options, [len(measured.layers)])
        pipeline = Pipeline(copy.deepcopy(model), plan)
        weights = {w.untyped_storage().data_ptr() for w in pipeline.parameters()}
        loss = loss_fn(pipeline(ids), ids)
        found = {}
        pending, seen = [loss.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending += [each for each, _ in node.next_functions]
            names = [name for name in dir(node) if name.startswith("_saved_")]
            saved = [getattr(node, name) for name in names]
            saved += list(getattr(node, "saved_tensors", ()))
            for tensor in saved:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in weights:
                        found[storage.data_ptr()] = storage.nbytes()
        held[recompute] = sum(found.values())
    assert held["layers"] < held["never"] / 3


def test_losses_left_in_modules_are_refused():
    model = make_net()
    x, target = make_data()
    measured = profile(model, x[:2])
    layers = [one.model_copy(update={"saved_activation_bytes": 2**30}) for one in measured.layers]
    measured = measured.model_copy(update={"layers": tuple(layers), "storages": ()})
    plan = plan_from_balance(measured, "1xcpu", LAYERS.model_copy(update={"num_stages": 1}), [5])
    with pytest.raises(PlanMismatch, match="recomputes its layers one by one"):
        verify(model, plan, x, target, aux_loss_fn, aux_losses={"*.aux": 1.0})


def test_tied_weights_on_several_devices_of_one_process_are_refused(case):
    model, ids, _, _ = case
    tied = copy.deepcopy(model)
    tied.head.weight = tied.table.weight
    measured = profile(tied, ids[:2])
    plan = plan_from_balance(measured, "2xcpu", LAYERS, [3, len(measured.layers) - 3])
    run(tied, plan, ids)
    with pytest.raises(PlanMismatch, match="which one process cannot do on several devices"):
        Pipeline(tied, plan, devices=["cpu", "cpu"])


class Writer(nn.Module):
    """Writes to its second argument; what it decides by values keeps it from being traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        if bool(total.isfinite().all()):
            total.mul_(1.5)
        return self.linear(x).sin()


class ReadsWhatOthersWrote(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.writers = nn.ModuleList(Writer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, head = self.layers
        x = first(x).sin()
        total = second(x)
        for writer in self.writers:
            x = writer(x, total)
        return head(third(x).sin() + total)


class WritesInPlace(nn.Module):
    """Values of one layer are changed in place by the next ones, also through views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others, head = self.layers
        x = self.relu(first(x))
        total = others[0](x)
        for layer in others[1:]:
            x = layer(x).sin()
            total.mul_(x.detach())
            part = total[:, :2]
            scaled = x * 0.5
            part.add_(scaled[:, 2:4])
        return head(total + x)


def profile_of_large_layers(model, sample):
    """Return a profile by which every layer is worth a checkpoint."""
    measured = profile(model, sample, loss_fn=nn.functional.mse_loss, target=sample)
    layers = [one.model_copy(update={"saved_activation_bytes": 2**30}) for one in measured.layers]
    return measured.model_copy(update={"layers": tuple(layers), "storages": ()})


@pytest.mark.parametrize("make", [
    WritesInPlace,
    ReadsWhatOthersWrote,
    lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    ),
])  # fmt: skip
@pytest.mark.parametrize("first", [None, 1])
def test_layers_change_what_others_made_in_place(make, first):
    """In a first stage this failed; in others later layers read the value before the change."""
    torch.manual_seed(0)
    model, batch = make().double(), torch.randn(2 * MICROBATCHES, WIDTH, dtype=torch.float64)
    measured = profile_of_large_layers(model, batch[:2])
    count = len(measured.layers)
    balance = [count] if first is None else [first, count - first]
    options = LAYERS.model_copy(update={"num_stages": len(balance)})
    plan = plan_from_balance(measured, f"{len(balance)}xcpu", options, balance)
    assert sum(len(stage.checkpoints) for stage in plan.stages) > 2
    found = verify(model, plan, batch, batch.cos(), nn.functional.mse_loss)
    assert found.equal(1e-12), str(found)


def test_layers_unfrozen_after_the_first_step_are_trained():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).double()
    batch = torch.randn(2 * MICROBATCHES, WIDTH, dtype=torch.float64)
    model[:2].requires_grad_(False)
    measured = profile_of_large_layers(model, batch[:2])
    options = LAYERS.model_copy(update={"num_stages": 1})
    plan = plan_from_balance(measured, "1xcpu", options, [4])
    pipeline = Pipeline(model, plan)
    pipeline(batch).square().mean().backward()
    model.requires_grad_(True)
    model.zero_grad()
    pipeline(batch).square().mean().backward()
    found = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    model(batch).square().mean().backward()
    torch.testing.assert_close(found, [weight.grad for weight in model.parameters()])


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.detach()).sin()


def test_weights_in_front_of_a_detach_stay_without_gradients():
    """Zeros in their place would let weight decay change them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Detaches(), nn.Linear(WIDTH, WIDTH))
    batch = torch.randn(2 * MICROBATCHES, WIDTH)
    plan = plan_from_balance(profile_of_large_layers(model, batch[:2]), "2xcpu", LAYERS, [2, 2])
    assert all(stage.checkpoints for stage in plan.stages)
    Pipeline(model, plan)(batch).square().mean().backward()
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert without == {"0.weight", "0.bias"}
