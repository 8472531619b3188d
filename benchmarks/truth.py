"""Hold the estimator against other people's measurements.

``--data FOLDER`` names the measurements, of these devices or others of the catalogue. Prints median
and largest error by set, with the tables of the package; ``--fit`` fits tables to all rows and
writes them. ``--leave-one-out`` predicts every device from tables fitted without its rows, as well,
from which come the bands; without it, those of before are kept. ``--write`` writes
`docs/evidence/truth.md` and needs both of these; ``--rows FILE`` writes every row as CSV.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

import numpy as np
from truth_fit import NOT_FITTED, fit_table, same_chip
from truth_floor import LARGE, find_floors
from truth_links import MESSAGES, fit_links, fit_links_without, link_errors, message_errors
from truth_models import mpt_rows, neusight_rows
from truth_page import Verdict, write_page
from truth_predict import Predictor
from truth_published import megatron_rows, published_rows
from truth_rows import MEASURED, CollectiveRow, Row, collective_rows, kernel_rows
from truth_singles import PUBLISHED, published_all_reduces, published_products

from stagewright.core.cluster.accelerators import get_accelerator
from stagewright.core.cluster.collectives import LinkFigures, load_link_table
from stagewright.profiler.estimates.device_table import Arithmetic, GpuTable, load_gpu_table
from stagewright.profiler.estimates.error_band import BY_RULE, GPU_UNCALIBRATED
from stagewright.profiler.estimates.flops import OperationClass

Name = TypeVar("Name", bound=str)

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "profiler" / "estimates" / "tables" / "gpu.json"
LINKS = ROOT / "core" / "cluster" / "tables" / "links.json"
PAGE = ROOT / "docs" / "evidence" / "truth.md"

BANDS = {
    "16-bit transformer": ("training, bf16",),
    "32-bit transformer": ("training, fp32", "forward, fp32"),
}
"""Sets of whole models whose left-out errors make a class's band."""

MEMORY_BOUND = ("ln, fp32", "softmax, fp32")
"""Sets of reductions, which memory bounds at any precision."""

KERNEL_BANDS: dict[Arithmetic, dict[OperationClass, tuple[str, ...]]] = {
    "simt": {
        "matmul": ("products, fp32", "batched products, fp32"),
        "reduction": MEMORY_BOUND,
    },
    "tensor": {
        "matmul": ("products, bf16",),
        "attention": ("attention forward, bf16",),
        "reduction": MEMORY_BOUND,
    },
}
"""Sets of kernels whose errors with the chip left out make the band of a class of kernels."""

SOURCES = ("aiconfigurator", "llm-foundry", "megatron", "neusight", "nnscaler")
"""Folders of the measurements; without one of them a fit would forget what it says."""

COVERED = 0.9
"""Share of left-out rows that a band has to hold."""


def main() -> None:
    options = _arguments()
    sums = [*collective_rows(options.data), *published_all_reduces()]
    rows = read_rows(options.data, options.cache)
    table, links = load_gpu_table(), load_link_table()
    if options.fit:
        links = fit_links(sums)
        known = {"bands": table.bands, "kernel_bands": table.kernel_bands}
        table = fit_table(rows, links=links).model_copy(update=known)
    predictor = Predictor(rows, links)
    inside = relative_errors(predictor, table)
    how = "in sample" if options.fit else "by the tables of the package"
    print(f"{how}\n{summarize(predictor.rows, inside)}")
    device_out, chip_out = ([float("nan")] * len(rows) for _ in range(2))
    if options.leave_one_out:
        device_out = leave_one_out(
            predictor.rows, sums, lambda name: frozenset({name}), keep_published=True
        )
        print("\nleave one device out\n" + summarize(predictor.rows, device_out))
        chip_out = leave_one_out(predictor.rows, sums, same_chip)
        print("\nleave one chip out\n" + summarize(predictor.rows, chip_out))
        table = _with_bands(table, predictor.rows, device_out, chip_out)
        print(f"\nbands: {table.bands}, of kernels: {table.kernel_bands}")
    verdicts = _verdicts(predictor.rows, table, inside, device_out, chip_out)
    verdicts += _link_verdicts(sums, links)
    print("\nall-reduce\n" + _describe_links(verdicts))
    if options.write:
        floors = find_floors(predictor.rows)
        delays = link_errors(sums, lambda device: _with_bandwidths(sums, links, device))
        floors["all-reduce"] = mean(abs(error) for _, error in delays)
        hosts = len({(row.host, row.device) for row in sums if row.host != MEASURED})
        page = write_page(verdicts, table, (*NOT_FITTED, MESSAGES), links, floors, hosts)
        PAGE.write_text(page, encoding="utf-8")
    if options.fit:
        today = f"{datetime.now(tz=UTC).date()}"
        _write_json(TABLE, table.model_copy(update={"date": today}).model_dump())
        _write_json(LINKS, {name: entry.model_dump() for name, entry in links.items()})
    if options.rows:
        _write_rows(options.rows, verdicts)


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
        *published_products(),
    ]
    if cache is not None:
        cache.write_bytes(pickle.dumps(rows))
    return rows


