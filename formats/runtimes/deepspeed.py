"""DeepSpeed: a PipelineModule with explicit parts, which its own arguments cannot give."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ...core.errors import InvalidInput
from ...core.graph.graph import Parameter
from ...core.plan.plan import Plan
from ...core.units import list_some
from ..settings import Settings
from ..target import (
    Export,
    ImportedCut,
    ModelLayers,
    Rejection,
    find_tied,
    write_header,
)
from .block_counts import parse_counts
from .deepspeed_split import split_by_method

TITLE = "DeepSpeed"
CHECKED = "deepspeed 0.19.8, its own PipelineModule on two processes"

_OWN_SPLIT = re.compile(r"(?:partition_method|num_stages|\"(?:stages|partition)\"|PipelineModule)")

COMPUTED = (
    "parts computed as {parts}, if the PipelineModule is given the profile's {number} layers; "
    "compare print(engine.module.parts)"
)

_CLASS = '''\
from deepspeed.pipe import PipelineModule{imports}

PARTS = {parts}
NUM_LAYERS = {num_layers}
REPLICAS = {replicas}
GRADIENT_ACCUMULATION_STEPS = {steps}
{tied}

class PlannedPipelineModule(PipelineModule):
    """A PipelineModule cut at PARTS; it takes the arguments of PipelineModule."""

    def __init__(self, layers, *args, **kwargs):
        if len(layers) != NUM_LAYERS:
            raise ValueError(f"the plan is for {{NUM_LAYERS}} layers, not {{len(layers)}}")
        kwargs.setdefault("num_stages", len(PARTS) - 1)
        kwargs.setdefault("activation_checkpoint_interval", {interval}){reentrant}
        super().__init__({layers}, *args, **kwargs)

    def _partition_layers(self, method="uniform"):
        self.parts = list(PARTS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''

# The default recomputes in a backward of its own, which has no gradient to start from where the
# first stage takes integers, such as tokens.
_IMPORT = "\nfrom deepspeed.runtime.activation_checkpointing import checkpointing"
_NOT_REENTRANT = """
        kwargs.setdefault("activation_checkpoint_func", checkpointing.non_reentrant_checkpoint)"""

# DeepSpeed keeps the weights of one key equal and sums their gradients, whatever modules hold them.
# Within a stage it would replace the second module of a key by the first, so there the modules
# share their parameter as they are.
_TIED = '''
TIED = {tied}
"""Weights that several stages share: the layers that use them, with the weight's name in each."""


class GivenLayer(TiedLayerSpec):
    """A module that is there already, as a layer whose weight other stages share."""

    def __init__(self, key, module, weight):
        super().__init__(key, type(module), tied_weight_attr=weight)
        self.module = module

    def build(self, log=False):
        return self.module


def tie(layers):
    """Return the layers with the shared weights of each stage declared."""
    layers = list(layers)
    for key, uses in TIED.items():
        declared = set()
        for index, weight in uses.items():
            if isinstance(layers[index], TiedLayerSpec):
                continue
            if not hasattr(layers[index], "parameters"):
                raise ValueError(f"layer {{index}} shares {{key}}; give its module")
            stage = sum(part <= index for part in PARTS)
            if stage not in declared:
                layers[index] = GivenLayer(key, layers[index], weight)
            declared.add(stage)
    return layers
