"""The two real models of the demo, as the requests a user would post."""

from __future__ import annotations

from typing import Any

NUM_MICROBATCHES = 4
RANKS = 2

MEASURING = {"num_threads": 1, "busy_neighbours": RANKS - 1, "budget_s": 15.0}
"""One thread a rank, beside a neighbour as busy as the other rank will be."""

GPT2_SMALL: dict[str, Any] = {
    "model": {"family": "gpt2", "config": {"dropout": 0.0}},
    "sample": {
        "inputs": {
            "input_ids": {"shape": [1, 128], "dtype": "int64", "fill": "randint", "high": 50257}
        },
        "target": {"shape": [1, 128], "dtype": "int64", "fill": "randint", "high": 50257},
    },
}
"""GPT-2 small (124 million parameters); dropout 0, so that split and unsplit can be compared."""

RESNET50: dict[str, Any] = {
    "model": {"family": "resnet", "config": {"depth": 50}},
    "sample": {
        "inputs": {"x": {"shape": [2, 3, 224, 224]}},
        "target": {"shape": [2], "dtype": "int64", "fill": "randint", "high": 1000},
    },
}
"""ResNet-50 (25.6 million parameters) on ImageNet-sized images."""

MODELS: dict[str, dict[str, Any]] = {"gpt2": GPT2_SMALL, "resnet50": RESNET50}


OPTIONS: dict[str, Any] = {
    "num_microbatches": NUM_MICROBATCHES,
    "num_stages": RANKS,
    "optimizer": "sgd",
}