def relative_errors(predictor: Predictor, table: GpuTable) -> list[float]:
    return list(predictor.seconds(table) / predictor.measured_s - 1)


def leave_one_out(
    rows: Sequence[Row],
    sums: Sequence[CollectiveRow],
    list_left_out: Callable[[str], frozenset[str]],
    *,
    keep_published: bool = False,
) -> list[float]:
    """Predict every device from tables of devices and links fitted without some devices' rows.

    Published products are only there to be fitted to: their errors are left NaN.
    """
    found: dict[int, float] = {}
    measured = {row.device for row in rows if row.group not in PUBLISHED}
    for left_out in sorted({list_left_out(name) for name in measured}, key=sorted):
        chosen = [
            index
            for index, row in enumerate(rows)
            if row.device in left_out and row.group not in PUBLISHED
        ]
        links = fit_links_without(sums, left_out, keep_published=keep_published)
        table = fit_table(rows, left_out, keep_published=keep_published, links=links)
        predictor = Predictor([rows[index] for index in chosen], links)
        index_of = {id(rows[index]): index for index in chosen}
        errors = relative_errors(predictor, table)
        for row, error in zip(predictor.rows, errors, strict=True):
            found[index_of[id(row)]] = error
        names = ", ".join(sorted(left_out & measured))
        print(f"without {names}: median {np.median(np.abs(errors)):.1%}", file=sys.stderr)
    return [found.get(index, float("nan")) for index in range(len(rows))]


def _with_bands(
    table: GpuTable, rows: Sequence[Row], device_out: Sequence[float], chip_out: Sequence[float]
) -> GpuTable:
    """Return the table with new bands, and those of before for sets that were not measured."""
    measured = bands(rows, device_out, BANDS)
    # What follows from a rule is not surer than what was measured, whatever few chips say.
    by_rule = {
        name + BY_RULE: max(band, measured[name])
        for name, band in bands(rows, chip_out, BANDS).items()
    }
    kernels = {
        kind: table.kernel_bands.get(kind, {}) | bands(rows, chip_out, sets)
        for kind, sets in KERNEL_BANDS.items()
    }
    return table.model_copy(
        update={"bands": table.bands | measured | by_rule, "kernel_bands": kernels}
    )


def bands(
    rows: Sequence[Row], errors: Sequence[float], sets_of: Mapping[Name, tuple[str, ...]]
) -> dict[Name, float]:
    """Return the band of each class measured: what `COVERED` of its left-out rows keep to."""
    found = {}
    for name, sets in sets_of.items():
        sizes = [abs(error) for row, error in zip(rows, errors, strict=True) if row.group in sets]
        if not sizes:
            print(f"no rows of {', '.join(sets)}: the band of before is kept", file=sys.stderr)
            continue
        found[name] = float(np.ceil(100 * np.quantile(sizes, COVERED)) / 100)
    return found


