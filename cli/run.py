"""``stagewright run``: train a plan's model on this machine, a process a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .documents import read_document
from .follow_ups import command_line
from .output import JsonFlag, emit, say, say_next


def command(
    plan: Annotated[Path, Argument(metavar="PLAN", help="A file written by 'stagewright plan'.")],
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 3,
    compare: Annotated[
        bool, Option("--compare", help="Train the unsplit model too and compare the losses.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Of the weights and the data.")] = 0,
    timeout: Annotated[float, Option(min=1, help="Seconds a rank waits for another.")] = 120.0,
    as_json: JsonFlag = False,
) -> None:
    """Train a plan's model on made-up data under torchrun, and compare with the prediction."""
    from ..core.plan import Plan
    from ..core.text_table import text_table
    from ..core.units import count
    from .comparison import Comparison
    from .launch import check_trainable, train

    document = read_document(plan, Plan)
    check_trainable(document)
    say(f"training {count(document.num_stages, 'stage')} for {count(steps, 'step')}", quiet=as_json)
    split = train(document, steps=steps, seed=seed, timeout_s=timeout)
    whole = None
    if compare:
        say("training the unsplit model for comparison", quiet=as_json)
        whole = train(document, steps=steps, seed=seed, whole=True)
    comparison = Comparison.of(document, split, whole)
    emit(comparison.to_json() if as_json else text_table(comparison.rows()))
    comparison.check()
    for line in comparison.remarks():
        say(line, quiet=as_json)
    say("examples/train.py shows the same in a script of your own", quiet=as_json)
    say_next(command_line("show", plan, "--trace", "trace.json"), quiet=as_json)
