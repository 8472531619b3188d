"""Example bodies for every POST, shown in the documentation and sent by a test."""

from __future__ import annotations

from math import prod
from typing import Any

MEBIBYTE = 2**20


def _layer(index: int, forward_s: float) -> dict[str, Any]:
    return {
        "layer": {
            "name": f"blocks.{index}",
            "module_type": "Linear",
            "module_fqns": [f"blocks.{index}"],
            "parameter_bytes": 4 * MEBIBYTE,
        },
        "forward": {"median_s": forward_s, "spread_s": 0.00001, "repeats": 20},
        "backward": {"median_s": 2 * forward_s, "spread_s": 0.00002, "repeats": 20},
        "saved_activation_bytes": MEBIBYTE,
        "output_bytes": MEBIBYTE,
    }


def _boundary(after: int) -> dict[str, Any]:
    shape = [256, 1024]
    tensor = {"name": f"x{after}", "shape": shape, "dtype": "float32", "requires_grad": True}
    return {"after": after, "tensors": [tensor]}


def example_profile() -> dict[str, Any]:
    """Return four layers, each with 1 MiB of activations and 4 MiB of parameters."""
    times_s = (0.001, 0.001, 0.001, 0.003)
    return {
        "schema_version": "stagewright.profile/1",
        "model": "Example",
        "layers": [_layer(index, time_s) for index, time_s in enumerate(times_s)],
        "boundaries": [_boundary(after) for after in range(len(times_s) - 1)],
        "parameters": [
            {
                "names": [f"blocks.{index}.weight"],
                "size_bytes": 4 * MEBIBYTE,
                "numel": MEBIBYTE,
                "layers": [index],
            }
            for index in range(len(times_s))
        ],
        "storages": [{"size_bytes": MEBIBYTE, "layers": [index]} for index in range(len(times_s))],
    }


def measure_example() -> dict[str, Any]:
    """Return a request to measure a small MLP on the server, which takes seconds."""
    return {
        "model": {"family": "mlp", "config": {"hidden_size": 128, "num_layers": 4}},
        "sample": {"inputs": {"input": {"shape": [8, 64]}}, "seed": 0},
        "profiling": {"device": "cpu", "budget_s": 1},
        "cluster": "2xcpu",
    }


def estimate_example() -> dict[str, Any]:
    """Return a request to estimate a small GPT-2, which takes seconds."""
    return {
        "model": {"family": "gpt2", "config": {"n_layer": 4, "n_embd": 256, "n_head": 4}},
        "estimate": {"device": "H100", "precision": "bfloat16"},
        "cluster": "2xH100",
    }


def _tensor(name: str, size: int, *, requires_grad: bool = True) -> dict[str, Any]:
    return {"name": name, "shape": [8, size], "dtype": "float32", "requires_grad": requires_grad}


def example_graph() -> dict[str, Any]:
    """Return two linear layers in the form of ``stagewright capture``."""
    names = ("first", "second")
    x = _tensor("x", 64, requires_grad=False)
    tensors = {f"{name}.weight": [64, 64] for name in names} | {f"{n}.bias": [64] for n in names}
    return {
        "schema_version": "stagewright.graph/1",
        "model": "TwoLayers",
        "mode": "export",
        "inputs": [x],
        "outputs": [_tensor("second", 64, requires_grad=False)],
        "layers": [
            {
                "name": name,
                "module_type": "Linear",
                "module_fqns": [name],
                "parameter_bytes": 4 * 64 * 65,
            }
            for name in names
        ],
        "edges": [
            {"source": -1, "target": 0, "tensor": x},
            {"source": 0, "target": 1, "tensor": _tensor("first", 64)},
        ],
        "boundaries": [{"after": 0, "tensors": [_tensor("first", 64)]}],
        "parameters": [
            {
                "names": [name],
                "size_bytes": 4 * prod(shape),
                "numel": prod(shape),
                "layers": [names.index(name.partition(".")[0])],
            }
            for name, shape in tensors.items()
        ],
        "operations": [
            {
                "name": name,
                "target": "aten.linear.default",
                "kind": "function",
                "inputs": [source],
                "outputs": [_tensor(name, 64, requires_grad=False)],
                "layer": layer,
                "arguments": [
                    {"input": source} if layer == 0 else {"node": source},
                    {"state": f"{name}.weight"},
                    {"state": f"{name}.bias"},
                ],
            }
            for layer, (source, name) in enumerate((("x", "first"), ("first", "second")))
        ],
        "rebuildable": True,
        "state": [
            {"names": [name], "shape": shape, "dtype": "float32", "requires_grad": True}
            for name, shape in tensors.items()
        ],
        "returns": [{"node": "second"}],
        "output_paths": [[]],
        "input_structure": '{"positional": ["x"], "keyword": []}',
        "sample": {"inputs": {"x": {"shape": [8, 64]}}},
    }


