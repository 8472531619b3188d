"""Megatron-Core: the pipeline layout, a string with a letter for each layer.

``E`` is the embedding, ``t`` a decoder layer, ``m`` a multi-token-prediction layer and ``L`` the
loss, with norm and head. ``|`` ends a stage, ``x*n`` repeats a letter and ``(...)*n`` a group;
commas mean nothing. Stages are in model order, which with virtual stages is every rank's first
chunk, then every rank's second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from itertools import accumulate, groupby, pairwise

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..gpu_numbers import list_gpus
from ..settings import Settings
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    Rejection,
    count_ranks,
    parse_literal,
    write_header,
)
from .megatron_split import split_by_settings

TITLE = "Megatron-Core"
CHECKED = "megatron-core 0.16.1, its own PipelineParallelLayerLayout"

PREDICTION_NOTE = (
    "multi-token-prediction layers (m) are in no profile: their time and memory are left out"
)

MAX_LETTERS = 100_000
"""Letters of a layout with its repetitions written out."""

_LETTERS = re.compile(r"[EtmL|]*")


def write(plan: Plan) -> Export:
    """Write flags of ``pretrain_gpt.py``, and the form that NeMo and Megatron-Bridge take."""
    layout = format_layout(list_letters(plan))
    places, gpus = count_ranks(plan), list_gpus(plan)
    flags = [
        f"--pipeline-model-parallel-size {places}",
        f"--pipeline-model-parallel-layout '{layout}'",
    ]
    recompute = ""
    if any(stage.recompute == "layers" for stage in plan.stages):
        flags += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
        recompute = (
            ', recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1'
        )
    chunks = f", virtual_pipeline_model_parallel_size={plan.chunks}" if plan.chunks > 1 else ""
    size = plan.microbatch_size
    if size:
        flags += [
            f"--micro-batch-size {size}",
            f"--global-batch-size {size * plan.num_microbatches}",
        ]
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "Use: add these flags to pretrain_gpt.py. The number of virtual stages follows from the "
        "layout.",
        "In NeMo and Megatron-Bridge: "
        f"cfg.model.pipeline_model_parallel_size={places}, "
        f'cfg.model.pipeline_model_parallel_layout="{layout}"{chunks}{recompute}',
        "E is what precedes the blocks, L what follows them.",
        # Its ranks are all GPUs it sees, those beyond one pipeline as replicas.
        visible=gpus if plan.ranks or len(gpus) < plan.cluster_devices else (),
    )
    return Export(header + " \\\n".join(flags) + "\n")


def check_interleaving(plan: Plan, group: int | None = None) -> tuple[Rejection, ...]:
    """Refuse virtual stages that Megatron stops at: see its forward_backward_pipelining.

    Args:
        plan: The plan.
        group: Its --microbatch-group-size-per-virtual-pipeline-stage; the ranks if `None`.
    """
    if plan.chunks == 1:
        return ()
    places, replicas = count_ranks(plan), plan.stages[0].replicas
    if places == 1:
        reason = f"one rank has all {plan.chunks} stages, and {TITLE} interleaves two ranks or more"
        return (Rejection("virtual stages of one rank", reason, "schedule='1f1b'"),)
    count, group = plan.num_microbatches // replicas, group or places
    if places <= group <= count and not 0 < count % group < places:
        return ()
    reason = (
        f"with virtual stages on {places} ranks, {TITLE} does not run {count} micro-batches "
        f"in groups of {group}"
    )
    remedy = f"num_microbatches as a multiple of {places * replicas}, or schedule='1f1b'"
    return (Rejection("micro-batches of virtual stages", reason, remedy),)


def list_letters(plan: Plan) -> list[str]:
    """Return the letters of each stage, such as ``Ettt``."""
    stack = ModelLayers.of(plan).stack
    cuts = list(accumulate(plan.balance, initial=0))
    letters = ["t" * (stack.count(last) - stack.count(first)) for first, last in pairwise(cuts)]
    letters[0] = "E" + letters[0]
    letters[-1] += "L"
    return letters


def format_layout(stages: list[str]) -> str:
    """Write a layout with runs of letters and of equal stages as repetitions."""
    short = [re.sub(r"t{2,}", lambda run: f"t*{len(run[0])}", stage) for stage in stages]
    parts = []
    # The last stage has no bar behind it, so it stands apart.
    for stage, run in groupby(short[:-1]):
        length = len(list(run))
        parts.append(f"({stage}|)*{length}" if length > 1 else f"{stage}|")
    return "".join(parts) + short[-1]


def parse_layout(text: str) -> list[str]:
    """Return the letters of each stage of a layout, with repetitions written out.

    Raises:
        InvalidInput: It is not a layout, or has more letters than `MAX_LETTERS`.
    """
    layout = text.replace(",", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"([EtmL|])\*(\d{1,5})"):
        length = len(layout) + sum(
            len(match[1]) * int(match[2]) for match in re.finditer(pattern, layout)
        )
        if length > MAX_LETTERS:
            raise InvalidInput(f"the layout has more than {MAX_LETTERS} letters")
        layout = re.sub(pattern, lambda match: match[1] * int(match[2]), layout)
    if not _LETTERS.fullmatch(layout) or "E" not in layout:
        raise InvalidInput(
            "expected --pipeline-model-parallel-size, as Megatron's flag or NeMo's setting, or a "
            "layout of E, t, m, L and |, with x*n and (...)*n, such as 'Et*3|t*2|tL'; found "
            f"{text[:80]!r}"
        )
    return layout.split("|")


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read a layout, alone, behind its flag or as NeMo's setting, or Megatron's list of lists.

    Without one, `megatron_split.split_by_settings` says how the flags of a script cut the model.
    Multi-token-prediction layers are in no profile: they are checked by Megatron's rules and left
    out, with a note.

    Raises:
        InvalidInput: It is no layout, or breaks Megatron's rules for ``E``, ``L`` and ``m``.
    """
    text, ranks = settings.text, settings.pipeline
    rows = parse_literal(text, "[[")
    if rows is not None:
        stages = _read_rows(rows)
    elif ranks is not None and "layout" not in text:
        counts = split_by_settings(settings.counts, ranks, layers.stack.num_blocks)
        stages = ["t" * count for count in counts]
        stages[0] = "E" + stages[0]
        stages[-1] += "L"
    else:
        stages = parse_layout(_find_layout(text))
    flat = "".join(stages)
    ends = stages[0][:1], stages[-1][-1:]
    if flat.count("E") != 1 or flat.count("L") != 1 or ends != ("E", "L"):
        raise InvalidInput(
            "a layout's first stage begins with its only E, its last one ends with its only L"
        )
    places = ranks or len(stages)
    if len(stages) % places:
        raise InvalidInput(f"{len(stages)} stages are no multiple of {places} ranks")
    chunks = len(stages) // places
    _check_prediction(stages, places, flat)
    # A stage of E alone holds what precedes the blocks, one of L alone what follows.
    return layers.cut_by_blocks(
        [stage.count("t") for stage in stages],
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b" if ranks else None,
        chunks=chunks,
        ranks_setting="" if ranks else "--pipeline-model-parallel-size",
        num_microbatches=_count_microbatches(settings.counts),
        notes=(PREDICTION_NOTE,) * ("m" in flat),
        microbatch_size=settings.counts.get("micro-batch-size"),
        # Every block by itself: of Megatron's ways the only one that plans have, too.
        recompute="layers" if "recompute-method" in settings.words else None,
        check=partial(
            check_interleaving,
            group=settings.counts.get("microbatch-group-size-per-virtual-pipeline-stage"),
        ),
        fills_devices=ranks is not None,
    )


