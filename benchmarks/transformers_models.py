"""Capture, plan and verify forty models of transformers as they come: nothing but their sizes set.

Every model keeps the defaults of its configuration: caches, dropout, tied weights. It is measured
and planned on two devices. Then one step in the plan's stages is compared with one unsplit
(`runtime.verify`), and the pipeline's outputs in evaluation mode with those of transformers' own
forward. Weights and inputs are float64, which tells rounding from errors, but for mixtures of
experts. Exits 1 if fewer than 38 are equal, or if a refusal names no line of code.

    python benchmarks/transformers_models.py --write docs/evidence/transformers.md

With ``--files`` the models are a small config.json of each type that may be given as one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from tables import escaped, markdown_table, write_between_marks

if TYPE_CHECKING:
    from zoo.published import Published

LEAST_EQUAL = 38
TOLERANCE, SINGLE_TOLERANCE = 1e-9, 1e-4
"""As `stagewright verify` without and with --single."""
TIME_LIMIT_S = 400.0
MICROBATCHES = 2
LINE = re.compile(r"\S+\.py(:|, line )\d+")
"""What a refusal has to name."""


@dataclass
class Row:
    """Result for one model.

    Attributes:
        name: Name of the architecture.
        kind: What it reads.
        verdict: "equal", "refused" (an error of Stagewright's) or "failed" (anything else).
        layers: Layers found.
        cuts: Legal cuts between them.
        stages: Stages of the plan.
        step: Worst relative difference of loss, gradients and buffers of a step.
        output: Worst relative difference of outputs from transformers' own, in evaluation mode.
        cpu_s: CPU seconds of its process.
        reason: Why it was not equal.
    """

    name: str
    kind: str
    verdict: str = "failed"
    layers: int = 0
    cuts: int = 0
    stages: int = 0
    step: float = 0.0
    output: float = 0.0
    cpu_s: float = 0.0
    reason: str = ""


def models() -> Mapping[str, Published]:
    """Return the models by name, whichever the command asks for."""
    from zoo import config_files, published

    return config_files.MODELS if "--files" in sys.argv else published.MODELS


def judge(name: str) -> Row:
    """Return the row of a model; whatever goes wrong is in it."""
    from stagewright.core.errors import StagewrightError

    row = Row(name, models()[name].kind)
    try:
        try_model(row)
    except StagewrightError as error:
        row.verdict, row.reason = "refused", str(error)
    except Exception as error:  # noqa: BLE001 - a failure is a row, not the end
        row.reason = f"{type(error).__name__}: {error}"
    row.cpu_s = time.process_time()
    return row


def try_model(row: Row) -> None:
    """Measure, plan and verify the row's model; leave the results in the row."""
    import torch
    from zoo.published import differ

    import stagewright
    from stagewright.core.plan.plan import PlanOptions
    from stagewright.core.requests.requests import ProfilingOptions
    from stagewright.runtime.verify import join_samples, make_dummy_target, mean_of_squares, verify

    published = models()[row.name]
    torch.manual_seed(0)
    model = published.build().train()
    samples = [published.sample() for _ in range(MICROBATCHES)]
    profile = stagewright.profile(model, samples[0], options=ProfilingOptions(budget_s=1.0))
    row.layers = len(profile.layers)
    row.cuts = sum(boundary.legal for boundary in profile.boundaries)
    stages = min(2, row.cuts + 1)
    options = PlanOptions(num_microbatches=MICROBATCHES, num_stages=stages)
    plan = stagewright.plan(profile, f"{stages}xcpu", options)
    row.stages = len(plan.stages)
    batch = join_samples(samples)
    target = make_dummy_target(plan.inputs[0].shape[0] * MICROBATCHES)
    found = verify(model, plan, batch, target, mean_of_squares)
    row.step = found.worst
    row.output = differ(published.build_again(model).eval(), plan, samples)
    tolerance = SINGLE_TOLERANCE if published.single else TOLERANCE
    if not found.equal(tolerance):
        row.reason = str(found)
    elif not row.output <= tolerance:
        row.reason = f"outputs differ from transformers' by {row.output:.2g}"
    else:
        row.verdict = "equal"


def run(names: Sequence[str]) -> Iterator[Row]:
    """Yield the row of each model, each judged in a process of its own, forked from this one."""
    import_libraries()
    context = multiprocessing.get_context("fork")
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=work, args=(name, sender), daemon=True)
        child.start()
        sender.close()
        yield collect(name, child, receiver)


