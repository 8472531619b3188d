"""Fit and check `core/cluster/tables/links.json` against measured all-reduces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares
from truth_rows import CollectiveRow

from stagewright.core.cluster.accelerators import CATALOGUE, get_accelerator
from stagewright.core.cluster.collectives import LinkFigures

SCALED = {
    "NVLink 2": "NVLink 3", "NVLink 4": "NVLink 3", "NVLink 5": "NVLink 3",
    "PCIe 3.0 x16": "PCIe 4.0 x16", "PCIe 5.0 x16": "PCIe 4.0 x16",
}  # fmt: skip
"""Kinds without measurements: the nearest's figures, bandwidths by the ratio of data sheets."""

HOST_COPIES = 2.0
"""Without peer-to-peer every byte goes into the host's memory and out again."""

RING_SHARE = {"NVLink": 20 / 25, "PCIe": 12 / 16}
"""Of the data sheet's rate: what NCCL's search for rings counts on, for a link of NVLink 3 and for
16 lanes of PCIe 3.0 (``SM80_NVLINK_BW`` and ``PCI_BW`` of ``topo.h`` at commit 069a3d4f)."""

RING_DELAYS_S = {"NVLink": (0.6e-6, 3.4e-6), "PCIe": (1.0e-6, 5.7e-6)}
"""A step of a ring in the protocols LL and Simple (``hwLat`` of NCCL's ``tuning.cc`` at commit
b6475625)."""

RING_START_S = (6.6e-6, 8.4e-6)
"""What these two protocols take before the first step (``baseLat``)."""

SMALL_SHARE = 1 / 4
"""Of a ring's bandwidth that LL reaches in an all-reduce, by the same source."""


SWITCH_SUMS = {"NVLink 4": 0.85 * 18 * 20.6e9 * 5 / 6, "NVLink 5": 0.74 * 18 * 40e9 * 5 / 6}
"""Bytes of a message a second that switches sum themselves, from three devices on (NVLink SHARP):
what NCCL 2.27 counts on (``nvlsEfficiency``, links and their rate: ``topo.h``, ``tuning.cc``)."""

AMD_RINGS, AMD_LINK_RATE = {2: 4, 4: 1, 8: 3, 16: 6}, 36e9
"""Rings among dies of MI250s, and the rate of one that RCCL counts on (``MI200_XGMI_WIDTH``). A
module's two dies share four links and modules one each (AMD's CDNA 2 white paper): among k modules
there are k - 1 rings without a shared link, and each has six links to others."""

MESH_LINK = "Infinity Fabric 4"
MESH_LINK_RATE = 48e9
"""Every MI300X of a node has a link to every other, so that n of them have n - 1 rings. Of a link's
64 GB/s AMD counts on 48 (``GFX94X_XGMI_WIDTH`` of RCCL's ``topo.h``, and the ROCm blog's "RCCL
Bandwidth and xGMI Performance on MI300X")."""

AMD_START_S, AMD_DELAYS_S = (12e-6, 17e-6), (0.8e-6, 3.6e-6)
"""The protocols LL and Simple by RCCL's ``tuning.cc`` at commit 9e22c79d."""


def fit_links(rows: Sequence[CollectiveRow]) -> dict[str, LinkFigures]:
    """Return the figures of every kind of link in the catalogue."""
    rows = [row for row in rows if row.operation == "all_reduce"]
    table = {}
    for device in sorted({row.device for row in rows}):
        link = get_accelerator(device).link
        table[link] = _fit([row for row in rows if row.device == device], device)
    return {**table, **_by_rule(table)}


def _fit(rows: Sequence[CollectiveRow], device: str) -> LinkFigures:
    counts = sorted({row.num_devices for row in rows})
    measured = np.array([row.measured_s for row in rows])
    rate = get_accelerator(device).link_bandwidth_bytes_per_s
    first = np.log([5e-6, 1e-6, rate / 5, 3e-5, 1e-6, *(rate / 2 for _ in counts)])

    def figures(values: np.ndarray) -> LinkFigures:
        start, step, small, large_start, large_step, *bandwidths = np.exp(values)
        return LinkFigures(
            basis="table",
            source=f"all-reduces of {get_accelerator(device).full_name} (docs/evidence/truth.md)",
            start_s=start,
            step_s=step,
            small_bandwidth=small,
            large_start_s=large_start,
            large_step_s=large_step,
            bandwidth=dict(zip(counts, map(float, bandwidths), strict=True)),
            error_band=0.0,
        )

    def wrong(values: np.ndarray) -> np.ndarray:
        found = figures(values)
        times = [found.all_reduce_time_s(row.size_bytes, row.num_devices) for row in rows]
        return np.concatenate([np.log(np.array(times) / measured), 0.02 * (values - first)])

    best = least_squares(wrong, first, loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=100)
    found = figures(best.x)
    band = float(np.quantile(np.abs(np.exp(wrong(best.x)[: len(rows)]) - 1), 0.9))
    return found.model_copy(update={"error_band": round(band, 3)})


