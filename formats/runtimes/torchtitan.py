"""torchtitan: names of the modules in each model part, as a setting or flag."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import accumulate, pairwise
from typing import Any

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.profile.block_stack import BlockStack
from ..settings import Settings
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    count_ranks,
    parse_literal,
    write_header,
)
from .block_counts import split_evenly
from .torch_pipelining import SCHEDULE_CLASSES, find_schedule, write_compute_csv

TITLE = "torchtitan"
CHECKED = "torchtitan 0.3.0, its own _split_module"
CSV_NAME = "schedule.csv"

_FULL_CHECKPOINTS = re.compile(r"activation_checkpoint(?:\]\s*|\.)mode[\s=]+\"?full\b")

FIRST_NAMES = ("tok_embeddings",)
LAST_NAMES = ("norm", "lm_head")
"""torchtitan's own names of what precedes and follows ``layers.N``."""


def write(plan: Plan) -> Export:
    """Write ``module_fqns_per_model_part`` as TOML and as flags, and the schedule as CSV."""
    parts = list_parts(plan)
    schedule = SCHEDULE_CLASSES[plan.schedule].removeprefix("Schedule")
    places = count_ranks(plan)
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "Use: merge it into the job's configuration, or as flags: "
        f"--parallelism.pipeline_parallel_degree {places} "
        f"--parallelism.module_fqns_per_model_part '{json.dumps(parts)}'",
        f"{CSV_NAME} has the plan's own order of work; leave that line out for torchtitan's.",
    )
    lines = [
        "[parallelism]",
        f"pipeline_parallel_degree = {places}",
        f'pipeline_parallel_schedule = "{schedule}"',
        f'pipeline_parallel_schedule_csv = "{CSV_NAME}"',
        f"num_pp_microbatches = {plan.num_microbatches}",
        "module_fqns_per_model_part = [",
        *(f"    {json.dumps(part)}," for part in parts),
        "]",
    ]
    if any(stage.recompute == "layers" for stage in plan.stages):
        lines += ["", "[activation_checkpoint]", 'mode = "full"']
    return Export(header + "\n".join(lines) + "\n", {CSV_NAME: write_compute_csv(plan)})


def list_parts(plan: Plan) -> list[list[str]]:
    """Return the module names of each stage.

    Names of a model written for torchtitan, direct children of the model, are kept. Those of other
    models, such as ``model.embed_tokens``, are put into torchtitan's: ``tok_embeddings``,
    ``layers.N``, ``norm``, ``lm_head``.
    """
    stack = ModelLayers.of(plan).stack
    cuts = list(accumulate(plan.balance, initial=0))
    names = plan.layer_names
    edges = (*names[: stack.starts[0]], *names[stack.end :])
    edges = tuple(name.partition("@")[0] for name in edges)
    is_own = "." not in stack.prefix and all("." not in name for name in edges)
    parts = []
    for first, last in pairwise(cuts):
        blocks = range(stack.count(first), stack.count(last))
        before = list(names[first : min(last, stack.starts[0])])
        after = list(names[max(first, stack.end) : last])
        before, after = (
            list(dict.fromkeys(name.partition("@")[0] for name in part)) for part in (before, after)
        )
        if not is_own:
            before, after = list(FIRST_NAMES) * bool(before), list(LAST_NAMES) * bool(after)
        own = [stack.name(block) if is_own else f"layers.{block}" for block in blocks]
        parts.append(list(dict.fromkeys((*before, *own, *after))))
    return parts


def split_by_default(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Return torchtitan's own split, in which embedding and head count as a block each."""
    if num_stages == 1:
        return (num_blocks,)
    # _generate_llm_fqn_per_model_part of 0.3.0, with its default weights.
    first, *middle, last = split_evenly(num_blocks + 2, num_stages)
    return (first - 1, *middle, last - 1)


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read ``module_fqns_per_model_part``, or its lists alone.

    Raises:
        InvalidInput: There are no such lists, or they name modules that the model does not have.
    """
    text = settings.text
    parts = _find_parts(text)
    is_lists = isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts)
    if not is_lists or not all(isinstance(name, str) for part in parts for name in part):
        raise InvalidInput(
            'expected lists of module names such as [["tok_embeddings", "layers.0"], '
            '["layers.1", "norm", "lm_head"]]'
        )
    places = settings.pipeline or len(parts)
    if len(parts) % places:
        raise InvalidInput(f"{len(parts)} model parts are no multiple of {places!r} ranks")
    schedule = None
    if name := settings.words.get("pipeline-parallel-schedule"):
        schedule = find_schedule(f"Schedule{name}", len(parts) // places)
        if schedule is None:
            raise InvalidInput(f"torchtitan's schedule {name!r} is none of ours")
    count = settings.counts.get("num-pp-microbatches")
    if count is not None and count < 1:
        raise InvalidInput(f"num_pp_microbatches is {count!r}; give a whole number from 1")
    stack = layers.stack
    listed = {name for part in parts for name in part}
    beyond = sorted(name for name in listed - {*layers.names} if _is_beyond(name, stack))
    return ImportedCut(
        # Modules are kept in the model's order, whatever the order of their names.
        tuple(tuple(sorted(_find_layers(part, layers.names, stack))) for part in parts),
        len(layers.names),
        schedule=schedule,
        chunks=len(parts) // places,
        ranks_setting="" if settings.pipeline else "pipeline_parallel_degree",
        num_microbatches=count,
        microbatch_size=settings.counts.get("pipeline-parallel-microbatch-size"),
        recompute="layers" if _FULL_CHECKPOINTS.search(text) else None,
        excess=f"{beyond[0]!r} is listed, but the model has {stack.num_blocks} blocks"
        if beyond
        else "",
    )


def _find_parts(text: str) -> Any:
    """Return the lists of a TOML file, or the first that a text has."""
    try:
        settings = tomllib.loads(text).get("parallelism", {})
        return settings["module_fqns_per_model_part"]
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        return parse_literal(text, "[[")


def _find_block(name: str, stack: BlockStack) -> int | None:
    """Return the number of a block by its name in the model, or by torchtitan's."""
    own = rf"{re.escape(stack.prefix)}\." if stack.prefix else ""
    if found := re.fullmatch(rf"{own}(\d+)", name):
        return int(found[1]) - stack.first
    theirs = re.fullmatch(r"layers\.(\d+)", name)
    return int(theirs[1]) if theirs else None


def _is_beyond(name: str, stack: BlockStack) -> bool:
    block = _find_block(name, stack)
    return block is not None and block >= stack.num_blocks


def _find_layers(part: list[str], names: tuple[str, ...], stack: BlockStack) -> list[int]:
    found: list[int] = []
    for name in part:
        block = _find_block(name, stack)
        if block is not None and 0 <= block < stack.num_blocks:
            found += range(stack.cuts[block], stack.cuts[block + 1])
        elif name in names:
            # A module that runs between blocks is part of them.
            outside = (*range(stack.starts[0]), *range(stack.end, stack.num_layers))
            found += [at for at in outside if names[at].partition("@")[0] == name]
        elif name in FIRST_NAMES:
            found += range(stack.starts[0])
        # The last layer is the head; whatever else follows the blocks is the norm's.
        elif name == "norm":
            found += range(stack.end, stack.num_layers - 1)
        elif name in ("lm_head", "output"):
            found += range(max(stack.end, stack.num_layers - 1), stack.num_layers)
        elif not _is_beyond(name, stack):
            raise InvalidInput(f"the model has no module {name!r}")
    return found
