"""Arguments, result and exit code that the programs of all stages share."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.driver import LACKING
from benchmarks.gpu_check.rehearsal import rehearsed_on_card

Result = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """Arguments of a stage.

    Attributes:
        device: ``cuda`` or ``cpu``.
        folder: Where the records of earlier stages are.
        tables: Where tables of the device are written.
    """

    device: str
    small: bool
    folder: Path
    tables: Path


class Failed(Exception):
    """The stage came to its end and found a fault; ``result`` is kept."""

    def __init__(self, words: str, result: Result) -> None:
        super().__init__(words)
        self.result = result


class Lacking(Exception):
    """A package is not there without which the stage says nothing; the message names it."""


def run_program(stage: Callable[[Given], Result], *, asks_cuda: bool = False) -> int:
    """Run a stage by the command line's arguments, write its result, return its exit code.

    One that ``asks_cuda`` of this process runs on the CPU as if that were a card.
    """
    parser = argparse.ArgumentParser(description=(stage.__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--output", type=Path, required=True, help="file for the result")
    parser.add_argument("--folder", type=Path, required=True, help="records of other stages")
    parser.add_argument(
        "--profiles", type=Path, help="folder for tables (default: that of the records)"
    )
    given, _ = parser.parse_known_args()
    code = 0
    try:
        with rehearsed_on_card() if asks_cuda and given.device == "cpu" else nullcontext():
            tables = given.profiles or given.folder
            result = stage(Given(given.device, given.small, given.folder, tables))
    except Failed as fault:
        result, code = {**fault.result, "error": str(fault)}, 1
    except Lacking as fault:
        result, code = {"error": str(fault)}, LACKING
    except Exception as error:  # noqa: BLE001 (whatever it is goes into the record)
        traceback.print_exc()
        result, code = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}, 1
    given.output.write_text(json.dumps(result), encoding="utf-8")
    sys.stderr.flush()
    return code
