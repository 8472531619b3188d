"""``stagewright calibrate``: time operations on this machine's device and keep its table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from ..support.named_models import read_precision
from ..support.output import JsonFlag, check_writable, emit, say


def command(
    device: Annotated[
        str, Option("--device", "-d", help="cpu or cuda. Default: cuda if there is one.")
    ] = "",
    precision: Annotated[
        str | None,
        Option(help="fp32, tf32, bf16 or fp16. Default: as for estimates of the device."),
    ] = None,
    threads: Annotated[int | None, Option(help="CPU cores to use. Default: all.")] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", help="Write the results here. Default: where 'estimate' finds them."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this device, so that 'stagewright estimate' predicts it more accurately.

    Products, attention, convolutions and memory traffic are timed for at most five minutes. The
    results are kept by device and precision; 'estimate' says when it used them.
    """
    from ...core.requests.precision import split_precision
    from ...profiler.estimates.calibrate_here import calibrate_here
    from ...profiler.estimates.calibration_table import calibration_path

    if output is not None:
        check_writable(output)
    asked = read_precision(precision)
    table = calibrate_here(device, asked and split_precision(asked)[0], threads, say)
    path = output or calibration_path(table.device, table.precision, table.num_threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.to_json() + "\n", encoding="utf-8")
    if as_json:
        emit(table.to_json())
        return
    emit(f"{table.device_name} at {table.precision}: {len(table.operations)} operations")
    for kind, share in table.efficiency.items():
        emit(f"  {kind:12} {share:6.1%} of the data sheet's rate")
    emit(f"  median error of the fit {table.median_error:.1%}; kept in {path}")
