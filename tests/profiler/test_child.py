"""The measuring process: a request in, a profile out, errors as JSON."""

import json
import subprocess
import sys

from stagewright.core.profile import Profile

REQUEST = {
    "model": {"family": "mlp", "config": {"num_layers": 2, "input_size": 8}},
    "sample": {
        "inputs": {"x": {"shape": [4, 8]}},
        "target": {"shape": [4], "dtype": "int64", "fill": "randint", "high": 10},
    },
    "profiling": {"budget_s": 0.01, "num_threads": 1, "busy_neighbours": 1},
}


def run_child(request):
    return subprocess.run(
        [sys.executable, "-m", "stagewright.profiler.child"],
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


def test_an_error_is_the_last_line():
    result = run_child({**REQUEST, "sample": {"inputs": {"x": {"shape": [4, 9]}}}})
    assert result.returncode == 1
    assert result.stdout == ""
    last = json.loads(result.stderr.strip().splitlines()[-1])
    assert last["error"] == "InvalidInput"
    assert "itself fails on this sample" in last["message"]


def test_a_target_that_does_not_fit_is_an_error_with_words():
    sample = {**REQUEST["sample"], "target": {**REQUEST["sample"]["target"], "shape": [7]}}
    result = run_child({**REQUEST, "sample": sample})
    last = json.loads(result.stderr.strip().splitlines()[-1])
    assert last["error"] == "MeasurementError"
    assert "the loss failed" in last["message"]
