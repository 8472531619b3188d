"""Predictions of rows of public measurements by a table of devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
from truth_rows import Row

from stagewright.core.cluster.accelerators import get_accelerator
from stagewright.core.cluster.collectives import LinkFigures, load_link_table
from stagewright.profiler.estimates.device_table import GpuTable
from stagewright.profiler.estimates.roofline import CostTable, default_rates


class Predictor:
    """Rows with their operations as arrays, so that many tables can be tried.

    ``links`` price what rows send; without them, the package's table does.
    """

    def __init__(self, rows: Iterable[Row], links: Mapping[str, LinkFigures] | None = None) -> None:
        by_kind = defaultdict(list)
        for row in rows:
            by_kind[row.device, row.precision, row.launch].append(row)
        self._kinds = [
            (kind, members, CostTable([part for row in members for part in row.parts]))
            for kind, members in by_kind.items()
        ]
        self._owners = [
            np.repeat(np.arange(len(members)), [len(row.parts) for row in members])
            for _, members, _ in self._kinds
        ]
        self.rows = [row for _, members, _ in self._kinds for row in members]
        self.measured_s = np.array([row.measured_s for row in self.rows])
        links = load_link_table() if links is None else links
        self._fixed_s = np.array([row.fixed_s + _sent_s(row, links) for row in self.rows])

    def seconds(self, table: GpuTable) -> np.ndarray:
        """Return the predicted time of every row, in the order of `rows`."""
        found = []
        for (kind, members, costs), owners in zip(self._kinds, self._owners, strict=True):
            device, precision, launch = kind
            rates = default_rates(get_accelerator(device), precision, table=table, launch=launch)
            found.append(np.bincount(owners, costs.seconds(rates), minlength=len(members)))
        return np.concatenate(found) + self._fixed_s


def _sent_s(row: Row, links: Mapping[str, LinkFigures]) -> float:
    size, count = row.sent
    if not size:
        return 0.0
    return size / links[get_accelerator(row.device).link].bus_bandwidth(count)
