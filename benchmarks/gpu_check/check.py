"""The GPU check's command line: chooses stages, runs them, and writes what all of them found."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_check.driver import REPOSITORY, Driver
from benchmarks.gpu_check.order import STAGES, Stage, choose
from benchmarks.gpu_check.records import Setting, load
from benchmarks.gpu_check.report import faults, make_report, missing, page, verdict

WRONG_ARGUMENTS, NO_DEVICE = 2, 3


def main(description: str) -> int:
    """Run the stages asked for; return the exit code."""
    parser = make_parser(description)
    given = parser.parse_args()
    if given.rehearse:
        given.device, given.small = "cpu", True
        given.minutes, given.budget = min(given.minutes, 10.0), 0.2
    try:
        stages = choose(given.stages, STAGES) if given.stages else list(STAGES)
        again = [stage.name for stage in choose(given.again, STAGES)]
    except ValueError as error:
        parser.error(str(error))
    # At the end of a job, or of a terminal, no stage may stay behind and keep the GPU busy.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the second
            signal.signal(number, _stop)
    if given.rehearse and given.output is None:
        with tempfile.TemporaryDirectory() as name:
            return check(given, stages, again, Path(name), Path(name))
    output = given.output or REPOSITORY / "benchmarks/results"
    return check(given, stages, again, output, given.profiles or output)


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rehearse", action="store_true", help="all stages, tiny, on the CPU")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all stages of this run")
    parser.add_argument("--stages", default="", help="only these, separated by commas; or models")
    parser.add_argument("--again", default="", help="repeat these although they passed before")
    parser.add_argument("--limit", type=float, help="seconds a stage may take, instead of its own")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of repeats a model")
    parser.add_argument("--output", type=Path, help="folder for results (benchmarks/results)")
    parser.add_argument("--profiles", type=Path, help="folder for profiles (that of the results)")
    return parser


def check(
    given: argparse.Namespace, stages: list[Stage], again: list[str], output: Path, profiles: Path
) -> int:
    """Run stages, write ``gpu_check.json`` and ``gpu_check.md``, and return the exit code."""
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no CUDA device here; run this on a GPU node, or try --rehearse\n")
        return NO_DEVICE
    try:
        (output / "stages").mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output / "stages").close()
    except OSError as error:
        sys.stderr.write(f"cannot write to {output} ({error.strerror}); give another --output\n")
        return WRONG_ARGUMENTS
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    setting = Setting(given.device, name, torch.__version__, given.small)
    options = ["--budget", str(given.budget), "--profiles", str(profiles)]

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    driver = Driver(
        setting, output / "stages", 60 * given.minutes, say, options=options, limit_s=given.limit
    )
    driver.run(stages, again)
    # Also what earlier runs found by the stages that were not asked for.
    records = load(output / "stages", [stage.name for stage in STAGES], setting)
    report = make_report(setting, records)
    (output / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (output / "gpu_check.md").write_text(page(report), encoding="utf-8")
    sys.stdout.write(json.dumps(report) + "\n")
    say(verdict(report))
    if not given.rehearse or given.output:
        say(f"wrote {output / 'gpu_check.md'}")
    asked = {stage.name for stage in stages}
    left = [name for name in missing(report) if name in asked]
    return 1 if faults(report) or left else 0
