"""Fit the tables of `profiler/estimates/tables/gpu.json` to public measurements.

Every set of rows of every device weighs the same, whatever its size, and a whole model's row as
much as a whole set of kernels. With ``left_out`` no row of that chip is used, and its own figures
are dropped from the table, so that the rules have to say what it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import least_squares
from truth_predict import Predictor
from truth_rows import Row

from stagewright.core.cluster.accelerators import Accelerator, get_accelerator
from stagewright.profiler.estimates.device_table import (
    REFERENCE_NM,
    Arithmetic,
    DeviceFigures,
    GpuTable,
    KernelFigures,
    MemoryFigures,
    ProductRule,
    arithmetic,
)

MOST_ROWS = 150
"""Rows of one set and device that a fit looks at; the page shows all of them."""

PUBLISHED_16_BIT = {
    "A100-PCIe": 0.822, "H100": 0.801, "H200": 0.803, "B200": 0.776, "MI250X": 0.767,
    "MI300X": 0.601,
}  # fmt: skip
"""Best share of peak reached by any bf16 product: the table "Maximum Achievable Matmul FLOPS" of
Stas Bekman's Machine Learning Engineering Open Book. Not fitted to."""

PUBLISHED_SOURCE = "Machine Learning Engineering Open Book: maximum achievable matmul FLOPS"

CHIPS = {"A100-40GB": "A100", "A100-80GB": "A100", "A100-PCIe": "A100", "A100-PCIe-40GB": "A100"}
"""Devices that share a chip: left out together."""

NODE_EXPONENT, NODE_SPREAD = 1.0, 0.3
"""What a smaller process gains in work per joule, before any measurement: about as its length
(TSMC's statements for 16, 7 and 5 nm), and how far that may be off."""


NOT_FITTED = ("published throughputs", "Megatron-LM 7B, bf16")
"""Sets that no fit looks at."""


def chip(device: str) -> str:
    return CHIPS.get(device, device)


PRIOR = GpuTable(
    date="",
    source="docs/evidence/truth.md",
    products={
        "simt": ProductRule(
            ceiling=0.9, flops_per_joule=80e9, node_exponent=1.0, rocm_share=0.6
        ),
        "tensor": ProductRule(
            ceiling=0.85, flops_per_joule=700e9, node_exponent=1.0, rocm_share=0.6
        ),
    },
    kernels={
        kind: KernelFigures(
            k_start=150, half_tile=0.9, small_tile=0.85, cache_gain=2.5, overlap=4, start_s=2e-6
        )
        for kind in ("simt", "tensor")
    },
    memory=MemoryFigures(
        copy_share=0.85, reduction=0.8, reread=0.67, backward=0.8, embedding=0.4, products=0.8
    ),
    attention_forward=0.65,
    attention_backward=0.55,
    convolution=0.7,
    host_s={"eager": 6e-6, "compiled": 3e-6, "graph": 0.0},
    fused_traffic=0.5,
    devices={},
    bands={},
)
"""Where every fit starts and what it is drawn to: chosen before any fit, by published kernels
(FlashAttention: Dao 2023) and data sheets. No fit starts at another's result, which would carry what
a left-out device says."""


def fit_table(rows: Sequence[Row], left_out: str | None = None) -> GpuTable:
    """Return the table that predicts the rows best, without those of one chip."""
    kept = [
        row
        for row in rows
        if row.group not in NOT_FITTED and (left_out is None or chip(row.device) != left_out)
    ]
    figures = {
        name: DeviceFigures(tensor=share, source=PUBLISHED_SOURCE)
        for name, share in PUBLISHED_16_BIT.items()
        if chip(name) != left_out
    }
    table = PRIOR.model_copy(update={"devices": figures})
    table = with_rules(table)
    for kind in ("simt", "tensor"):
        chosen = _thin([row for row in kept if arithmetic(row.precision) == kind])
        table = _fit_arithmetic(chosen, table, kind)
    return table