def summarize(rows: Sequence[Row], errors: Sequence[float]) -> str:
    """Return a table of errors by set and device."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        if math.isnan(error):
            continue
        names = [row.group]
        if _is_large(row):
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


def _is_large(row: Row) -> bool:
    return "products" in row.group and row.facts.get("m", 0) >= LARGE


def _verdicts(
    rows: Sequence[Row],
    table: GpuTable,
    inside: Sequence[float],
    device_out: Sequence[float],
    chip_out: Sequence[float],
) -> list[Verdict]:
    return [
        Verdict(
            row.group, row.device, row.name, row.measured_s, inside[index], device_out[index],
            chip_out[index], _is_large(row), printed_band(row, table), _share_of_peak(row),
        )
        for index, row in enumerate(rows)
    ]  # fmt: skip


def printed_band(row: Row, table: GpuTable) -> float:
    """Return the band that an estimate of a whole model prints, with this table."""
    if row.name.startswith("ResNet"):
        return GPU_UNCALIBRATED.largest
    kind = "32-bit transformer" if row.precision == "float32" else "16-bit transformer"
    share = table.product_share(get_accelerator(row.device), row.precision)
    return table.bands.get(kind if share[1] == "table" else kind + BY_RULE, math.nan)


def _share_of_peak(row: Row) -> float:
    """Return the share of the data sheet's rate at which a row was measured."""
    flops = sum(cost.flops for part in row.parts for cost in part)
    return flops / row.measured_s / get_accelerator(row.device).peak_flops_per_s(row.precision)


def _link_verdicts(sums: Sequence[CollectiveRow], links: dict[str, LinkFigures]) -> list[Verdict]:
    tables: list[Callable[[str], dict[str, LinkFigures]]] = [
        lambda _: links,
        cache(lambda device: fit_links_without(sums, frozenset({device}), keep_published=True)),
        cache(lambda device: fit_links_without(sums, same_chip(device))),
    ]
    return [
        Verdict(
            group, row.device, f"{row.size_bytes:,} bytes on {row.num_devices}",
            row.measured_s, inside, left_out, chip_out,
        )
        for group, errors in (("all-reduce", link_errors), (MESSAGES, message_errors))
        for (row, inside), (_, left_out), (_, chip_out) in zip(
            *(errors(sums, predict) for predict in tables), strict=True
        )
    ]  # fmt: skip


def _with_bandwidths(
    sums: Sequence[CollectiveRow], links: dict[str, LinkFigures], device: str
) -> dict[str, LinkFigures]:
    """Lend a device left out the bandwidths of its link: what remains is its delays."""
    link = get_accelerator(device).link
    found = fit_links_without(sums, frozenset({device}), keep_published=True)
    own = links[link].bandwidth
    return found | {link: found[link].model_copy(update={"bandwidth": own})}


def _describe_links(verdicts: Sequence[Verdict]) -> str:
    lines = []
    for device in sorted({one.device for one in verdicts if one.group == "all-reduce"}):
        found = [one for one in verdicts if (one.group, one.device) == ("all-reduce", device)]
        lines.append(
            f"{device:16}{len(found):5} rows, mean error in sample "
            f"{mean(abs(one.in_sample) for one in found):.1%}, "
            f"left out {mean(abs(one.left_out) for one in found):.1%}"
        )
    return "\n".join(lines)


def _write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2)
    # Fifteen digits of a fit say nothing.
    rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
    path.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")


def _write_rows(path: Path, verdicts: Sequence[Verdict]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(
            ("set", "device", "what", "measured_s", "in_sample", "device_left_out", "chip_left_out")
        )
        for one in sorted(verdicts, key=lambda one: -abs(one.judged)):
            errors = (one.in_sample, one.left_out, one.chip_out)
            writer.writerow((one.group, one.device, one.name, one.measured_s, *errors))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measurements")
    parser.add_argument("--cache", type=Path, help="file that keeps the rows between runs")
    parser.add_argument("--fit", action="store_true", help="fit tables to all rows and write them")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/truth.md")
    parser.add_argument("--rows", type=Path, help="write every row to this CSV file")
    options = parser.parse_args()
    if options.write and not (options.fit and options.leave_one_out):
        parser.error("--write needs --fit and --leave-one-out: the page has both")
    if not options.data.is_dir():
        parser.error(f"{options.data} is no folder; --data takes that of the measurements")
    lacks = [name for name in SOURCES if not (options.data / name).is_dir()]
    if lacks and options.fit:
        parser.error(f"{options.data} lacks {', '.join(lacks)}: tables are fitted to all of them")
    return options


if __name__ == "__main__":
    main()
