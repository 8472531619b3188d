"""The measuring process: a request in, a profile out, errors as JSON."""

import io
import json
import subprocess
import sys

import pytest
import torch

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput, MeasurementError
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.requests import MeasureRequest, ProfilingOptions
from stagewright.profiler import measure_worker as child
from stagewright.profiler.machine.memory import is_out_of_memory
from stagewright.profiler.machine.provenance import check_device
from stagewright.profiler.models.families import expected_inputs, expected_target
from stagewright.profiler.worker_protocol import measure_apart

REQUEST = {
    "model": {"family": "mlp", "config": {"num_layers": 2, "input_size": 8}},
    "sample": {
        "inputs": {"input": {"shape": [4, 8]}},
        "target": {"shape": [4], "dtype": "int64", "fill": "randint", "high": 10},
    },
    "profiling": {"budget_s": 0.01, "num_threads": 1, "busy_neighbours": 1},
}


def run_child(request):
    return subprocess.run(
        [sys.executable, "-m", "stagewright.profiler.measure_worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_request_becomes_a_profile():
    result = run_child(REQUEST)
    assert result.returncode == 0, result.stderr
    found = Profile.from_json(result.stdout)
    assert found.spec is not None
    assert found.spec.family == "mlp"
    assert found.loss is not None
    assert found.provenance.busy_neighbours == 1
    last = json.loads(result.stderr.strip().splitlines()[-1])
    assert last["done"] == last["total"]


def mlp_graph():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return trace(model, torch.randn(4, 8), check=False).graph


def test_a_graph_becomes_a_profile_in_a_process_of_its_own():
    request = MeasureRequest(graph=mlp_graph(), profiling=ProfilingOptions(budget_s=0.01))
    told = []
    found = child.measure(request, lambda *message: told.append(message))
    assert [layer.layer.name for layer in found.layers] == ["0", "1", "2"]
    assert all(layer.forward.median_s > 0 for layer in found.layers)
    assert told[-1] == (3, 3, "all layers")


def test_a_graph_that_cannot_be_run_is_refused_by_the_process():
    graph = mlp_graph()
    stripped = graph.model_copy(update={"rebuildable": False})
    request = MeasureRequest(graph=stripped)
    with pytest.raises(InvalidInput, match="capture the model again") as refused:
        child.measure(request)
    assert refused.value.field == "/graph/rebuildable"


CRASH = (
    "import ctypes, sys; sys.stdin.read(); "
    'print(\'{"done": 1, "total": 3, "layer": "h.1"}\', file=sys.stderr, flush=True); '
    "ctypes.string_at(0)"
)


def test_a_crash_costs_only_the_process_that_measured():
    request = MeasureRequest(graph=mlp_graph())
    with pytest.raises(
        MeasurementError,
        match=r"was ended by SIGSEGV .signal 11., while it measured h\.1; an operator",
    ):
        measure_apart(request, command=[sys.executable, "-c", CRASH])


def test_a_process_that_fails_to_start_says_why():
    command = [sys.executable, "-c", "raise SystemExit('no torch here')"]
    with pytest.raises(MeasurementError, match="exit code 1: no torch here, before it measured"):
        measure_apart(MeasureRequest(graph=mlp_graph()), command=command)


@pytest.mark.parametrize("fields", [{}, {"model": REQUEST["model"]}])
def test_a_request_holds_a_model_with_its_sample_or_a_graph(fields):
    with pytest.raises(ValueError, match="a model and its sample, or a graph"):
        MeasureRequest.model_validate(fields)
    with pytest.raises(ValueError, match="a graph alone"):
        MeasureRequest.model_validate({**REQUEST, "graph": mlp_graph().model_dump()})


def test_an_error_is_the_last_line(forked_python):
    result = run_child({**REQUEST, "sample": {"inputs": {"input": {"shape": [4, 9]}}}})
    assert result.returncode == 1
    assert result.stdout == ""
    last = json.loads(result.stderr.strip().splitlines()[-1])
    assert last["kinds"] == ["InvalidInput"]
    assert last["details"]["field"] == "/sample/inputs"
    assert "itself fails on this sample" in last["message"]
    assert "mlp takes 'input' of shape (micro-batch, 8)" in last["message"]


def test_an_error_of_no_one_field_names_none(monkeypatch, capsys):
    def fail(*_):
        raise MeasurementError("blocks.3 failed")

    monkeypatch.setattr(child, "measure_here", fail)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(REQUEST)))
    assert child.main() == 1
    told = MeasurementError("blocks.3 failed").to_record()
    assert json.loads(capsys.readouterr().err) == json.loads(json.dumps(told.as_dict))


