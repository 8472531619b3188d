"""A profile holds what every layer costs, and leaves the model exactly as it was."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.program.program import storage_key
from stagewright.core.errors import InvalidInput
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.estimates.estimate import estimate
from stagewright.profiler.measure.profile import profile
from tests.state_checks import snapshot
from tests.torch_models import call, make_case

QUICK = ProfilingOptions(budget_s=0.01, num_threads=1)


@pytest.mark.parametrize("name", ["mlp", "resnet", "unet", "gpt2"])
def test_profiling_leaves_the_model_bit_identical(name):
    case = make_case(name)
    parameter = next(case.model.parameters())
    parameter.grad = torch.full_like(parameter, 0.5)
    case.model.eval()
    before = snapshot(case.model)
    profile(case.model, case.sample, options=QUICK)
    assert snapshot(case.model) == before


def test_random_state_is_restored():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = snapshot(model)
    profile(model, torch.ones(2, 4), options=QUICK)
    assert snapshot(model) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_model_is_restored_when_measuring_is_cut_short(error):
    case = make_case("resnet")
    before = snapshot(case.model)

    def interrupt(done, total, layer):
        raise error

    with pytest.raises(error):
        profile(case.model, case.sample, options=QUICK, progress=interrupt)
    assert snapshot(case.model) == before


def test_every_layer_is_measured_forwards_and_backwards():
    case = make_case("resnet")
    found = profile(case.model, case.sample, options=QUICK, spec=case.spec)
    assert all(entry.forward.median_s > 0 for entry in found.layers)
    assert all(entry.backward.median_s > 0 for entry in found.layers)
    assert all(entry.forward.repeats >= 3 for entry in found.layers)
    assert all(entry.output_bytes > 0 for entry in found.layers)
    total = sum(parameter.numel() * 4 for parameter in case.model.parameters())
    assert sum(entry.layer.parameter_bytes for entry in found.layers) == total
    assert found.reconciliation is not None
    assert Profile.from_json(found.to_json()) == found


def test_a_linear_layer_costs_what_it_must():
    """16 samples x 32 floats in, x 64 out: every byte can be counted by hand."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    found = profile(model, torch.randn(16, 32), options=QUICK)
    first, tanh, last = found.layers
    assert first.layer.parameter_bytes == 4 * (32 * 64 + 64)
    assert first.output_bytes == tanh.output_bytes == 4 * 16 * 64
    assert first.saved_activation_bytes == 0  # it keeps the model's input, which is there anyway
    assert tanh.saved_activation_bytes == 4 * 16 * 64  # its own output
    assert last.saved_activation_bytes == 4 * 16 * 64  # the same storage
    assert [(entry.size_bytes, entry.layers) for entry in found.storages] == [(4 * 16 * 64, (1, 2))]
    assert [boundary.forward_bytes for boundary in found.boundaries] == [4 * 16 * 64] * 2


@pytest.mark.parametrize("name", ["mlp", "resnet", "unet", "gpt2"])
def test_storages_add_up_to_what_autograd_holds(name):
    """Against an independent count over one forward of the untouched model."""
    case = make_case(name)
    found = profile(case.model, case.sample, options=QUICK)
    inputs = case.sample.values() if isinstance(case.sample, dict) else case.sample
    resident = {storage_key(t) for t in (*case.model.parameters(), *case.model.buffers(), *inputs)}
    kept, sizes = [], {}

    def pack(tensor):
        if storage_key(tensor) not in resident:
            kept.append(tensor)
            sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(case.model, case.sample)
    total = sum(entry.size_bytes for entry in found.storages)
    assert total == pytest.approx(sum(sizes.values()), rel=0.01)


def test_the_loss_is_a_cost_of_its_own():
    case = make_case("gpt2")
    target = case.sample["input_ids"]
    found = profile(case.model, case.sample, options=QUICK, loss_fn=case.loss_fn, target=target)
    assert found.loss is not None
    assert found.loss.forward.median_s > 0
    assert found.loss.saved_activation_bytes > 0
    with pytest.raises(InvalidInput, match="target"):
        profile(case.model, case.sample, options=QUICK, loss_fn=case.loss_fn)


