"""A working example for every POST; the documentation shows them and a test sends them."""

from __future__ import annotations

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
    """Four layers of one MiB of activations and four of parameters, the last the slowest."""
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


def plan_examples() -> dict[str, Any]:
    """For ``POST /v1/plans``."""
    return {
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
        "measure": {
            "summary": "Measure a small model on the server's CPU, then plan it (needs torch)",
            "value": measure_example(),
        },
    }


def measure_example() -> dict[str, Any]:
    """A request that has the server measure a small MLP, which takes seconds."""
    return {
        "model": {"family": "mlp", "config": {"hidden_size": 128, "num_layers": 4}},
        "sample": {"inputs": {"input": {"shape": [8, 64]}}, "seed": 0},
        "profiling": {"device": "cpu", "budget_s": 1},
        "cluster": "2xcpu",
    }


def profile_examples() -> dict[str, Any]:
    """For ``POST /v1/profiles``."""
    return {"profile": {"summary": "Four layers", "value": example_profile()}}


def key_examples() -> dict[str, Any]:
    """For ``POST /v1/api-keys``."""
    return {
        "plans": {
            "summary": "Reads and plans, a request a second",
            "value": {
                "name": "nightly plans",
                "scopes": ["read", "plan"],
                "quotas": {"max_requests_per_minute": 60, "max_unfinished_jobs": 4},
            },
        }
    }
