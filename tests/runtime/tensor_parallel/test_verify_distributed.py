"""Verifying plans on real ranks: equal where all is well, and not where a sum is left out."""

import json

import pytest

from tests.runtime.forked import run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

WORKER = "tests.runtime.tensor_parallel.verify_worker"
EXACT = 1e-12


def verified(executable, cases):
    """Return, for each case, what its ranks found."""
    printed = run_worker(executable, WORKER, json.dumps(cases), timeout_s=500)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    found = [[line for line in lines if line["case"] == number] for number in range(len(cases))]
    for ranks in found:
        assert all(line["gradients"] == ranks[0]["gradients"] for line in ranks), "all know all"
    return found


def test_right_plans_are_equal(forking_executable):
    """With tied weights, dropout on split layers, shards of split weights, and statistics."""
    cases = [
        ["gpt2", [["t2", "t1"]], "none", 0.3],
        ["gpt2", [["t2f2"]], "none", 0.0],
        ["resnext", [["t2", "r2"], "gpipe", "always"], "none", 0.0],
    ]
    for case, ranks in zip(cases, verified(forking_executable, cases), strict=True):
        assert len(ranks) == (3 if case[1] == [["t2", "t1"]] else 4)
        assert ranks[0]["worst"] <= EXACT, (case, ranks[0])
        assert not ranks[0]["missing"]
        assert not ranks[0]["unknown"]
        assert len(ranks[0]["gradients"]) > 10
        assert bool(ranks[0]["buffers"]) == (case[0] == "resnext")


def test_an_exchange_without_its_sum_is_found(forking_executable):
    cases = [
        ["llama", [["t2"]], "products are not summed", 0.0],
        ["llama", [["t2"]], "gradients of inputs are not summed", 0.0],
        ["llama", [["t2", "r2"]], "replicas do not meet", 0.0],
        ["llama", [["t2", "t1"], "forward_only"], "none", 0.0],
        ["llama", [["t2", "t1"], "forward_only"], "products are not summed", 0.0],
    ]
    found = [each[0] for each in verified(forking_executable, cases)]
    forward, backward, replicas, right, wrong = found
    assert not right["gradients"]
    assert right["worst"] <= EXACT
    assert wrong["loss"] > 1e-6
    assert forward["loss"] > 1e-6
    assert forward["worst"] > 1
    # The losses are right: only gradients tell.
    assert backward["loss"] <= EXACT
    assert backward["gradients"]["model.embed_tokens.weight"] > 0.1
    # The first stage's layers are split and right, and the second's replicas are apart.
    assert replicas["gradients"]["model.layers.0.self_attn.q_proj.weight"] <= EXACT
    assert replicas["gradients"]["lm_head.weight"] > 0.1
