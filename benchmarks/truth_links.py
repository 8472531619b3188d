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
16 lanes of PCIe 3.0 (``topo.h``)."""

RING_DELAYS_S = {"NVLink": (0.6e-6, 3.4e-6), "PCIe": (1.0e-6, 5.7e-6)}
"""A step of a ring in the protocols LL and Simple (``hwLat`` of NCCL's ``tuning.cc`` at commit
b6475625)."""

RING_START_S = (6.6e-6, 8.4e-6)
"""What these two protocols take before the first step (``baseLat``)."""

SMALL_SHARE = 1 / 4
"""Of a ring's bandwidth that LL reaches in an all-reduce, by the same source."""


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
        near = SCALED.get(host, host)
        if link in table or near not in table:
            continue
        factor = rate / rates[near] / (1.0 if host == link else HOST_COPIES)
        entry = table[near]
        found[link] = entry.model_copy(
            update={
                "basis": "rule" if host == link else "guess",
                "source": f"{near}, bandwidths x {factor:g}",
                "small_bandwidth": entry.small_bandwidth * factor,
                "bandwidth": {n: value * factor for n, value in entry.bandwidth.items()},
                "error_band": 0.5,
            }
        )
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
    """Return figures by the constants with which NCCL chooses between its protocols."""
    kind = "NVLink" if link.startswith("NVLink") else "PCIe"
    bandwidth = rate * RING_SHARE[kind]
    # A ring takes 2 (n - 1) steps, and `step_s` counts n - 1.
    small_step_s, large_step_s = (2 * delay_s for delay_s in RING_DELAYS_S[kind])
    return LinkFigures(
        basis="guess",
        source="constants of NCCL",
        start_s=RING_START_S[0],
        step_s=small_step_s,
        small_bandwidth=bandwidth * SMALL_SHARE,
        large_start_s=RING_START_S[1],
        large_step_s=large_step_s,
        bandwidth={2: bandwidth},
        error_band=0.5,
    )


def link_errors(
    rows: Sequence[CollectiveRow], table: dict[str, LinkFigures] | None = None
) -> list[tuple[CollectiveRow, float]]:
    """Return every all-reduce with its relative error; without a table, its device is left out."""
    rows = [row for row in rows if row.operation == "all_reduce"]
    found = []
    for device in sorted({row.device for row in rows}):
        link = get_accelerator(device).link
        figures = predict_left_out(rows, device) if table is None else table[link]
        for row in (row for row in rows if row.device == device):
            predicted_s = figures.all_reduce_time_s(row.size_bytes, row.num_devices)
            found.append((row, predicted_s / row.measured_s - 1))
    return found