def import_libraries() -> None:
    """Import what every child needs: seconds, once instead of for each model."""
    import torch
    import torch._dynamo
    import transformers  # noqa: F401
    import zoo.published  # noqa: F401

    import stagewright.runtime.verify  # noqa: F401

    torch.set_num_threads(1)


def work(name: str, answer: Connection) -> None:
    """Judge a model, in a child, in silence."""
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    answer.send(judge(name))


def collect(name: str, child: BaseProcess, receiver: Connection) -> Row:
    """Return what a child found, or how it ended."""
    row = Row(name, models()[name].kind)
    if not receiver.poll(TIME_LIMIT_S):
        child.kill()
        row.reason = f"still running after {TIME_LIMIT_S:.0f} s"
    else:
        try:
            row = receiver.recv()
        except EOFError:
            child.join()
            row.reason = f"its process ended with {child.exitcode}"
    child.join()
    receiver.close()
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the summary, the table and the reasons."""
    equal = sum(row.verdict == "equal" for row in rows)
    head = ("model", "reads", "verdict", "layers", "legal cuts", "stages", "step", "outputs")
    cells = [
        (
            row.name, row.kind, row.verdict, row.layers or "", row.cuts or "", row.stages or "",
            f"{row.step:.0e}" if row.stages else "", f"{row.output:.0e}" if row.stages else "",
        )
        for row in rows
    ]  # fmt: skip
    seconds = sum(row.cpu_s for row in rows)
    reasons = [f"- {row.name}: {escaped(row.reason)}" for row in rows if row.reason]
    summary = f"{equal} of {len(rows)} equal; {seconds:.0f} s of CPU."
    return "\n\n".join([summary, markdown_table(head, cells, 3), *reasons])


def is_kept(rows: Sequence[Row]) -> bool:
    """Return True if enough models are equal and every other one is refused with a line of code."""
    others = [row for row in rows if row.verdict != "equal"]
    enough = len(rows) - len(others) >= min(LEAST_EQUAL, len(rows))
    return enough and all(row.verdict == "refused" and LINE.search(row.reason) for row in others)


def read_rows(path: Path | None) -> dict[str, Row]:
    """Return the rows that an earlier run left in a file, by name."""
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row.name: row for row in found}


def main() -> int:
    """Judge the models; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--json", action="store_true", help="one object a model")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into FILE")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep rows in FILE, and go on")
    parser.add_argument("--files", action="store_true", help="models of a config.json")
    arguments = parser.parse_args()
    known_models = models()
    names = arguments.only.split(",") if arguments.only else list(known_models)
    unknown = [name for name in names if name not in known_models]
    if unknown:
        raise SystemExit(f"no model {', '.join(unknown)}; there are {', '.join(known_models)}")
    known = read_rows(arguments.rows)
    rows = [known[name] for name in names if name in known]
    for row in run([name for name in names if name not in known]):
        rows.append(row)
        print(json.dumps(asdict(row)) if arguments.json else f"{row.name}: {row.verdict}")
        sys.stdout.flush()
        if arguments.rows:
            with arguments.rows.open("a", encoding="utf-8") as file:
                print(json.dumps(asdict(row)), file=file)
    rows.sort(key=lambda row: names.index(row.name))
    if not arguments.json:
        print(table(rows))
    if arguments.write:
        command = "transformers_models.py" + (" --files" if arguments.files else "")
        write_between_marks(arguments.write, command, table(rows))
    return 0 if is_kept(rows) else 1


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, 16 * 2**30))
    sys.exit(main())
