"""Fit the tables of `profiler/estimates/tables/gpu.json` to public measurements.

Every set of rows of every device weighs the same, whatever its size, and a whole model's row as
much as a whole set of kernels. Of devices left out no row is used, and their own figures are
dropped from the table, so that the rules have to say what it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares
from truth_predict import Predictor
from truth_rows import Row
from truth_singles import PUBLISHED

from stagewright.core.cluster.accelerators import Accelerator, Precision, get_accelerator
from stagewright.core.cluster.collectives import LinkFigures
from stagewright.profiler.estimates.device_table import (
    REFERENCE_NM,
    REFERENCE_UNIT_FLOPS_PER_S,
    Arithmetic,
    DeviceFigures,
    GpuTable,
    KernelFigures,
    MemoryFigures,
    ProductRule,
    arithmetic,
    list_same_chip,
)

Name = tuple[str, ...]
"""A figure of the table: its field, and where it has several, which."""

SOURCE = "docs/evidence/truth.md"

PULL, MEMORY_PULL = 0.03, 0.3
"""Weight of a factor e on a figure against one set of rows of one device that is off by it."""

ATTENTION: tuple[Name, ...] = (("attention_forward",), ("attention_start_s",))

DRAWN = ("memory", "fused_traffic")
"""Figures that few rows tell apart, and which are drawn to the prior's more."""

OUTLIER = 0.08
"""Relative error from which on a row is more of an exception than a measure of the fit."""

RULE_OUTLIER = 0.2
"""Relative error from which on a device is an exception to the rules."""

HIGHEST = {"memory": 0.95, "tensor": 0.9}
"""Largest shares of a data sheet's rates. GeForce cards run products above their sheet's clock for
seconds; no training that we found published reaches three quarters of the sheet's rate."""

DIFFERENCE = 1e-3
"""Step of a figure's logarithm by which derivatives are taken."""

PUBLISHED_WEIGHT = 0.1
"""Of published products against measured ones: they decide where there are no others."""

MOST_ROWS = 200
"""Rows of one set and device, of large products apart, that a fit looks at."""

OLDER_ATTENTION = {"H100": 0.6, "H200": 0.6, "B200": 0.6}
"""FlashAttention-2 reaches 35 % of an H100's peak against some 60 % of an A100's (Shah et al. 2024,
Dao 2023); that of B200 is assumed to be as far behind."""

NODE_EXPONENT, NODE_SPREAD = 1.0, 0.3
"""What a smaller process gains in work per joule, before any measurement: about as its length
(TSMC's statements for 16, 7 and 5 nm), and how far that may be off."""


NOT_FITTED = ("published throughputs", "looked-up throughputs", "Megatron-LM 7B, bf16")
"""Sets that no fit looks at."""


def same_chip(device: str) -> frozenset[str]:
    """Return the devices of the catalogue that have a device's chip."""
    others = list_same_chip(get_accelerator(device))
    return frozenset({device, *(other.name for other in others)})


PRIOR = GpuTable(
    date="",
    source=SOURCE,
    products={
        "simt": ProductRule(
            ceiling=0.9,
            width_exponent=0.25,
            flops_per_joule=80e9,
            node_exponent=1.0,
            rocm_share=0.6,
        ),
        "tensor": ProductRule(
            ceiling=0.85,
            flops_per_joule=700e9,
            node_exponent=1.0,
            rocm_share=0.6,
        ),
    },
    kernels={
        kind: KernelFigures(
            k_start=k_start,
            half_tile=0.9,
            small_tile=0.85,
            cache_unit_rate=1.5e10,
            overlap=4,
            start_s=2e-6,
            column_exponent=column_exponent,
            in_model=1.15,
        )
        for kind, k_start, column_exponent in (("simt", 460, 0.5), ("tensor", 154, 0.0))
    },
    memory=MemoryFigures(
        copy_share=0.85, reduction=0.8, reread=0.67, backward=0.8, embedding=0.4, products=0.8
    ),
    attention_forward=0.65,
    attention_backward=0.35,
    attention_start_s=5e-6,
    convolution=0.7,
    host_s={"eager": 6e-6, "compiled": 3e-6, "graph": 0.0, "kernel": 0.0},
    fused_traffic=0.5,
    devices={},
    bands={},
    kernel_bands={},
)
"""Where every fit starts and what it is drawn to, by published kernels and round numbers.

No set of rows determines ``host_s`` and ``convolution``: they are guesses, and profiles say so.

Attention's backward is that of the first FlashAttention, which the whole models measured ran: 25 to
35 % of an A100's peak (Dao 2023). No fit starts at another's result, which would carry what a
left-out device says."""


