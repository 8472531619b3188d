"""`Pipeline` in one process: checkpoint modes, any batch, deferred statistics, errors, items."""

import copy

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.runtime import pipeline as pipeline_module
from stagewright.runtime.build import build
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.inference.pipeline import InferencePipeline
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.verify import verify
from tests.torch_models import Case, make_case, make_plan

MODES = ["always", "except_last", "never"]


class Counter(nn.Module):
    """Counts how often it runs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return x * 1


def small(*, dropout=0.0):
    """Layers that have everything a second run could change, and a plan in three stages."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 1),
    ).double()  # fmt: skip
    case = Case("small", make_case("mlp").spec, model, torch.rand(2, 4).double(), None)
    return model, make_plan(case, 3, num_microbatches=4, balance=[2, 3, 3])


def recomputing(plan, *modes):
    stages = tuple(
        stage.model_copy(update={"recompute": mode})
        for stage, mode in zip(plan.stages, modes, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


def in_pieces(model, x, count):
    return torch.cat([model(part) for part in torch.tensor_split(x, count)])


def same_training(pipeline, model, x, count):
    """One step of both; the largest difference of output, gradients and buffers."""
    found, expected = pipeline(x), in_pieces(model, x, count)
    found.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    pairs = [(found, expected)]
    pairs += [
        (p.grad, q.grad) for p, q in zip(pipeline.parameters(), model.parameters(), strict=True)
    ]
    pairs += list(zip(pipeline.buffers(), model.buffers(), strict=True))
    return max(relative_difference(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("checkpoint", [*MODES, None])
@pytest.mark.parametrize("devices", [None, ["cpu"] * 3])
def test_checkpoint_modes_change_no_number(checkpoint, devices):
    model, plan = small()
    whole = copy.deepcopy(model)
    plan = recomputing(plan, "always", "never", "except_last")
    pipeline = Pipeline(model, plan, devices=devices, checkpoint=checkpoint)
    for size in (8, 11):
        x = torch.rand(size, 4, dtype=torch.double)
        assert same_training(pipeline, whole, x, 4) <= 1e-12


def count_calls(pipeline, x):
    """How often each stage runs in the forward, and in the backward."""
    calls = [0] * len(pipeline)

    def count(index):
        def hook(*_):
            calls[index] += 1

        return hook

    hooks = [stage.register_forward_hook(count(i)) for i, stage in enumerate(pipeline)]
    output = pipeline(x)
    forward = list(calls)
    if output.requires_grad:
        output.sum().backward()
    for hook in hooks:
        hook.remove()
    return forward, [after - before for after, before in zip(calls, forward, strict=True)]


def test_stages_run_again_as_the_plan_or_the_caller_says():
    model, plan = small()
    plan = recomputing(plan, "always", "never", "except_last")
    x = torch.rand(8, 4, dtype=torch.double)
    assert count_calls(Pipeline(model, plan), x) == ([4, 4, 4], [4, 0, 3])
    for mode, again in zip(MODES, (4, 3, 0), strict=True):
        assert count_calls(Pipeline(model, plan, checkpoint=mode), x) == ([4] * 3, [again] * 3)
    pipeline = Pipeline(model, plan, checkpoint="always")
    assert count_calls(pipeline.eval(), x) == ([4] * 3, [0] * 3)
    with torch.no_grad():
        assert count_calls(pipeline.train(), x) == ([4] * 3, [0] * 3)


def test_masks_of_dropout_are_the_same_when_run_again():
    model, plan = small(dropout=0.5)
    other = copy.deepcopy(model)
    x = torch.rand(8, 4, dtype=torch.double)
    gradients = []
    for each, mode in ((model, "always"), (other, "never")):
        pipeline = Pipeline(each, plan, checkpoint=mode)
        torch.manual_seed(3)
        pipeline(x).sum().backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


def test_chunks_instead_of_the_plans():
    model, plan = small()
    for chunks, size, pieces in ((2, 8, 2), (6, 8, 6), (5, 11, 5), (8, 4, 4)):
        whole = copy.deepcopy(model)
        pipeline = Pipeline(model, plan, chunks=chunks)
        pipeline.zero_grad()
        x = torch.rand(size, 4, dtype=torch.double)
        if size // pieces < 2:  # too few for batch statistics
            torch.testing.assert_close(pipeline.eval()(x), whole.eval()(x))
            pipeline.train()
            continue
        whole.zero_grad()
        assert same_training(pipeline, whole, x, pieces) <= 1e-12
    for chunks in (0, -1, 2.0, True, "4"):
        with pytest.raises(InvalidInput, match="chunks is"):
            Pipeline(model, plan, chunks=chunks)
    with pytest.raises(InvalidInput, match="checkpoint is 'sometimes'; give one of always"):
        Pipeline(model, plan, checkpoint="sometimes")


def test_a_smaller_batch_of_an_exported_model_is_fewer_micro_batches():
    case = make_case("gpt2")
    pipeline = Pipeline(case.model, make_plan(case, 2, num_microbatches=4))
    tokens = torch.randint(0, 64, (6, 12))
    assert torch.is_tensor(pipeline(input_ids=tokens).logits)
    torch.testing.assert_close(
        pipeline(input_ids=tokens).logits, case.model(input_ids=tokens).logits
    )


def test_length_items_and_iteration():
    model, plan = small()
    pipeline = Pipeline(model, plan)
    assert len(pipeline) == 3
    assert list(pipeline) == list(pipeline.stages) == [pipeline[i] for i in range(3)]
    assert pipeline[-1] is pipeline.stages[2]
    with pytest.raises(IndexError):
        pipeline[3]


@pytest.mark.parametrize("checkpoint", MODES)
def test_an_error_says_where(checkpoint):
    model, plan = small()
    pipeline = Pipeline(model, plan, checkpoint=checkpoint)

    def fail(*_):
        raise ArithmeticError("of the model")

    model[4].register_forward_hook(fail)
    with pytest.raises(ArithmeticError, match="of the model") as caught:
        pipeline(torch.rand(8, 4, dtype=torch.double))
    assert caught.value.__notes__ == ["in stage 1, micro-batch 0"]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("size", [8, 11, 4])
def test_deferred_statistics_are_those_of_the_whole_batch(checkpoint, size):
    model, plan = small()
    whole = copy.deepcopy(model)
    pipeline = Pipeline(model, plan, checkpoint=checkpoint, batch_statistics="deferred", chunks=2)
    names = list(pipeline.state_dict())
    for _ in range(2):
        x = torch.rand(size, 4, dtype=torch.double) + 3
        pipeline(x).sum().backward()
        whole[1](whole[0](x))
        if size > 4:
            second = in_pieces(lambda part: whole[4](model_head(model, part)), x, 2)
            whole[5](second)
    for index in (1, 5) if size > 4 else (1,):
        for ours, theirs in zip(model[index].buffers(), whole[index].buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert list(pipeline.state_dict()) == names == list(whole.state_dict())
    before = model[1].running_mean.clone()
    pipeline.eval()(x)
    assert torch.equal(model[1].running_mean, before)


def model_head(model, part):
    """The first layers with a micro-batch's own statistics, without moving any."""
    hidden = nn.functional.batch_norm(
        model[0](part), None, None, model[1].weight, model[1].bias, training=True
    )
    return hidden.relu()


class Residual(nn.Module):
    """Traced by export; `norm` is the class of its normalisation."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), norm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.norm(x).relu() + x)


class OwnNorm(nn.BatchNorm1d):
    """Traced into operations, since it may be anything."""


def residual(norm):
    torch.manual_seed(0)
    model = Residual(norm).double()
    sample = (torch.rand(4, 4, dtype=torch.double),)
    case = Case("residual", make_case("mlp").spec, model, sample, None)
    return model, make_plan(case, 2, num_microbatches=2)


@pytest.mark.parametrize("checkpoint", MODES)
def test_statistics_of_an_exported_model_are_deferred_too(checkpoint):
    """They were refused as operations, although the model's own modules are called."""
    model, plan = residual(nn.BatchNorm1d)
    whole = copy.deepcopy(model)
    pipeline = Pipeline(model, plan, checkpoint=checkpoint, batch_statistics="deferred")
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.rand(8, 4, dtype=torch.double) * 5
        pipeline(x).sum().backward()
        whole(x)
    assert model.norm.num_batches_tracked == 2
    for ours, theirs in zip(model.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_statistics_that_cannot_be_deferred_are_refused():
    model, plan = residual(OwnNorm)
    with pytest.raises(PlanMismatch, match=r"norm \(OwnNorm\) was captured as single operations"):
        Pipeline(model, plan, batch_statistics="deferred")
    Pipeline(model, plan)(torch.rand(8, 4, dtype=torch.double))
    assert model.norm.num_batches_tracked == 2


def test_a_failed_step_leaves_deferred_layers_as_they_were():
    model, plan = small()
    pipeline = Pipeline(model, plan, batch_statistics="deferred")
    with pytest.raises(RuntimeError):
        pipeline(torch.rand(8, 5, dtype=torch.double))
    assert all(m.track_running_stats for m in model if isinstance(m, nn.BatchNorm1d))
    assert not model[1]._forward_pre_hooks
    assert model[1].num_batches_tracked == 0


@pytest.mark.parametrize("checkpoint", MODES)
def test_keyed_dropout_does_not_depend_on_the_plan(checkpoint):
    def trained(balance, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
        case = Case("drop", make_case("mlp").spec, model, torch.rand(2, 4), None)
        plan = make_plan(case, len(balance), num_microbatches=4, balance=balance)
        pipeline = Pipeline(model, plan, keyed_dropout=7, **options)
        torch.manual_seed(len(balance))  # of no consequence
        x = torch.linspace(0, 1, 32).reshape(8, 4)
        outputs = [pipeline(x), pipeline(x)]
        sum(output.pow(2).sum() for output in outputs).backward()
        assert pipeline.steps == 2
        return [*outputs, *(parameter.grad for parameter in model.parameters())]

    found = trained([2, 2], checkpoint=checkpoint)
    assert not torch.equal(found[0], found[1])
    for ours, theirs in zip(found, trained([4]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_no_module_or_policy_is_refused():
    model, plan = small()
    with pytest.raises(InvalidInput, match="is a function"):
        Pipeline(small, plan)
    with pytest.raises(InvalidInput, match="give one of microbatch, deferred"):
        Pipeline(model, plan, batch_statistics="never")


def test_buffers_of_any_module_move_once():
    model = nn.Sequential(nn.Linear(2, 2), Counter(), nn.Linear(2, 2))
    case = Case("counter", make_case("mlp").spec, model, torch.rand(2, 2), None)
    plan = make_plan(case, 2, num_microbatches=4)
    before = int(model[1].calls)
    Pipeline(model, plan, checkpoint="always")(torch.rand(8, 2)).sum().backward()
    assert model[1].calls == before + 4


class SizeDependent(nn.Module):
    """Divides by the length of the sequence, which the exported graph holds as a number."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, tokens):
        hidden = torch.relu(self.embedding(tokens))
        length = tokens.shape[1]
        return self.head(hidden.sum(1) / length if length > 2 else hidden[:, 0])


def run_in_processes(model, plan, batch):
    """Evaluate as the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with DistributedPipeline(model, plan, loss_fn=None) as pipeline:
            return pipeline.evaluate(batch)
    finally:
        dist.destroy_process_group()


def run_built(model, plan, batch):
    training = build(plan, model, loss_fn=mean_output, accumulate=2)
    return training.step(batch, target=batch)


def mean_output(output, _):
    return output.mean()


WAYS = {
    "pipeline": lambda model, plan, batch: Pipeline(model, plan)(batch),
    "build": run_built,
    "inference": lambda model, plan, batch: next(InferencePipeline(model, plan).map([batch])),
    "verify": lambda model, plan, batch: verify(model, plan, batch, batch, mean_output),
    "processes": run_in_processes,
}


@pytest.mark.parametrize("way", WAYS)
def test_another_sequence_length_than_captured_is_refused(way):
    """It was accepted by the first two, and the output was 0.3 off."""
    sample = torch.randint(0, 50, (2, 8))
    case = Case("lengths", make_case("mlp").spec, SizeDependent(), (sample,), None)
    num_stages = 1 if way == "processes" else 2
    plan = make_plan(case, num_stages, num_microbatches=2)
    fits, longer = torch.randint(0, 50, (4, 8)), torch.randint(0, 50, (4, 12))
    run = WAYS[way]
    run(case.model, plan, fits)
    words = (
        r"'tokens' has shape \(4, 12\), but the model was captured at \(2, 8\), and only its "
        "first dimension, the samples, may differ"
    )
    with pytest.raises(InvalidInput, match=words):
        run(case.model, plan, longer)
    with pytest.raises(InvalidInput, match=r"'tokens' has the dtype int32, but .* pass int64"):
        run(case.model, plan, fits.int())


class SkipsBlocks(nn.Module):
    """Draws from numpy's generator which of its layers to run, as layer drop does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if numpy.random.uniform() < 0.5:
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_recomputation_repeats_the_numbers_of_numpy(checkpoint):
    """The recomputed forward ran other layers than the first, whose loss it was to explain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), SkipsBlocks(), nn.Linear(4, 4))
    plan = make_plan(Case("skips", make_case("mlp").spec, model, torch.randn(2, 4), None), 2)
    pipeline, x = Pipeline(model, plan, checkpoint=checkpoint), torch.randn(8, 4)
    numpy.random.seed(0)
    expected = torch.cat([model(part) for part in x.chunk(plan.num_microbatches)])
    gradients = torch.autograd.grad(expected.sum(), [*model.parameters()], allow_unused=True)
    numpy.random.seed(0)
    pipeline(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, 0 * parameter if gradient is None else gradient)


class OddNames(nn.Module):
    """Children, a buffer and a parameter with the names of a pipeline's own attributes."""

    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.plan, self.steps = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("aux_loss", torch.ones(4))

    def forward(self, x):
        return self.plan(self.stages(x)) * self.steps + self.aux_loss


def test_children_may_have_the_names_of_a_pipelines_own_attributes():
    """``KeyError: attribute 'stages' already exists``."""
    model, x = OddNames(), torch.randn(8, 4)
    plan = make_plan(Case("odd", make_case("mlp").spec, model, x[:2], None), 2)
    pipeline = Pipeline(model, plan)
    torch.testing.assert_close(pipeline(x), model(x))
    assert {*dict(pipeline.named_parameters())} == {*dict(model.named_parameters())}
    assert {*pipeline.state_dict()} == {*model.state_dict()}
    assert (pipeline.plan, len(pipeline.stages), float(pipeline.aux_loss)) == (plan, 2, 0.0)
    twin = copy.deepcopy(pipeline)
    torch.testing.assert_close(twin(x), model(x))


@pytest.mark.parametrize("mode", MODES)
def test_weights_that_live_elsewhere_are_copied_once_a_forward(monkeypatch, mode):
    """A tied weight was copied to its second stage's device for every micro-batch."""
    made = []

    class Copies(pipeline_module._TiedCopies):
        """Takes every weight for one on another device."""

        def get(self):
            if self._made is None:
                made.append(self._stage)
                with torch.set_grad_enabled(self._trains):
                    self._made = {n: p.clone() for n, p in self._stage.named_parameters()}
            return self._made

    monkeypatch.setattr(pipeline_module, "_TiedCopies", Copies)
    model, plan = small()
    expected = copy.deepcopy(model)
    pipeline = Pipeline(model, recomputing(plan, mode, mode, mode))
    x = torch.rand(8, 4).double()
    pipeline(x).pow(2).mean().backward()
    in_pieces(expected, x, 4).pow(2).mean().backward()
    assert len(made) == len(set(map(id, made))) == 3
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Tied(nn.Module):
    """Its first and its last layer share a weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).tanh())


@pytest.mark.parametrize("mode", MODES)
def test_a_tied_weight_goes_to_its_other_device_once_a_step(monkeypatch, mode):
    """``meta`` plays the second device."""
    model, x = Tied(), torch.randint(0, 8, (8, 3))
    case = Case("tied", make_case("mlp").spec, model, x[:2], None)
    plan = recomputing(make_plan(case, 2), mode, mode)
    pipeline, copied, to = Pipeline(model, plan), [], torch.Tensor.to

    def count(tensor, *args, **kwargs):
        if tensor is model.head.weight:
            copied.append(args)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", count)
    pipeline._devices = [torch.device("cpu"), torch.device("meta")]
    for step in (1, 2):
        assert pipeline(x).is_meta
        assert copied == [(torch.device("meta"),)] * step


def test_a_copy_made_in_a_run_without_a_graph_has_one_for_the_recomputation():
    stage = nn.Linear(2, 2)
    copies = pipeline_module._TiedCopies(stage, torch.device("meta"))
    with torch.no_grad():
        first = copies.get()
    assert copies.get() is first
    assert first["weight"].is_meta
    assert first["weight"].requires_grad


def test_a_compiled_pipeline_runs_as_it_is():
    model, plan = small()
    compiled = torch.compile(Pipeline(copy.deepcopy(model), plan), backend="eager")
    x = torch.rand(8, 4, dtype=torch.double)
    torch.testing.assert_close(compiled(x), in_pieces(model, x, 4))