'''


def write(plan: Plan) -> Export:
    """Write ``PlannedPipelineModule``, whose layers are those of the plan, in order."""
    # DeepSpeed recomputes runs of that many layers; one run a stage is what the plan counts on.
    interval = max(plan.balance) if plan.stages[0].recompute == "always" else 0
    size = plan.microbatch_size
    batch = f', "train_micro_batch_size_per_gpu": {size}' if size else ""
    tied = {
        re.sub(r"\W", "_", entry.names[0]): find_uses(entry, plan.layer_names)
        for entry in find_tied(plan)
    }
    header = write_header(
        plan,
        TITLE,
        CHECKED,
        "Use: engine = deepspeed.initialize(model=PlannedPipelineModule(layers, loss_fn=loss), "
        'config={"gradient_accumulation_steps": GRADIENT_ACCUMULATION_STEPS'
        f"{batch}, ...}})[0]; engine.train_batch(iterator)",
        'DeepSpeed clips gradients to a norm of 1 unless the config says "gradient_clipping": 0.0.',
        f"layers has {len(plan.layer_names)} entries, modules or LayerSpecs, one for each of:",
        *(f"  {index}: {name}" for index, name in enumerate(plan.layer_names)),
    )
    text = _CLASS.format(
        parts=list(accumulate(plan.balance, initial=0)),
        num_layers=len(plan.layer_names),
        replicas=plan.stages[0].replicas,
        # Each replica takes its share of the micro-batches.
        steps=plan.num_microbatches // plan.stages[0].replicas,
        interval=interval,
        reentrant=_NOT_REENTRANT if interval else "",
        imports=", TiedLayerSpec" * bool(tied) + _IMPORT * bool(interval),
        tied=_TIED.format(tied=tied) if tied else "",
        layers="tie(layers)" if tied else "layers",
    )
    return Export(header + text)


def find_uses(weight: Parameter, layer_names: Sequence[str]) -> dict[int, str]:
    """Return the name of a weight in the module of each layer that uses it; empty if not known."""
    uses = {}
    for index in weight.layers:
        module = layer_names[index].partition("@")[0]
        own = [name for name in weight.names if name.startswith(f"{module}.")]
        if not own:
            return {}
        uses[index] = own[0].removeprefix(f"{module}.")
    return uses


def check_tied(plan: Plan) -> tuple[Rejection, ...]:
    """Refuse shared weights that DeepSpeed cannot be told of: it has one key for a layer."""
    tied = find_tied(plan)
    uses = [find_uses(entry, plan.layer_names) for entry in tied]
    layers = [index for each in uses for index in each]
    names = [entry.names[0] for entry in tied] or ["a weight"]
    # A plan edited by hand may have the time of their sums, but not the weights.
    if all(uses) and len(layers) == len(set(layers)) and (tied or not plan.tied_sync_time_s):
        return ()
    reason = (
        f"stages share {list_some(names, 3)}, and {TITLE} is told of one weight for each layer, "
        "by its name in the layer's module, which this plan does not have"
    )
    return (Rejection("tied weights", reason, "tied='together'"),)


def read(settings: Settings, layers: ModelLayers) -> ImportedCut:
    """Read ``PARTS``, cumulative from 0, or such a list alone.

    Raises:
        InvalidInput: There are no parts, they do not begin with 0, or they fall.
    """
    text = settings.text
    found = re.search(r"(?:PARTS|parts)\s*=\s*(\[[^\]]*\])", text)
    computed = None if found else split_by_method(text, layers)
    if found is None and computed is None and (own := _OWN_SPLIT.search(text)):
        raise InvalidInput(
            f"{own[0]} leaves the cut to {TITLE}, which makes it from the model; it is read from "
            "PARTS = [0, 3, 8], the value of its module's parts: print(engine.module.parts), or "
            "computed from num_stages=2 with partition_method='parameters' for a profile"
        )
    parts = computed or parse_counts(found[1] if found else text, "PARTS = [0, 3, 8]")
    counts = [last - first for first, last in pairwise(parts)]
    if parts[0] != 0 or len(parts) < 2 or min(counts) < 0:
        raise InvalidInput(f"parts begin with 0 and rise, such as [0, 3, 8]; found {list(parts)}")
    interval = re.search(r'"activation_checkpoint_interval", (\d+)', text)
    constants = dict(re.findall(r"^(REPLICAS|GRADIENT_ACCUMULATION_STEPS) = (\d{1,6})", text, re.M))
    replicas = int(constants.get("REPLICAS", 1))
    steps = constants.get("GRADIENT_ACCUMULATION_STEPS")
    return layers.cut_by_layers(
        counts,
        replicas=(replicas,) * len(counts) if replicas > 1 else (),
        schedule="1f1b",
        num_microbatches=int(steps) * replicas if steps else None,
        recompute=("always" if int(interval[1]) else "never") if interval else None,
        microbatch_size=settings.counts.get("train-micro-batch-size-per-gpu"),
        fills_devices="REPLICAS" not in constants,
        notes=(COMPUTED.format(parts=parts, number=len(layers.names)),) if computed else (),
    )
