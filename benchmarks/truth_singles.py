"""Single products and all-reduces that others published, as rows.

`published/products.csv` and `published/all_reduces.csv` have the figures, each with its source:
benchmarks of single cards and logs of ``all_reduce_perf``, as printed. They were looked up on
28 November 2026, and are no part of the measurements that the page of truth is judged by.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional
from truth_rows import CollectiveRow, Row, read_csv, record

from stagewright.core.cluster.accelerators import Precision, get_accelerator
from stagewright.profiler.estimates.estimate import DTYPES

FOLDER = Path(__file__).resolve().parent / "published"

PRODUCTS = {"float32": "published products, fp32"}
SIXTEEN_BITS = "published products, 16 bits"
PUBLISHED = (*PRODUCTS.values(), SIXTEEN_BITS)
"""Sets of rows that say what a device sustains where the measurements have none of it."""

BEST_SIZE = 8192
"""Size of the square that a figure without a shape, the best of several, is taken to be of."""


def published_products() -> Iterator[Row]:
    """Return the published products."""
    for entry in read_csv(FOLDER / "products.csv"):
        precision: Precision = entry["precision"]  # type: ignore[assignment]
        m, n, k = (int(entry[key] or BEST_SIZE) for key in "mnk")
        dtype = DTYPES[precision]
        rows, weight = (torch.empty(*size, dtype=dtype, device="meta") for size in ((m, k), (n, k)))
        backend = get_accelerator(entry["device"]).backend
        costs = record(lambda a=rows, w=weight: functional.linear(a, w), backend)
        yield Row(
            PRODUCTS.get(precision, SIXTEEN_BITS), entry["device"], f"{m} x {n} x {k}",
            2 * m * n * k / float(entry["tflops"]) / 1e12, (costs,), precision, facts={"m": m},
        )  # fmt: skip


def published_all_reduces() -> Iterator[CollectiveRow]:
    """Return the published all-reduces, of float32."""
    for entry in read_csv(FOLDER / "all_reduces.csv"):
        yield CollectiveRow(
            entry["device"],
            "all_reduce",
            int(entry["num_devices"]),
            int(entry["size_bytes"]),
            float(entry["time_us"]) / 1e6,
            link=entry["link"],
            host=entry["source"],
        )
