"""PipeDream: the configuration file of its runtime, which maps modules to stages and ranks."""

from __future__ import annotations

import json
from itertools import chain

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..gpu_numbers import find_gpu, list_ranks
from ..settings import Settings
from ..target import Export, ImportedCut, ModelLayers, write_header

TITLE = "PipeDream"
CHECKED = "the keys that runtime/*/main_with_runtime.py reads, not run"


def write(plan: Plan) -> Export:
    """Write ``module_to_stage_map`` and ``stage_to_rank_map``.

    Its runtime has a module for each stage and, last, the loss, which runs with the last stage.
    JSON has no comments, so the plan is named under a key the runtime does not read, and so are
    the layers of each stage.
    """
    held = list_ranks(plan)
    used = sorted(chain(*held))
    visible = [find_gpu(plan, rank) for rank in used] if used[-1] >= len(used) else ()
    comment = write_header(
        plan, TITLE, CHECKED, "Use: --config_path.", comment="", visible=visible
    ).splitlines()
    document = {
        "_comment": [line.strip() for line in comment],
        "_layers": [list(stage.layer_names) for stage in plan.stages],
        "module_to_stage_map": [*range(plan.num_stages), plan.num_stages - 1],
        "stage_to_rank_map": {
            str(index): list(map(used.index, ranks)) for index, ranks in enumerate(held)
        },
    }
    return Export(json.dumps(document, indent=2) + "\n")


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read a configuration that says which layers its modules have, as `write` does.

    Raises:
        InvalidInput: It is not such a file, or does not say which layers a module has.
    """
    try:
        document = json.loads(settings.text)
        modules = [[str(name) for name in names] for names in document["_layers"]]
        stages = [int(stage) for stage in document["module_to_stage_map"]]
        ranks = {
            int(stage): tuple(map(int, held))
            for stage, held in document["stage_to_rank_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            "expected PipeDream's JSON with module_to_stage_map, stage_to_rank_map and, for the "
            f"layers of each module, _layers ({type(error).__name__}: {error})"
        ) from None
    index = {name: number for number, name in enumerate(layers.names)}
    unknown = [name for names in modules for name in names if name not in index]
    if unknown:
        raise InvalidInput(f"the model has no layer {unknown[0]!r}")
    if len(stages) != len(modules) + 1 or not set(stages) == set(ranks) == set(range(len(ranks))):
        raise InvalidInput(
            f"{len(modules)} modules and the loss, but {len(stages)} entries in "
            f"module_to_stage_map; stages {sorted(set(stages))} have ranks {sorted(ranks)}"
        )
    held: list[list[int]] = [[] for _ in ranks]
    for stage, names in zip(stages, modules, strict=False):
        held[stage].extend(index[name] for name in names)
    return ImportedCut(
        tuple(map(tuple, held)),
        len(layers.names),
        gpus=tuple(ranks[stage] for stage in range(len(ranks))),
        replicas=tuple(len(ranks[stage]) for stage in range(len(ranks))),
        schedule="1f1b",
    )
