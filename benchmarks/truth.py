"""Hold the estimator against other people's measurements: a page of truth.

``--data FOLDER`` names the measurements. Prints median and largest error by set; ``--leave-one-out``
predicts every device from tables fitted without it; ``--fit`` writes the tables; ``--write`` writes
`docs/evidence/truth.md`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from truth_models import mpt_rows, neusight_rows
from truth_rows import Row, kernel_rows

from stagewright.core.cluster.accelerators import get_accelerator
from stagewright.profiler.estimates.device_table import GpuTable, load_gpu_table
from stagewright.profiler.estimates.roofline import CostTable, default_rates


class Predictor:
    """Rows with their operations as arrays, so that many tables can be tried."""

    def __init__(self, rows: Iterable[Row]) -> None:
        by_kind = defaultdict(list)
        for row in rows:
            by_kind[row.device, row.precision, row.launch].append(row)
        self._kinds = [
            (kind, members, CostTable([part for row in members for part in row.parts]))
            for kind, members in by_kind.items()
        ]
        self.rows = [row for _, members, _ in self._kinds for row in members]
        self.measured_s = np.array([row.measured_s for row in self.rows])

    def seconds(self, table: GpuTable) -> np.ndarray:
        """Return the predicted time of every row, in the order of `rows`."""
        found = []
        for (device, precision, launch), members, costs in self._kinds:
            rates = default_rates(get_accelerator(device), precision, table=table, launch=launch)
            times = iter(costs.seconds(rates))
            found += [sum(next(times) for _ in row.parts) + row.fixed_s for row in members]
        return np.array(found)


def summarize(rows: Sequence[Row], errors: Sequence[float]) -> str:
    """Return a table of errors by set and device."""
    groups = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        groups[row.group, "all"].append(error)
        groups[row.group, row.device].append(error)
        if row.facts.get("m", 0) >= 4096 and "products" in row.group:
            groups[row.group + ", from 4,096 rows", "all"].append(error)
            groups[row.group + ", from 4,096 rows", row.device].append(error)
    lines = [f"{'set':42}{'device':16}{'rows':>6}{'median':>9}{'mean':>8}{'bias':>8}{'worst':>9}"]
    for (group, device), found in sorted(groups.items()):
        sizes = [abs(error) for error in found]
        lines.append(
            f"{group:42}{device:16}{len(found):6}{median(sizes):9.1%}{mean(sizes):8.1%}"
            f"{median(found):+8.1%}{max(found, key=abs):+9.1%}"
        )
    return "\n".join(lines)


def read_rows(folder: Path) -> list[Row]:
    return [*kernel_rows(folder), *neusight_rows(folder), *mpt_rows(folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measurements")
    options = parser.parse_args()
    predictor = Predictor(read_rows(options.data))
    errors = predictor.seconds(load_gpu_table()) / predictor.measured_s - 1
    print(summarize(predictor.rows, list(errors)))


if __name__ == "__main__":
    main()
