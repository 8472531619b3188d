"""Public measurements as rows: a device, what ran on it, and how long that took.

Every reader takes the folder of the measurements (its README names sources and licences) and
returns rows of one set. Kernels are called on the meta device, so that their costs are those that
an estimate would count.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from stagewright.core.cluster.accelerators import (
    Precision,
    find_by_driver_name,
    get_accelerator,
)
from stagewright.profiler.estimates.device_table import Launch
from stagewright.profiler.estimates.flops import Cost
from stagewright.profiler.estimates.layer_costs import CostRecorder
from stagewright.profiler.estimates.meta_device import DeviceKernels


def find_device(name: str) -> str:
    """Return the catalogue's name of a device as a driver or a table of measurements calls it."""
    found = find_by_driver_name(name.replace("_", " "))
    if found is None:
        raise ValueError(f"no device of the catalogue is called {name!r}; add it to the catalogue")
    return found.name


@dataclass(frozen=True)
class Row:
    """One measurement of one device.

    Attributes:
        group: Set of rows it belongs to.
        device: Name in the catalogue.
        parts: Lists of operations that ran one after the other.
        fixed_s: Time that the estimator does not price.
        sent: Bytes that every device sends to others of its node while nothing else is done, and
            among how many.
    """

    group: str
    device: str
    name: str
    measured_s: float
    parts: tuple[tuple[Cost, ...], ...]
    precision: Precision
    launch: Launch = "kernel"
    fixed_s: float = 0.0
    sent: tuple[float, int] = (0.0, 1)
    facts: dict[str, float] = field(default_factory=dict, compare=False)


def kernel_rows(folder: Path) -> list[Row]:
    """Return the rows of single kernels."""
    return [
        *_gemms(folder / "aiconfigurator"),
        *_attentions(folder / "aiconfigurator"),
        *_neusight_kernels(folder / "neusight"),
    ]


def record(call: Callable[[], Any], backend: str = "cuda") -> tuple[Cost, ...]:
    """Return the costs of what a call runs on the meta device."""
    recorder = CostRecorder(winograd=False)
    with DeviceKernels(backend), recorder:  # type: ignore[arg-type]
        call()
    return tuple(recorder.costs)


def read_csv(path: Path) -> Iterator[dict[str, str]]:
    """Return a file's rows; a folder of measurements may lack it, which is said."""
    if not path.exists():
        print(f"no {path}: its rows are left out", file=sys.stderr)
        return
    with path.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream)


def _find_files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    if not found:
        print(f"no {folder / pattern}: their rows are left out", file=sys.stderr)
    return found


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _gemms(folder: Path) -> Iterator[Row]:
    for path in _find_files(folder, "*_gemm_bf16.csv"):
        for entry in read_csv(path):
            m, n, k = (int(entry[key]) for key in "mnk")
            rows, weight = (_meta(*size, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
            costs = record(lambda rows=rows, weight=weight: functional.linear(rows, weight))
            yield Row(
                "products, bf16", find_device(entry["device"]), f"{m} x {n} x {k}",
                float(entry["latency_ms"]) / 1e3, (costs,), "bfloat16", facts={"m": m},
            )  # fmt: skip


def _attentions(folder: Path) -> Iterator[Row]:
    for path in _find_files(folder, "*_attention_bf16_forward.csv"):
        for entry in read_csv(path):
            if entry.get("window_size", "0") not in ("0", "", None):
                continue  # a sliding window is no operation of the models here
            batch, length, heads, groups, width = (
                int(entry[key])
                for key in ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
            )
            query = _meta(batch, heads, length, width, dtype=torch.bfloat16)
            key = _meta(batch, groups, length, width, dtype=torch.bfloat16)
            costs = record(
                lambda query=query, key=key: functional.scaled_dot_product_attention(
                    query, key, key, is_causal=True, enable_gqa=True
                )
            )
            # The kernel measured reads grouped heads as they are; the copies of torch's are left
            # out.
            costs = tuple(cost for cost in costs if cost.kind == "attention")
            yield Row(
                "attention forward, bf16", find_device(entry["device"]),
                f"{batch} x {heads}/{groups} x {length} x {width}",
                float(entry["latency_ms"]) / 1e3, (costs,), "bfloat16", facts={"m": batch * length},
            )  # fmt: skip


def _neusight_kernels(folder: Path) -> Iterator[Row]:
    for entry in read_csv(folder / "kernels_linear.csv"):
        m, n, k = (int(float(entry[key])) for key in "MNK")
        rows, weight = (_meta(*size, dtype=torch.float32) for size in ((m, k), (n, k)))
        bias = _meta(n, dtype=torch.float32)
        costs = record(lambda a=rows, w=weight, b=bias: functional.linear(a, w, b))
        yield _fp32("products, fp32", entry, f"{m} x {n} x {k}", costs, m)
    for entry in read_csv(folder / "kernels_bmm.csv"):
        b, m, n, k = (int(float(entry[key])) for key in "BMNK")
        left, right = (_meta(*size, dtype=torch.float32) for size in ((b, m, k), (b, k, n)))
        costs = record(lambda x=left, y=right: torch.bmm(x, y))
        yield _fp32("batched products, fp32", entry, f"{b} x {m} x {n} x {k}", costs, m)
    for name, call in (
        ("ln", lambda x: functional.layer_norm(x, (x.shape[-1],))),
        ("softmax", lambda x: functional.softmax(x, -1)),
    ):
        for entry in read_csv(folder / f"kernels_{name}.csv"):
            rows_, width = (int(float(entry[key])) for key in "BH")
            values = _meta(rows_, width, dtype=torch.float32)
            costs = record(lambda x=values, call=call: call(x))
            yield _fp32(f"{name}, fp32", entry, f"{rows_} x {width}", costs, rows_)


def _fp32(group: str, entry: dict[str, str], name: str, costs: tuple[Cost, ...], rows: int) -> Row:
    return Row(
        group, find_device(entry["Device"]), name, float(entry["Latency"]) / 1e3, (costs,),
        "float32", facts={"m": rows},
    )  # fmt: skip


MEASURED = "measurements"
"""The host of the folder's collectives, as no other is named."""


@dataclass(frozen=True)
class CollectiveRow:
    """One measured collective of a whole message on every device, in bytes.

    Attributes:
        link: Kind of link, as the catalogue calls it.
        host: Which of several hosts with that link.
    """

    device: str
    operation: str
    num_devices: int
    size_bytes: int
    measured_s: float
    link: str
    host: str = MEASURED


def collective_rows(folder: Path) -> list[CollectiveRow]:
    found = []
    for path in _find_files(folder / "aiconfigurator", "*_nccl.csv"):
        for entry in read_csv(path):
            found.append(
                CollectiveRow(
                    device := find_device(entry["device"]),
                    entry["op_name"].replace("alltoall", "all_to_all"),
                    int(entry["num_gpus"]),
                    2 * int(entry["message_elements"]),
                    float(entry["latency_ms"]) / 1e3,
                    get_accelerator(device).link,
                )
            )
    for path in _find_files(folder / "nnscaler", "intra_*.json"):
        count = int(path.stem.partition("_")[2])
        for name, (sizes, times) in json.loads(path.read_text(encoding="utf-8")).items():
            operation, link = name.replace(" ", "_"), get_accelerator("MI250").link
            found += [
                CollectiveRow("MI250", operation, count, int(size * 2**20), time_s, link)
                for size, time_s in zip(sizes, times, strict=True)
            ]
    return found