PLAN_EXAMPLES: dict[str, Any] = {
    "profile": {
        "summary": "Plan a profile onto two devices of 24 GB",
        "value": {
            "profile": example_profile(),
            "cluster": "2x24GB",
            "options": {"num_microbatches": 8, "schedule": "1f1b"},
        },
    },
    "replicas": {
        "summary": "Two nodes of two devices; several devices a stage, recomputation if needed",
        "value": {
            "profile": example_profile(),
            "cluster": "2x2x24GB",
            "options": {"num_microbatches": 8, "max_replicas": None, "recompute": "auto"},
            "deadline_s": 5,
        },
    },
    "infeasible": {
        "summary": "The answer may be that nothing fits, with both numbers",
        "value": {
            "profile": example_profile(),
            "cluster": {
                "devices": [
                    {"name": "small:0", "memory_bytes": 8 * MEBIBYTE},
                    {"name": "small:1", "memory_bytes": 8 * MEBIBYTE},
                ],
                "levels": [{"group_size": 2}],
            },
        },
    },
    "estimate": {
        "summary": "Estimate a published model for devices that are not there (needs torch)",
        "value": estimate_example(),
    },
    "graph": {
        "summary": "Estimate a captured model; nothing of it is run (needs torch)",
        "value": {
            "graph": example_graph(),
            "estimate": {"device": "H100"},
            "cluster": "2xH100",
        },
    },
    "measure": {
        "summary": "Measure a small model on the server's CPU, then plan it (needs torch)",
        "value": measure_example(),
    },
}
"""Examples for ``POST /v1/plans``."""

_MEASURED = {name: value for name, value in measure_example().items() if name != "cluster"}
JOB_EXAMPLES: dict[str, Any] = {
    "mlp": {"summary": "Measure a small MLP on the server's CPU", "value": _MEASURED}
}
"""Examples for ``POST /v1/profile-jobs``."""

GRAPH_EXAMPLES: dict[str, Any] = {
    "graph": {"summary": "Two linear layers", "value": example_graph()}
}
"""Examples for ``POST /v1/graphs``."""

SIMULATION_EXAMPLES: dict[str, Any] = {
    "balance": {
        "summary": "What a split of one's own would cost",
        "value": {
            "profile": example_profile(),
            "balance": [2, 2],
            "cluster": "2x24GB",
            "timeline": True,
        },
    }
}
"""Examples for ``POST /v1/simulations``."""

COMPARISON_EXAMPLES: dict[str, Any] = {
    "two": {
        "summary": "Two stored plans",
        "value": {
            "plan_ids": [
                "plan_00000000000000000000000000000001",
                "plan_00000000000000000000000000000002",
            ]
        },
    }
}
"""Examples for ``POST /v1/comparisons``."""

PROFILE_EXAMPLES: dict[str, Any] = {
    "profile": {"summary": "Four layers", "value": example_profile()}
}
"""Examples for ``POST /v1/profiles``."""

KEY_EXAMPLES: dict[str, Any] = {
    "plans": {
        "summary": "Reads and plans, a request a second",
        "value": {
            "name": "nightly plans",
            "scopes": ["read", "plan"],
            "quotas": {"max_requests_per_minute": 60, "max_unfinished_jobs": 4},
        },
    }
}
"""Examples for ``POST /v1/api-keys``."""

LABEL_EXAMPLES: dict[str, Any] = {
    "labels": {
        "summary": "Name and tag a plan",
        "value": {"name": "nightly run", "tags": ["team-a", "h100"], "notes": "Replaces May's."},
    }
}

PROJECT_EXAMPLES: dict[str, Any] = {
    "project": {"summary": "A project for a team", "value": {"name": "team-a"}}
}