def _thin(rows: Sequence[Row]) -> list[Row]:
    """Keep every set's rows, or evenly spaced ones of a large set."""
    by_set = defaultdict(list)
    for row in rows:
        by_set[row.group, row.device].append(row)
    return [
        row for found in by_set.values() for row in found[:: max(1, len(found) // MOST_ROWS)]
    ]


def _fit_arithmetic(rows: Sequence[Row], table: GpuTable, kind: Arithmetic) -> GpuTable:
    predictor = Predictor(rows)
    devices = sorted({row.device for row in rows})
    names = _names(kind, devices)
    first = np.array([np.log(_get(table, name)) for name in names])
    weights = _weights(predictor.rows)

    def residuals(values: np.ndarray) -> np.ndarray:
        tried = _set_all(table, names, np.exp(values))
        wrong = np.log(predictor.seconds(tried) / predictor.measured_s) * weights
        return np.concatenate([wrong, 0.15 * (values - first)])

    low, high = first - 1.5, first + 1.5
    for index, name in enumerate(names):
        if name[0] == "device":
            # A share of a data sheet's rate: not above it, and no kernel is worse than a fifth.
            low[index], high[index] = np.log(0.15), 0.0
            first[index] = np.clip(first[index], np.log(0.2), -0.02)
        if name[-1] in ("half_tile", "small_tile"):
            high[index] = 0.0
            first[index] = min(first[index], -0.01)
    found = least_squares(
        residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.1, max_nfev=12,
        diff_step=1e-3,
    )  # fmt: skip
    fitted = _set_all(table, names, np.exp(found.x))
    return with_rules(fitted)


Name = tuple[str, ...]


def _names(kind: Arithmetic, devices: Sequence[str]) -> list[Name]:
    names: list[Name] = [
        ("kernels", kind, field)
        for field in ("k_start", "half_tile", "small_tile", "cache_gain", "start_s")
    ]
    names += [("device", name, kind) for name in devices]
    if kind == "simt":
        names += [
            ("memory", field)
            for field in ("reduction", "reread", "backward", "embedding", "products", "copy_share")
        ]
        names += [("fused_traffic",)]
    else:
        names += [("attention_forward",), ("attention_backward",)]
    return names


def _get(table: GpuTable, name: Name) -> float:
    if name[0] == "device":
        return table.product_share(
            get_accelerator(name[1]), "float32" if name[2] == "simt" else "float16"
        )[0]
    if name[0] == "kernels":
        return float(getattr(table.kernels[name[1]], name[2]))  # type: ignore[index]
    if name[0] == "memory":
        return float(getattr(table.memory, name[1]))
    return float(getattr(table, name[0]))


def _set_all(table: GpuTable, names: Sequence[Name], values: np.ndarray) -> GpuTable:
    kernels = dict(table.kernels)
    memory = table.memory
    devices = dict(table.devices)
    plain: dict[str, float] = {}
    for name, number in zip(names, values, strict=True):
        value = float(number)
        if name[0] == "kernels":
            changed = kernels[name[1]].model_copy(update={name[2]: value})  # type: ignore[index]
            kernels[name[1]] = changed  # type: ignore[index]
        elif name[0] == "memory":
            memory = memory.model_copy(update={name[1]: value})
        elif name[0] == "device":
            before = devices.get(name[1], DeviceFigures(source="docs/evidence/truth.md"))
            devices[name[1]] = before.model_copy(update={name[2]: value})
        else:
            plain[name[0]] = value
    return table.model_copy(
        update={"kernels": kernels, "memory": memory, "devices": devices, **plain}
    )


def _weights(rows: Sequence[Row]) -> np.ndarray:
    """Return each row's weight: a set of a device counts as one, a whole model's row as a fifth."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        counts[row.group, row.device] += 1
    sizes = [counts[row.group, row.device] for row in rows]
    whole = [row.group.startswith(("forward", "training")) for row in rows]
    return np.array(
        [max(1 / size, 0.05 if is_whole else 0) ** 0.5 for size, is_whole in zip(sizes, whole, strict=True)]
    )


def with_rules(table: GpuTable) -> GpuTable:
    """Derive the rules for devices that the table lacks from those it has."""
    products = dict(table.products)
    for kind, precision in (("simt", "float32"), ("tensor", "float16")):
        shares = {
            name: share
            for name, entry in table.devices.items()
            if (share := getattr(entry, kind)) is not None
        }
        products[kind] = _rule(shares, PRIOR.products[kind], precision)  # type: ignore[index]
    return table.model_copy(update={"products": products})


def _rule(shares: dict[str, float], before: ProductRule, precision: str) -> ProductRule:
    """Fit ceiling and work per joule by trying all on a grid; AMD's share is a median."""
    devices = [(get_accelerator(name), share) for name, share in shares.items()]
    rocm = [share for device, share in devices if device.backend == "rocm"]
    cuda = [entry for entry in devices if entry[0].backend == "cuda"]
    changed: dict[str, float] = {}
    if rocm:
        changed["rocm_share"] = float(np.median(rocm))
    elif precision == "float32":
        # No float32 of AMD's is known: its 16-bit share, published, says how far libraries get.
        changed["rocm_share"] = PUBLISHED_16_BIT["MI300X"]
    if cuda:
        price = _rule_price(cuda, precision)
        tries = [
            (price(ceiling, joule, exponent), ceiling, joule, exponent)
            for ceiling in np.linspace(0.6, 1.0, 21)
            for joule in before.flops_per_joule * np.exp(np.linspace(-1, 1, 41))
            for exponent in np.linspace(0.3, 1.7, 15)
        ]
        _, ceiling, joule, exponent = min(tries)
        changed |= {
            "ceiling": float(ceiling),
            "flops_per_joule": float(joule),
            "node_exponent": float(exponent),
        }
    return before.model_copy(update=changed)


def _rule_price(
    devices: list[tuple[Accelerator, float]], precision: str
) -> Callable[[float, float, float], float]:
    node = np.array([device.node_nm for device, _ in devices])
    powered = np.array(
        [device.board_watts / device.peak_flops_per_s(precision) for device, _ in devices]  # type: ignore[arg-type]
    )
    shares = np.array([share for _, share in devices])

    def price(ceiling: float, joule: float, exponent: float) -> float:
        found = np.minimum(ceiling, joule * (REFERENCE_NM / node) ** exponent * powered)
        wrong = np.abs(np.log(found / shares))
        return float(wrong.sum() + ((exponent - NODE_EXPONENT) / NODE_SPREAD) ** 2 * 0.1)

    return price