def _by_rule(table: dict[str, LinkFigures]) -> dict[str, LinkFigures]:
    rates = {entry.link: entry.link_bandwidth_bytes_per_s for entry in CATALOGUE}
    found = {}
    for link, rate in rates.items():
        host = link.removesuffix(" without peer-to-peer")
        if link in table:
            continue
        if link == MESH_LINK:
            found[link] = _mesh(rate)
            continue
        near = SCALED.get(host, host)
        if near not in table:
            continue
        factor = rate / rates[near] / (1.0 if host == link else HOST_COPIES)
        entry = table[near]
        found[link] = entry.model_copy(
            update={
                "basis": "rule" if host == link else "guess",
                "source": f"{near}, bandwidths x {factor:g}",
                "small_bandwidth": entry.small_bandwidth * factor,
                "bandwidth": _scale(entry.bandwidth, factor, SWITCH_SUMS.get(link, 0.0)),
                "error_band": 0.5,
            }
        )
    return found


def _mesh(rate: float) -> LinkFigures:
    bandwidth = {count: (count - 1) * MESH_LINK_RATE for count in (2, 4, 8)}
    update = {
        "basis": "rule",
        "source": "constants of RCCL",
        "small_bandwidth": MESH_LINK_RATE * SMALL_SHARE,
        "bandwidth": bandwidth,
    }
    return ring_by_constants(MESH_LINK, rate).model_copy(update=update)


def _scale(bandwidth: dict[int, float], factor: float, switch_sums: float) -> dict[int, float]:
    """Scale bus bandwidths; where switches sum, the faster of rings and switches is taken."""
    found = {}
    for count, value in bandwidth.items():
        by_switch = switch_sums * 2 * (count - 1) / count if count > 2 else 0.0
        found[count] = max(value * factor, by_switch)
    return found


def predict_left_out(rows: Sequence[CollectiveRow], device: str) -> LinkFigures:
    """Return what the rules say of a device's link without any of its rows.

    A measured link of the same kind of wiring (switched, or the host's PCIe) lends its shares of
    the data-sheet rate; if there is none, NCCL's own constants stand in, those of PCIe also for
    links that NCCL does not know.
    """
    others = fit_links([row for row in rows if row.device != device])
    entry = get_accelerator(device)
    return others.get(entry.link) or ring_by_constants(entry.link, entry.link_bandwidth_bytes_per_s)


def ring_by_constants(link: str, rate: float) -> LinkFigures:
    """Return figures by the constants with which NCCL and RCCL choose between their protocols."""
    is_amd = link.startswith("Infinity")
    kind = "NVLink" if link.startswith("NVLink") else "PCIe"
    bandwidth = {2: rate * RING_SHARE[kind]}
    if kind == "PCIe":
        # The cards of a host share one path: what two can use at a time.
        bandwidth |= {count: bandwidth[2] * 2 / count for count in (4, 8, 16)}
    starts, delays = RING_START_S, RING_DELAYS_S[kind]
    if is_amd:
        bandwidth = {count: rings * AMD_LINK_RATE for count, rings in AMD_RINGS.items()}
        starts, delays = AMD_START_S, AMD_DELAYS_S
    # A ring takes 2 (n - 1) steps, and `step_s` counts n - 1.
    small_step_s, large_step_s = (2 * delay_s for delay_s in delays)
    return LinkFigures(
        basis="guess",
        source=f"constants of {'RCCL' if is_amd else 'NCCL'}",
        start_s=starts[0],
        step_s=small_step_s,
        small_bandwidth=bandwidth[2] * SMALL_SHARE,
        large_start_s=starts[1],
        large_step_s=large_step_s,
        bandwidth=bandwidth,
        error_band=0.5,
    )


def link_errors(
    rows: Sequence[CollectiveRow],
    table: dict[str, LinkFigures] | None = None,
    known: dict[str, LinkFigures] | None = None,
) -> list[tuple[CollectiveRow, float]]:
    """Return every all-reduce with its relative error; without a table, its device is left out.

    ``known`` lends the bandwidths measured to a device left out: what remains is its delays.
    """
    rows = [row for row in rows if row.operation == "all_reduce"]
    found = []
    for device in sorted({row.device for row in rows}):
        link = get_accelerator(device).link
        figures = predict_left_out(rows, device) if table is None else table[link]
        if known is not None:
            figures = figures.model_copy(update={"bandwidth": known[link].bandwidth})
        for row in (row for row in rows if row.device == device):
            predicted_s = figures.all_reduce_time_s(row.size_bytes, row.num_devices)
            found.append((row, predicted_s / row.measured_s - 1))
    return found
