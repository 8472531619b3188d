"""Fit and check `core/cluster/tables/links.json` against measured all-reduces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import least_squares
from truth_fit import soften
from truth_rows import MEASURED, CollectiveRow

from stagewright.core.cluster.accelerators import CATALOGUE, get_accelerator
from stagewright.core.cluster.collectives import LinkFigures, shares_lanes

NEAREST = {
    "NVLink 2": "NVLink 3", "NVLink 4": "NVLink 3", "NVLink 5": "NVLink 4",
    "PCIe 3.0 x16": "PCIe 4.0 x16", "PCIe 5.0 x16": "PCIe 4.0 x16",
    "PCIe 4.0 x16 without peer-to-peer": "PCIe 4.0 x16",
    "PCIe 5.0 x16 without peer-to-peer": "PCIe 4.0 x16 without peer-to-peer",
}  # fmt: skip
"""Kinds whose figures, bandwidths by the ratio of data sheets, stand for what was not measured."""

MESSAGES = "messages of two devices"
"""Set of the all-to-alls of two devices."""

OUTLIER = 0.1
"""Relative error from which on a row is more of an exception than a measure of the fit."""

HOST_COPIES = 2.0
"""Without peer-to-peer every byte goes into the host's memory and out again."""

DELAYS = ("start_s", "step_s", "small_share", "large_start_s", "large_step_s")
"""Figures that are the library's, and the same for all links of a family."""

SHARED_KNOTS = (2, 8)
"""Numbers of cards from which to which one power of their number holds."""

PULL = 0.05
"""Weight of a factor e on a figure against one host that is off by it."""

SMALLEST_BAND = 0.15
"""Of measured kinds: another host of the same kind differs by as much."""

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
    """Return the figures of every kind of link in the catalogue, measured or from the nearest."""
    rows = [row for row in rows if row.operation == "all_reduce"]
    rates = {
        entry.link: entry.link_bandwidth_bytes_per_s
        for entry in CATALOGUE
        if entry.backend != "cpu"
    }
    families = defaultdict(list)
    for row in rows:
        families[_family(row.link)].append(row)
    table: dict[str, LinkFigures] = {}
    for found in families.values():
        table |= _fit(found, rates)
    for link in rates:
        _add_nearest(link, rates, table)
    return table


def _family(link: str) -> str:
    """Return the links whose delays are one library's: all NVLinks, all of PCIe, and any other."""
    kind = link.partition(" ")[0]
    return kind if kind in ("NVLink", "PCIe") else link


def _add_nearest(link: str, rates: dict[str, float], table: dict[str, LinkFigures]) -> None:
    """Add to a table what is said of a kind of link without rows of its own."""
    if link in table:
        return
    if link not in NEAREST:
        table[link] = ring_by_constants(link, rates[link])
        return
    near = NEAREST[link]
    _add_nearest(near, rates, table)
    factor = rates[link] / rates[near]
    is_guess = "without" in link
    if is_guess and "without" not in near:
        factor /= HOST_COPIES
    table[link] = (
        table[near]
        .scale(bandwidth_factor=factor)
        .model_copy(
            update={
                "basis": "guess" if is_guess else "rule",
                "source": f"{near}, bandwidths x {factor:g}",
                "error_band": 0.5,
            }
        )
    )


def _fit(rows: Sequence[CollectiveRow], rates: dict[str, float]) -> dict[str, LinkFigures]:
    """Return figures of the links of one family, whose delays are the same.

    Every host weighs the same. The cards of a host without a switch share its path, so that their
    bandwidth falls with a power of their number, one from two to eight. Elsewhere every number
    measured has its own, and the others follow the nearest one in the ratio expected.
    """
    links = sorted({row.link for row in rows})
    expected = {link: ring_by_constants(link, rates[link]) for link in links}
    knots = [(link, count) for link in links for count in _knots(rows, link)]
    delays = expected[links[0]]
    begin = np.log(
        [getattr(delays, name) for name in DELAYS]
        + [expected[link].bus_bandwidth(count) for link, count in knots]
    )
    hosts = [(row.host, row.link, row.device) for row in rows]
    weights = np.array([1 / hosts.count(host) for host in hosts])
    measured_s = np.array([row.measured_s for row in rows])

    def wrong(values: np.ndarray) -> np.ndarray:
        found = _figures(values, knots)
        times = [found[row.link].all_reduce_time_s(row.size_bytes, row.num_devices) for row in rows]
        return np.log(np.array(times) / measured_s)

    def residuals(values: np.ndarray) -> np.ndarray:
        soft = soften(wrong(values), OUTLIER) * np.sqrt(weights)
        return np.concatenate([soft, PULL * (values - begin)])

    high = np.full(len(begin), np.inf)
    high[DELAYS.index("small_share")] = 0.0
    best = least_squares(
        residuals, begin, bounds=(np.full(len(begin), -np.inf), high), diff_step=1e-3, max_nfev=100
    ).x
    sizes = np.abs(np.exp(wrong(best)) - 1)
    table = _figures(best, knots)
    for link in links:
        own = np.array([row.link == link for row in rows])
        band = max(_weighted_quantile(sizes[own], weights[own], 0.9), SMALLEST_BAND)
        update = {"error_band": round(band, 3), "source": _describe(rows, link)}
        table[link] = table[link].model_copy(update=update)
    for link in sorted(links, key=lambda link: link in NEAREST):
        if not shares_lanes(link):
            near = table.get(NEAREST.get(link, ""), expected[link])
            measured = dict(table[link].bandwidth)
            bandwidth = _fill(measured, near)
            source = table[link].source
            if added := sorted(set(bandwidth) - set(measured)):
                counts, of = ", ".join(map(str, added)), NEAREST.get(link, near.source)
                source += f"; with {counts} devices in the ratio of {of}"
            update = {"bandwidth": tuple(bandwidth.items()), "source": source}
            table[link] = table[link].model_copy(update=update)
    return table