LOSSES = {
    "a vector": (
        lambda output, target: (output - target).square().mean(1),
        r"returned 2 numbers \(shape \(2,\)\).*reduce them",
    ),
    "a Python number": (
        lambda output, target: (output - target).square().mean().item(),
        "returned a float; return the loss alone",
    ),
    "the loss and more": (
        lambda output, target: ((output - target).square().mean(), output),
        "returned a tuple; return the loss alone",
    ),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_is_one_number(what):
    """A vector was once summed without a word."""
    loss_fn, said = LOSSES[what]
    model = nn.Sequential(nn.Linear(4, 4))
    sample, target = torch.randn(2, 4), torch.randn(2, 4)
    before = snapshot(model)
    with pytest.raises(InvalidInput, match=said):
        profile(model, sample, options=QUICK, loss_fn=loss_fn, target=target)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("value", "loss_fn", "said"),
    [
        (float("nan"), None, "the model's output on this sample holds NaN"),
        (float("nan"), nn.functional.mse_loss, "the model's output on this sample holds NaN"),
        (1.0, lambda x, y: nn.functional.mse_loss(x, y) / 0, "the loss of this sample is inf"),
        (1.0, nn.functional.mse_loss, None),
        (float("-inf"), None, None),
    ],
)
def test_numbers_that_are_none_are_noted(value, loss_fn, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.no_grad():
        model[2].bias[0] = value
    target = None if loss_fn is None else torch.randn(2, 4)
    found = profile(model, torch.randn(2, 4), options=QUICK, loss_fn=loss_fn, target=target)
    noted = [note for note in found.notes if "check the sample" in note]
    assert [note.partition(";")[0] for note in noted] == ([said] if said else [])


def test_what_is_no_module_is_refused():
    """A function once failed for want of an attribute ``parameters``."""

    def make_model():
        return nn.Linear(4, 4)

    for model, said in (
        (make_model, "make_model is a function.*give the module that it returns"),
        (nn.Linear, r"Linear is a class.*create an instance: Linear\(...\)"),
        ("model.pt", "not a str"),
    ):
        with pytest.raises(InvalidInput, match=said):
            profile(model, torch.randn(2, 4), options=QUICK)
        with pytest.raises(InvalidInput, match=said):
            estimate(model, torch.randn(2, 4), device="H100")
        with pytest.raises(InvalidInput, match=said):
            trace(model, torch.randn(2, 4))


def test_progress_ends_at_its_total():
    calls = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    profile(model, torch.randn(2, 4), options=QUICK, progress=lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)


def test_a_model_elsewhere_is_refused():
    with pytest.raises(InvalidInput, match="move it"):
        profile(
            nn.Sequential(nn.Linear(4, 4)),
            torch.randn(2, 4),
            options=ProfilingOptions(device="cuda"),
        )


def test_gradients_are_on_whatever_the_caller_has():
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    with torch.no_grad():
        found = profile(model, torch.randn(16, 32), options=QUICK)
        assert not torch.is_grad_enabled()
    assert found.storages
    assert found.layers[1].saved_activation_bytes == 4 * 16 * 64


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(InvalidInput, match="in inference mode"):
        profile(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), options=QUICK)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "resnet", "unet", "gpt2"])
def test_cuda_takes_the_same_path(name):
    case = make_case(name)
    model = case.model.cuda()
    inputs = case.sample
    moved = (
        {key: value.cuda() for key, value in inputs.items()}
        if isinstance(inputs, dict)
        else tuple(value.cuda() for value in inputs)
    )
    found = profile(model, moved, options=ProfilingOptions(budget_s=0.5, device="cuda"))
    assert found.provenance.device.startswith("cuda")
    assert all(entry.forward.median_s > 0 for entry in found.layers)