def fit_table(
    rows: Sequence[Row],
    left_out: frozenset[str] = frozenset(),
    *,
    keep_published: bool = False,
    links: Mapping[str, LinkFigures] | None = None,
) -> GpuTable:
    """Return the table that predicts the rows best, without those of some devices.

    With ``keep_published`` what others published of these devices stays: single products, and how
    far attention is behind. ``links`` price what rows send.
    """
    unknown = frozenset[str]() if keep_published else left_out
    kept = [
        row
        for row in rows
        if row.group not in NOT_FITTED
        and row.device not in (unknown if row.group in PUBLISHED else left_out)
    ]
    figures = {
        name: DeviceFigures(attention=share, source=SOURCE)
        for name, share in OLDER_ATTENTION.items()
        if name not in unknown
    }
    table = with_rules(PRIOR.model_copy(update={"devices": figures}))
    for kind in ("simt", "tensor"):
        chosen = _thin([row for row in kept if arithmetic(row.precision) == kind])
        # Kernels first: whole models could not tell a lower rate from what they lose besides.
        kernels = [row for row in chosen if row.launch == "kernel"]
        timed = {row.device for row in kernels}
        for is_attention in (False, True):
            # Products alone say what a device sustains; attention is a share of that.
            found = [row for row in kernels if row.group.startswith("attention") == is_attention]
            if found:
                names = ATTENTION if is_attention else _kernel_names(kind, found)
                table = _fit(found, table, names, links)
        models = [row for row in chosen if row.launch != "kernel"]
        if models:
            # A device whose chip was timed follows it: its own rate could not be told from what
            # models lose besides.
            others = sorted({row.device for row in models if not same_chip(row.device) & timed})
            table = _fit(models, table, _model_names(kind, others), links)
        measured = {row.device for row in kernels if row.group not in PUBLISHED}
        published = {row.device for row in kernels if row.group in PUBLISHED}
        table = _name_published(table, kind, published - measured)
    return table


def _name_published(table: GpuTable, kind: Arithmetic, names: set[str]) -> GpuTable:
    """Say of devices that their share of one arithmetic rests on published products alone."""
    devices = dict(table.devices)
    for name in names:
        before = devices[name]
        devices[name] = before.model_copy(
            update={"published": (*before.published, kind), "source": SOURCE}
        )
    return table.model_copy(update={"devices": devices})