MLP = REQUEST["model"]
GPT2 = {
    "family": "gpt2",
    "config": {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 50, "n_positions": 16},
}


def tensor(*shape, **fields):
    return {"shape": shape, **fields}


def indices(*shape, high):
    """Numbers of which at least one is the highest."""
    return tensor(*shape, dtype="int64", fill="randint", low=high - 1, high=high)


REFUSED = [
    (MLP, {"inputs": {"foo": tensor(4, 8)}}, "inputs", "forward takes input, not 'foo'"),
    (MLP, {"inputs": {"input": tensor(4, 8), "foo": tensor(4, 8)}}, "inputs", "not 'foo'"),
    (MLP, {"inputs": {"input": tensor(4, 9)}}, "inputs", "(micro-batch, 8)"),
    (MLP, {"inputs": {"input": tensor(4, 8)}, "target": indices(7, high=10)}, "target", "(7)"),
    (MLP, {"inputs": {"input": tensor(4, 8)}, "target": indices(4, high=11)}, "target", "10 at"),
    (GPT2, {"inputs": {"input_ids": indices(1, 8, high=51)}}, "inputs", "high 50"),
    (GPT2, {"inputs": {"input_ids": indices(1, 17, high=50)}}, "inputs", "length at most 16"),
    (GPT2, {"inputs": {"input_ids": tensor(1, 8)}}, "inputs", "dtype int64"),
    (GPT2, {"inputs": {"input_id": indices(1, 8, high=50)}}, "inputs", "forward takes input_ids,"),
    (
        GPT2,
        {"inputs": {"input_ids": indices(1, 8, high=50), "foo": indices(1, 8, high=50)}},
        "inputs",
        "not 'foo'",
    ),
]


@pytest.mark.parametrize(("model", "sample", "field", "said"), REFUSED)
def test_a_sample_that_does_not_fit_names_its_field_and_the_way_out(model, sample, field, said):
    request = MeasureRequest.model_validate({**REQUEST, "model": model, "sample": sample})
    with pytest.raises(InvalidInput) as refused:
        child.measure(request)
    assert refused.value.field == f"/sample/{field}"
    assert said in str(refused.value)


def test_a_fill_beyond_64_bits_is_refused():
    ids = {"shape": [4, 8], "dtype": "int64", "fill": "randint", "high": 2**64}
    request = MeasureRequest.model_validate({**REQUEST, "sample": {"inputs": {"input": ids}}})
    with pytest.raises(InvalidInput, match="64-bit") as refused:
        child.measure(request)
    assert refused.value.field == "/sample"


FITTING = [
    ({"family": "mlp", "config": {"num_layers": 2}}, {"input": tensor(2, 64)}, indices(2, high=10)),
    (
        {"family": "resnet", "config": {"depth": 18, "width": 4, "num_classes": 5}},
        {"x": tensor(2, 3, 32, 32)},
        indices(2, high=5),
    ),
    (
        {"family": "unet", "config": {"depth": 2, "width": 2}},
        {"x": tensor(1, 3, 8, 8)},
        indices(1, 8, 8, high=2),
    ),
    (GPT2, {"input_ids": indices(1, 16, high=50)}, indices(1, 16, high=50)),
]


@pytest.mark.parametrize(("model", "inputs", "target"), FITTING)
def test_what_the_words_of_a_refusal_ask_for_is_accepted(model, inputs, target):
    sample = {"inputs": inputs, "target": target}
    request = MeasureRequest.model_validate({**REQUEST, "model": model, "sample": sample})
    assert child.measure(request).loss is not None
    (name,) = inputs
    assert f"takes {name!r}" in expected_inputs(request.model)
    assert f"high {target['high']} at most" in expected_target(request.model)


@pytest.mark.parametrize(
    ("count", "device", "said"),
    [(0, "cuda", "no CUDA device"), (0, "cuda:1", "no CUDA device"), (2, "cuda:2", "to cuda:1")],
)
def test_a_device_that_is_not_here_is_refused(monkeypatch, count, device, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    request = MeasureRequest.model_validate({**REQUEST, "profiling": {"device": device}})
    with pytest.raises(InvalidInput, match=said) as refused:
        child.measure(request)
    assert refused.value.field == "/profiling/device"


def test_devices_that_are_here_are_taken(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [check_device(device) for device in ("cpu", "cuda", "cuda:1")] == [
        "cpu",
        "cuda",
        "cuda:1",
    ]


def test_running_out_of_memory_is_told_from_other_errors():
    """Cause: torch's CPU allocator says "can't allocate memory" on Linux, and no class of it."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**55)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
