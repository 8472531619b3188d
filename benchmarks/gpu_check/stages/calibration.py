"""The device's tables for the estimator, as `stagewright calibrate` collects them."""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu_check.program import Given, Lacking, Result, run_program
from stagewright.core.cluster.accelerators import Precision, default_precision, find_by_driver_name
from stagewright.profiler.estimates.calibrate_here import calibrate_here
from stagewright.profiler.estimates.calibration_table import calibration_path


def calibration(given: Given) -> Result:
    """Write a table for each precision that the device has, to be kept where estimates look."""
    tables = [calibrate_here(given.device, name, 1, _say) for name in _precisions(given.device)]
    given.tables.mkdir(parents=True, exist_ok=True)
    rows = []
    for table in tables:
        kept = calibration_path(table.device, table.precision, table.num_threads)
        size = "small-" if given.small else ""
        path = given.tables / f"calibration-{size}{kept.name}"
        table.write(path)
        rows.append(
            {
                "file": path.name,
                "keep_as": kept.name,
                "operations": len(table.operations),
                "median_error": table.median_error,
                "bands": table.bands,
            }
        )
    files = ", ".join(f"{row['file']} (fitted to {row['median_error']:.0%})" for row in rows)
    return {"tables": rows, "words": f"wrote {files}"}


def _precisions(device: str) -> tuple[Precision, ...]:
    if device == "cpu":
        return ("float32",)
    name = torch.cuda.get_device_name()
    entry = find_by_driver_name(name)
    if entry is None:
        raise Lacking(f"{name} is not in the catalogue, so that its peak rates are not known")
    return tuple(dict.fromkeys((default_precision([entry]), "float32")))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(run_program(calibration, asks_cuda=True))