def _knots(rows: Sequence[CollectiveRow], link: str) -> list[int]:
    """Return the numbers of devices whose bandwidth is fitted."""
    if shares_lanes(link):
        return list(SHARED_KNOTS)
    return sorted({row.num_devices for row in rows if row.link == link})


def _figures(values: np.ndarray, knots: Sequence[tuple[str, int]]) -> dict[str, LinkFigures]:
    """Return figures by the logarithms of their delays and of every knot's bandwidth."""
    plain = dict(zip(DELAYS, np.exp(values[: len(DELAYS)]).tolist(), strict=True))
    bandwidth: dict[str, dict[int, float]] = defaultdict(dict)
    for (link, count), value in zip(knots, np.exp(values[len(DELAYS) :]), strict=True):
        # More cards of a host are not faster together than fewer.
        most = min(bandwidth[link].values(), default=np.inf) if shares_lanes(link) else np.inf
        bandwidth[link][count] = float(min(value, most))
    return {
        link: LinkFigures(
            basis="table", source="", bandwidth=tuple(counts.items()), error_band=0.0, **plain
        )
        for link, counts in bandwidth.items()
    }


def _describe(rows: Sequence[CollectiveRow], link: str) -> str:
    hosts = {(row.host, row.device) for row in rows if row.link == link}
    names = ", ".join(sorted({device for _, device in hosts}))
    return f"{len(hosts)} host{'s' * (len(hosts) > 1)} with {names} (docs/evidence/truth.md)"


def _fill(measured: dict[int, float], expected: LinkFigures) -> dict[int, float]:
    """Add the numbers of devices that were expected but not measured."""
    found = dict(measured)
    for count, value in expected.bandwidth:
        near = min(measured, key=lambda other, count=count: abs(np.log(other / count)))
        found.setdefault(count, value * measured[near] / expected.bus_bandwidth(near))
    return dict(sorted(found.items()))


def _weighted_quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, share)])


def fit_links_without(
    rows: Sequence[CollectiveRow], left_out: frozenset[str], *, keep_published: bool = False
) -> dict[str, LinkFigures]:
    """Return what is said of links without some devices' rows, or without their measured ones.

    Other devices with the same link stand in; if none was measured, the nearest kind of link does,
    and without one the constants with which NCCL and RCCL choose between their protocols, those of
    PCIe also for links that NCCL does not know.
    """
    return fit_links(
        [
            row
            for row in rows
            if row.device not in left_out or (keep_published and row.host != MEASURED)
        ]
    )


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
        if link == MESH_LINK:
            bandwidth = {count: (count - 1) * MESH_LINK_RATE for count in (2, 4, 8)}
        starts, delays = AMD_START_S, AMD_DELAYS_S
    # A ring takes 2 (n - 1) steps, and `step_s` counts n - 1.
    small_step_s, large_step_s = (2 * delay_s for delay_s in delays)
    return LinkFigures(
        basis="guess",
        source=f"constants of {'RCCL' if is_amd else 'NCCL'}",
        start_s=starts[0],
        step_s=small_step_s,
        small_share=SMALL_SHARE,
        large_start_s=starts[1],
        large_step_s=large_step_s,
        bandwidth=tuple(bandwidth.items()),
        error_band=0.5,
    )


def link_errors(
    rows: Sequence[CollectiveRow], predict: Callable[[str], dict[str, LinkFigures]]
) -> list[tuple[CollectiveRow, float]]:
    """Return the relative errors of the measurements' all-reduces; published ones are fitted to.

    ``predict`` returns the table of links for a device.
    """
    judged = [row for row in rows if (row.operation, row.host) == ("all_reduce", MEASURED)]
    return _compare(judged, predict, _sum_s)


def message_errors(
    rows: Sequence[CollectiveRow], predict: Callable[[str], dict[str, LinkFigures]]
) -> list[tuple[CollectiveRow, float]]:
    """Return the relative errors of messages of two devices to each other; none is fitted to.

    In an all-to-all of two, each sends half of its message.
    """
    judged = [row for row in rows if (row.operation, row.num_devices) == ("all_to_all", 2)]
    return _compare(judged, predict, _message_s)


def _compare(
    rows: Sequence[CollectiveRow],
    predict: Callable[[str], dict[str, LinkFigures]],
    time_s: Callable[[LinkFigures, CollectiveRow], float],
) -> list[tuple[CollectiveRow, float]]:
    tables = {device: predict(device) for device in sorted({row.device for row in rows})}
    return [
        (row, time_s(tables[device][row.link], row) / row.measured_s - 1)
        for device in tables
        for row in rows
        if row.device == device
    ]


def _sum_s(figures: LinkFigures, row: CollectiveRow) -> float:
    return figures.all_reduce_time_s(row.size_bytes, row.num_devices)


def _message_s(figures: LinkFigures, row: CollectiveRow) -> float:
    rate = get_accelerator(row.device).link_bandwidth_bytes_per_s
    latency_s, bandwidth = figures.price_messages(rate)
    return latency_s + row.size_bytes / 2 / bandwidth