def _read_rows(rows: object) -> list[str]:
    """Return the letters of each stage of a list of lists of names of layers."""
    names = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise InvalidInput(f"expected a list of lists of {', '.join(names)}")
    found = [[names.get(str(name).strip().lower()) for name in row] for row in rows]
    if any(letter is None for row in found for letter in row):
        raise InvalidInput(f"a layout's lists name {', '.join(names)} alone")
    return ["".join(map(str, row)) for row in found]


def _check_prediction(stages: list[str], places: int, flat: str) -> None:
    """Check the place of multi-token-prediction layers as megatron-core does."""
    held = [index for index, stage in enumerate(stages) if "m" in stage]
    is_last = all(index >= len(stages) - places for index in held)
    if held and ("t" in flat[flat.index("m") :] or len(held) > 1 or not is_last):
        raise InvalidInput(
            "multi-token-prediction layers (m) follow all t, in one stage, which is of its rank's "
            "last chunk"
        )


def _count_microbatches(settings: Mapping[str, int]) -> int | None:
    """Return the global batch in micro-batches; `None` if the flags do not say both sizes."""
    size, batch = settings.get("micro-batch-size"), settings.get("global-batch-size")
    return max(1, batch // size) if size and batch else None


def _find_layout(content: str) -> str:
    found = re.search(
        r"pipeline[-_]model[-_]parallel[-_]layout[\"']?[\s=:]+[\"']?([EtmL|*()\d,]+)", content
    )
    return found[1] if found else content.strip().strip("\"'")
