"""DeepSpeed: a PipelineModule with explicit parts, which its own arguments cannot give."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    Target,
    TargetRules,
    list_devices,
    write_header,
)
from .block_counts import parse_counts

TITLE = "DeepSpeed"
CHECKED = "deepspeed 0.19.8, its own PipelineModule on two processes"

_CLASS = '''\
from deepspeed.pipe import PipelineModule

PARTS = {parts}
NUM_LAYERS = {num_layers}


class PlannedPipelineModule(PipelineModule):
    """A PipelineModule cut at PARTS; it takes the arguments of PipelineModule."""

    def __init__(self, layers, *args, **kwargs):
        if len(layers) != NUM_LAYERS:
            raise ValueError(f"the plan is for {{NUM_LAYERS}} layers, not {{len(layers)}}")
        kwargs.setdefault("num_stages", len(PARTS) - 1)
        kwargs.setdefault("activation_checkpoint_interval", {interval})
        super().__init__(layers, *args, **kwargs)

    def _partition_layers(self, method="uniform"):
        self.parts = list(PARTS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''


def write(plan: Plan) -> Export:
    """Write ``PlannedPipelineModule``, whose layers are those of the plan, in order."""
    parts = list(accumulate(plan.balance, initial=0))
    # DeepSpeed recomputes runs of that many layers; one run a stage is what the plan counts on.
    interval = max(plan.balance) if plan.stages[0].recompute == "always" else 0
    size = plan.microbatch_size
    batch = f', "train_micro_batch_size_per_gpu": {size}' if size else ""
    # Each replica takes its share of the micro-batches.
    steps = plan.num_microbatches // plan.stages[0].replicas
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "Use: engine = deepspeed.initialize(model=PlannedPipelineModule(layers, loss_fn=loss), "
        f'config={{"gradient_accumulation_steps": {steps}{batch}, ...}})[0]; '
        "engine.train_batch(iterator)",
        'DeepSpeed clips gradients to a norm of 1 unless the config says "gradient_clipping": 0.0.',
        f"layers has {len(plan.layer_names)} entries, modules or LayerSpecs, one for each of:",
        *(f"  {index}: {name}" for index, name in enumerate(plan.layer_names)),
        f"{list_devices(plan)}.",
    )
    return Export(
        header + _CLASS.format(parts=parts, num_layers=len(plan.layer_names), interval=interval)
    )


def read(text: str, layers: ModelLayers) -> ImportedCut:
    """Read ``PARTS``, cumulative from 0, or such a list alone.

    Raises:
        InvalidInput: There are no parts, they do not begin with 0, or they fall.
    """
    found = re.search(r"(?:PARTS|parts)\s*=\s*(\[[^\]]*\])", text)
    parts = parse_counts(found[1] if found else text)
    counts = [last - first for first, last in pairwise(parts)]
    if parts[0] != 0 or len(parts) < 2 or min(counts) < 0:
        raise InvalidInput(f"parts begin with 0 and rise, such as [0, 3, 8]; found {list(parts)}")
    interval = re.search(r'"activation_checkpoint_interval", (\d+)', text)
    return ImportedCut(
        layers.from_counts(counts),
        len(layers.names),
        schedule="1f1b",
        recompute=("always" if int(interval[1]) else "never") if interval else None,
    )


TARGET = Target(
    name="deepspeed",
    title=TITLE,
    checked_with=CHECKED,
    file_name="planned_pipeline_module.py",
    rules=TargetRules(
        unit="layer",
        schedules=("1f1b",),
        replicas="equal",
        recompute=("always",),
        tied_weights=True,
    ),
    write=write,
    read=read,
)