def _thin(rows: Sequence[Row]) -> list[Row]:
    """Keep every set's rows, or evenly spaced ones of a large set, of large products apart."""
    by_set = defaultdict(list)
    for row in rows:
        by_set[row.group, row.device, _is_large(row)].append(row)
    return [row for found in by_set.values() for row in found[:: max(1, len(found) // MOST_ROWS)]]


def _is_large(row: Row) -> bool:
    return "products" in row.group and row.facts.get("m", 0) >= 4096


def _fit(
    rows: Sequence[Row],
    table: GpuTable,
    names: Sequence[Name],
    links: Mapping[str, LinkFigures] | None,
) -> GpuTable:
    """Return the table with the named figures fitted to rows."""
    predictor = Predictor(rows, links)
    first = np.array([np.log(_get(table, name)) for name in names])
    weights = _weights(predictor.rows)

    def residuals(values: np.ndarray) -> np.ndarray:
        tried = _set_all(table, names, np.exp(values))
        wrong = np.log(predictor.seconds(tried) / predictor.measured_s)
        return np.concatenate([soften(wrong, OUTLIER) * weights, pull * (values - first)])

    low, high = first - 1.5, first + 1.5
    pull = np.array([MEMORY_PULL if name[0] in DRAWN else PULL for name in names])
    for index, name in enumerate(names):
        if name[0] == "device":
            # A share of a data sheet's rate: not above it, and no kernel is worse than a fifth.
            low[index], high[index] = np.log(0.15), np.log(HIGHEST.get(name[-1], 1.0))
            first[index] = np.clip(first[index], np.log(0.2), high[index] - 0.02)
        if name[-1] in ("half_tile", "small_tile"):
            high[index] = 0.0
            first[index] = min(first[index], -0.01)
    devices = np.array([row.device for row in predictor.rows])

    def slopes(values: np.ndarray) -> np.ndarray:
        """Return the residuals' derivatives; one step tells those of all devices' own figures."""
        before = residuals(values)
        found = np.zeros((len(before), len(values)))
        for field, members in _group_names(names).items():
            step = np.zeros(len(values))
            step[members] = DIFFERENCE
            step[(values + step) > high] *= -1
            changed = (residuals(values + step) - before)[: len(devices)]
            for index in members:
                own = devices == names[index][1] if field[0] == "device" else True
                found[: len(devices), index] = np.where(own, changed / step[index], 0.0)
                found[len(devices) + index, index] = pull[index]
        return found

    found = least_squares(residuals, first, jac=slopes, bounds=(low, high), max_nfev=40)
    fitted = _set_all(table, names, np.exp(found.x))
    return with_rules(fitted)


def _group_names(names: Sequence[Name]) -> dict[Name, list[int]]:
    """Return which figures may be changed at once, as no row depends on two of them."""
    groups = defaultdict(list)
    for index, name in enumerate(names):
        groups[("device", name[2]) if name[0] == "device" else name].append(index)
    return groups


def soften(wrong: np.ndarray, outlier: float) -> np.ndarray:
    """Return residuals whose squares grow like errors' sizes beyond an outlier's (soft L1).

    By hand: the library's own would see weighted rows, all of which are small.
    """
    relative = np.sqrt(1 + (wrong / outlier) ** 2)
    return np.sign(wrong) * outlier * np.sqrt(2 * (relative - 1))


def _kernel_names(kind: Arithmetic, rows: Sequence[Row]) -> list[Name]:
    """Return the figures that kernels alone tell."""
    devices = sorted({row.device for row in rows})
    names: list[Name] = [
        ("kernels", kind, field)
        for field in ("k_start", "half_tile", "small_tile", "cache_unit_rate", "start_s", "overlap")
    ]
    names += [("device", name, kind) for name in devices]
    if any(get_accelerator(name).walks_columns for name in devices):
        names += [("kernels", kind, field) for field in ("columns", "column_exponent")]
    if kind == "simt":
        # Products say little of memory.
        reducing = sorted({row.device for row in rows if "products" not in row.group})
        names += [("device", name, "memory") for name in reducing]
        names += [("memory", field) for field in ("products", "reduction", "reread")]
    return names


def _model_names(kind: Arithmetic, devices: Sequence[str]) -> list[Name]:
    """Return the figures that whole models tell, of devices without kernels their rates, too."""
    names: list[Name] = [("kernels", kind, "in_model")]
    names += [("device", name, kind) for name in devices]
    if kind == "simt":
        names += [("device", name, "memory") for name in devices]
        return [*names, ("memory", "backward"), ("memory", "embedding"), ("fused_traffic",)]
    return [*names, ("attention_backward",)]


def _get(table: GpuTable, name: Name) -> float:
    if name[-1] == "memory":
        return table.memory.copy_share
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
            before = devices.get(name[1], DeviceFigures(source=SOURCE))
            devices[name[1]] = before.model_copy(update={name[2]: value})
        else:
            plain[name[0]] = value
    return table.model_copy(
        update={"kernels": kernels, "memory": memory, "devices": devices, **plain}
    )


def _weights(rows: Sequence[Row]) -> np.ndarray:
    """Return each row's weight: a set of a device counts as one, a whole model's row as a tenth.

    Products of many rows, which training consists of, count five times as much as small ones.
    """
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        counts[row.group, row.device] += 1
    found = []
    for row in rows:
        if row.launch == "kernel":
            weight = 1 / counts[row.group, row.device]
            if _is_large(row):
                weight *= 5
            if row.group in PUBLISHED:
                weight *= PUBLISHED_WEIGHT
        else:
            weight = min(0.1, 2 / counts[row.group, row.device])
        found.append(weight**0.5)
    return np.array(found)


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
    copies = [entry.memory for entry in table.devices.values() if entry.memory is not None]
    memory = table.memory.model_copy(
        update={"copy_share": float(np.median(copies)) if copies else PRIOR.memory.copy_share}
    )
    return table.model_copy(update={"products": products, "memory": memory})


def _rule(shares: dict[str, float], before: ProductRule, precision: Precision) -> ProductRule:
    """Fit a rule's figures by trying all on a grid; AMD's share is a median."""
    devices = [(get_accelerator(name), share) for name, share in shares.items()]
    rocm = [share for device, share in devices if device.backend == "rocm"]
    cuda = [entry for entry in devices if entry[0].backend == "cuda"]
    changed: dict[str, float] = {}
    if rocm:
        changed["rocm_share"] = float(np.median(rocm))
    if cuda:
        exponents = [0.0] if before.width_exponent is None else np.linspace(0, 0.5, 11)
        tries = np.meshgrid(
            np.linspace(0.6, 1.0, 21),
            exponents,
            before.flops_per_joule * np.exp(np.linspace(-1, 1, 41)),
            np.linspace(0.3, 1.7, 15),
        )
        values = [axis.ravel() for axis in tries]
        best = int(np.argmin(_rule_price(cuda, precision, *values)))
        names = ("ceiling", "width_exponent", "flops_per_joule", "node_exponent")
        changed |= {name: float(axis[best]) for name, axis in zip(names, values, strict=True)}
        if before.width_exponent is None:
            del changed["width_exponent"]
    return before.model_copy(update=changed)


def _rule_price(
    devices: Sequence[tuple[Accelerator, float]],
    precision: Precision,
    ceilings: np.ndarray,
    width_exponents: np.ndarray,
    flops_per_joule: np.ndarray,
    node_exponents: np.ndarray,
) -> np.ndarray:
    """Return how wrong rules are, one for each element of the arrays."""
    price = ((node_exponents - NODE_EXPONENT) / NODE_SPREAD) ** 2 * 0.1
    chips = [same_chip(device.name) for device, _ in devices]
    for (device, share), chip in zip(devices, chips, strict=True):
        peak = device.peak_flops_per_s(precision)
        width = peak / device.num_units / REFERENCE_UNIT_FLOPS_PER_S
        ceiling = np.minimum(1.0, ceilings * width**-width_exponents)
        joule = flops_per_joule * (REFERENCE_NM / device.node_nm) ** node_exponents
        found = np.minimum(ceiling, joule * device.board_watts / peak)
        # Squares up to some tenths: between two ceilings lies the middle, not either of them.
        wrong = np.sqrt(1 + (np.log(found / share) / RULE_OUTLIER) ** 2) - 1
        # Boards of one chip are one exception to a rule, not several.
        price = price + RULE_OUTLIER * wrong / chips.count(chip)
    return price
