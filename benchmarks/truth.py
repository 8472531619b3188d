"""Hold the estimator against other people's measurements.

``--data FOLDER`` names the measurements. Prints median and largest error by set, with the tables of
the package; ``--fit`` fits tables to all rows and writes them; ``--leave-one-out`` predicts every
chip from tables fitted without any of its rows, as well. ``--write`` writes
`docs/evidence/truth.md`, which needs both.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np
from truth_fit import chip, fit_table
from truth_models import mpt_rows, neusight_rows
from truth_predict import Predictor
from truth_published import megatron_rows, published_rows
from truth_rows import Row, kernel_rows

from stagewright.profiler.estimates.device_table import GpuTable, load_gpu_table

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "profiler" / "estimates" / "tables" / "gpu.json"


def main() -> None:
    options = _arguments()
    rows = read_rows(options.data, options.cache)
    table = load_gpu_table()
    if options.fit:
        table = fit_table(rows)
        TABLE.write_text(json.dumps(table.model_dump(), indent=2) + "\n", encoding="utf-8")
    predictor = Predictor(rows)
    print("in sample\n" + summarize(predictor.rows, relative_errors(predictor, table)))
    if options.leave_one_out:
        left_rows, errors = leave_one_out(rows)
        print("\nleave one chip out\n" + summarize(left_rows, errors))


def read_rows(folder: Path, cache: Path | None) -> list[Row]:
    """Return all rows; running the models takes a minute, so that ``cache`` may keep them."""
    if cache is not None and cache.exists():
        return list(pickle.loads(cache.read_bytes()))
    rows = [
        *kernel_rows(folder),
        *neusight_rows(folder),
        *mpt_rows(folder),
        *published_rows(),
        *megatron_rows(folder),
    ]
    if cache is not None:
        cache.write_bytes(pickle.dumps(rows))
    return rows


def relative_errors(predictor: Predictor, table: GpuTable) -> list[float]:
    return list(predictor.seconds(table) / predictor.measured_s - 1)


def leave_one_out(rows: Sequence[Row]) -> tuple[list[Row], list[float]]:
    """Predict every chip's rows from a table fitted to the others' alone."""
    found: list[Row] = []
    errors: list[float] = []
    for left_out in sorted({chip(row.device) for row in rows}):
        table = fit_table(rows, left_out)
        predictor = Predictor([row for row in rows if chip(row.device) == left_out])
        errors += relative_errors(predictor, table)
        found += predictor.rows
        print(f"without {left_out}: {np.median(np.abs(errors)):.1%} so far", file=sys.stderr)
    return found, errors


def summarize(rows: Sequence[Row], errors: Sequence[float]) -> str:
    """Return a table of errors by set and device."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        names = [row.group]
        if row.facts.get("m", 0) >= 4096 and "products" in row.group:
            names.append(row.group + ", from 4,096 rows")
        for name in names:
            groups[name, "all"].append(error)
            groups[name, row.device].append(error)
    lines = [f"{'set':44}{'device':16}{'rows':>6}{'median':>9}{'mean':>8}{'bias':>8}{'worst':>9}"]
    for (group, device), found in sorted(groups.items()):
        sizes = [abs(error) for error in found]
        lines.append(
            f"{group:44}{device:16}{len(found):6}{median(sizes):9.1%}{mean(sizes):8.1%}"
            f"{median(found):+8.1%}{max(found, key=abs):+9.1%}"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measurements")
    parser.add_argument("--cache", type=Path, help="file that keeps the rows between runs")
    parser.add_argument("--fit", action="store_true", help="fit tables to all rows and write them")
    parser.add_argument("--leave-one-out", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
