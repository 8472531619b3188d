"""Contract of the runtimes that plans can be written for and cuts read from."""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, Self

from ..core.errors import InvalidInput
from ..core.graph.graph import Boundary, Parameter
from ..core.plan.plan import Plan
from ..core.plan.schedule import ScheduleName
from ..core.profile.block_stack import BlockStack, find_stack
from ..core.profile.profile import Profile
from ..core.units import list_some
from .gpu_numbers import Gpu, Visible, describe_devices, list_gpus, list_visible
from .settings import Settings

MOST_NAMED = 6
"""Layers that a message names."""

FORWARD_SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
"""Orders of work that runtimes of inference can be given: each device has one stage."""

PHASE = (
    "Priced for prefill, without decoding or its cache of keys and values: leave room for the "
    "cache by planning with --memory-fraction."
)
"""Line of an export of inference; see `core.profile.forward_only`."""

WITHOUT_BLOCKS = ("torch", "deepspeed", "torchgpipe", "pipedream")
"""Targets that cut between modules or layers."""

RecomputeMode = Literal["never", "except_last", "always", "layers"]
"""Values of `core.plan.plan.Stage.recompute`."""


@dataclass(frozen=True)
class TargetRules:
    """Features of a plan that a runtime can express.

    Attributes:
        unit: What it cuts between: any layer of the plan, modules (a cut is in front of a module's
            first layer) or numbered blocks.
        schedules: Orders of work it has, for training.
        inference: Whether it runs forward passes alone; then it has no order of work to choose.
        last_position: Whether it computes the logits of a prompt's last token alone.
        cuts_around_blocks: Whether what precedes or follows the blocks may be a stage by itself.
        cuts_behind_blocks: Whether what follows the blocks may be, but not what precedes them.
        cuts_chains: Whether it cuts a model without blocks that is a chain of modules, such as a
            Sequential, in front of any of them.
        chain: Whether its form is a list of modules, each called with what the one before returned.
        replicas: None, equally many a stage (data parallelism), or any number.
        recompute: Ways in which all of its stages may recompute: as a whole, or with ``layers``
            every block by itself.
        equal_blocks: Whether every stage must have equally many blocks.
        devices: What it is told of devices: the ``numbers`` of one machine's GPUs, the ``ranks`` of
            stages, or nothing but their order over ``nodes``, or ``equal_nodes``.
        direct_sends: Whether values may skip the stages that do not use them.
        own_depths: Whether 1f1b may run further ahead than its default.
        tied_weights: Whether it keeps weights that two stages share equal.
    """

    unit: Literal["layer", "module", "block"]
    schedules: tuple[ScheduleName, ...] = ()
    inference: bool = False
    last_position: bool = False
    cuts_around_blocks: bool = False
    cuts_behind_blocks: bool = False
    cuts_chains: bool = False
    chain: bool = False
    replicas: Literal["none", "equal", "any"] = "none"
    recompute: tuple[RecomputeMode, ...] = ()
    equal_blocks: bool = False
    devices: Literal["numbers", "ranks", "nodes", "equal_nodes"] = "nodes"
    direct_sends: bool = False
    own_depths: bool = False
    tied_weights: bool = False


@dataclass(frozen=True)
class Rejection:
    """A feature of a plan that a runtime cannot express.

    Attributes:
        feature: Its short name, such as ``replicas``.
        reason: Where the plan uses it, and what the runtime has instead.
        remedy: The option that makes the plan expressible, or the change of the model.
        is_of_model: Whether no options make a plan of this model expressible.
    """

    feature: str
    reason: str
    remedy: str
    is_of_model: bool = False


@dataclass(frozen=True)
class Export:
    """A plan in a runtime's form.

    Attributes:
        text: The file to use, with a comment that names the plan and says how.
        attachments: Further files that ``text`` reads from its own folder, by name.
    """

    text: str
    attachments: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def name_after(self, stem: str) -> Export:
        """Return the export with its attachments, and ``text``, named after its own file."""
        names = {each: f"{stem}.{each}" for each in self.attachments}
        text = self.text
        for before, after in names.items():
            text = text.replace(before, after)
        return Export(text, {names[each]: held for each, held in self.attachments.items()})


@dataclass(frozen=True)
class ImportedCut:
    """A cut read from a runtime's form, as layer indices; it may have mistakes.

    Attributes:
        stages: Layers of each stage, in the order given; none where a stage only passes values on,
            or holds what is in no profile.
        num_layers: Layers of the model.
        gpus: Numbers of each stage's GPUs, as its runtime counts them: none for a stage that is on
            no GPU. Empty if they are in order; of the first stages if every device has ``chunks``.
        visible: GPUs that these numbers count, in order; empty for all.
        replicas: Devices of each stage; empty for one each.
        schedule: Its order of work, if the form says so.
        chunks: Stages on each device.
        ranks_setting: Setting of the number of ranks that the form left out, so that ``chunks``
            follows from the devices; empty if it did not.
        num_microbatches: Micro-batches a step, if the form says so.
        recompute: How stages recompute, if the form says so.
        notes: What of the form a plan cannot hold.
        check: Refuses a plan of the cut that the runtime would not run.
        microbatch_size: Samples of a micro-batch, if the form says so.
        inference: Whether its runtime runs forward passes alone.
        last_position: Whether it computes the logits of a prompt's last token alone.
        one_machine: Whether its runtime is one process, with the GPUs of one machine.
        fills_devices: Whether its runtime deals all devices to the stages, equally many to each.
        excess: How many blocks or layers it lists beyond the model's; empty if it lists none.
        tensor: Devices that split each layer, in groups that have a stage each.
        ranks_per_device: Ranks of such groups, where one device stands for all of a group.
    """

    stages: tuple[tuple[int, ...], ...]
    num_layers: int
    gpus: tuple[tuple[int, ...], ...] = ()
    visible: Visible = ()
    replicas: tuple[int, ...] = ()
    schedule: ScheduleName | None = None
    chunks: int = 1
    ranks_setting: str = ""
    num_microbatches: int | None = None
    recompute: RecomputeMode | None = None
    notes: tuple[str, ...] = ()
    check: Callable[[Plan], tuple[Rejection, ...]] = field(
        default=lambda plan: (), repr=False, compare=False
    )
    microbatch_size: int | None = None
    inference: bool = False
    last_position: bool = False
    one_machine: bool = False
    fills_devices: bool = False
    excess: str = ""
    tensor: int = 1
    ranks_per_device: int = 1

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the layers in no stage."""
        return tuple(sorted(set(range(self.num_layers)).difference(*self.stages)))

    @property
    def duplicated(self) -> tuple[int, ...]:
        """Return the layers in more than one stage, or twice in one."""
        seen: set[int] = set()
        twice: set[int] = set()
        for layer in (layer for stage in self.stages for layer in stage):
            (twice if layer in seen else seen).add(layer)
        return tuple(sorted(twice))

    @property
    def is_ordered(self) -> bool:
        """Return whether stages hold every layer once, in the model's order."""
        flat = [layer for stage in self.stages for layer in stage]
        return flat == list(range(self.num_layers)) and not self.excess

    @property
    def balance(self) -> tuple[int, ...]:
        """Return the number of layers in each stage."""
        return tuple(map(len, self.stages))

    def describe_faults(self, names: Sequence[str]) -> list[str]:
        """Name the model's layers in no stage, in several or out of order, and count others."""
        faults = (
            ("missing from every stage", self.missing),
            ("duplicated in several stages", self.duplicated),
        )
        named = [
            f"{what}: {list_some([names[layer] for layer in layers], MOST_NAMED)}"
            for what, layers in faults
            if layers
        ]
        if not (named or self.excess or self.is_ordered):
            flat = [layer for stage in self.stages for layer in stage]
            late = next(two for two in pairwise(flat) if two[0] > two[1])
            named = [f"not in the model's order: {names[late[1]]} runs after {names[late[0]]}"]
        return [self.excess, *named] if self.excess else named


@dataclass(frozen=True)
class ModelLayers:
    """Names of a model's layers, in order, and the blocks found in them.

    Attributes:
        types: Class names of the layers' modules; empty if not known.
        modules: Modules that hold weights.
        weightless: Indices of the layers known to have no parameters.
        parameter_counts: Trainable parameters that each layer uses; empty if not known.
    """

    names: tuple[str, ...]
    types: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    weightless: frozenset[int] = frozenset()
    parameter_counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Plan | Profile) -> Self:
        """Return the layers of a plan or a profile."""
        if isinstance(model, Profile):
            layers = [entry.layer for entry in model.layers]
            types = tuple(layer.module_type for layer in layers)
            modules = tuple(chain.from_iterable(layer.module_fqns for layer in layers))
            bare = frozenset(at for at, layer in enumerate(layers) if not layer.parameter_bytes)
            counts = _count_parameters(model)
            names = tuple(layer.name for layer in layers)
            return cls(names, types * any(types), modules, bare, counts)
        types = tuple(chain.from_iterable(stage.layer_types for stage in model.stages))
        modules = tuple(chain.from_iterable(stage.module_fqns for stage in model.stages))
        return cls(model.layer_names, types, modules)

    @cached_property
    def stack(self) -> BlockStack:
        """Find the model's blocks. Raises: InvalidInput."""
        try:
            return find_stack(self.names, self.types, self.modules)
        except InvalidInput as error:
            raise InvalidInput(f"{error}; {', '.join(WITHOUT_BLOCKS)} need no blocks") from None

    @property
    def has_blocks(self) -> bool:
        """Return whether the model has one stack of blocks."""
        try:
            return bool(self.stack)
        except InvalidInput:
            return False

    def cut_by_layers(self, counts: Sequence[int], **form: Any) -> ImportedCut:
        """Return a cut given by the numbers of layers of its stages, with what else its form says.

        Layers beyond those counted are in no stage.
        """
        ends = list(accumulate(counts, initial=0))
        num_layers = len(self.names)
        stages = tuple(
            tuple(range(min(first, num_layers), min(last, num_layers)))
            for first, last in pairwise(ends)
        )
        return ImportedCut(
            stages, num_layers, excess=_count_excess(ends[-1], num_layers, "layers"), **form
        )

    def cut_by_blocks(self, counts: Sequence[int], **form: Any) -> ImportedCut:
        """Return a cut given by the numbers of blocks of its stages, with what else its form says.

        The first stage also has what precedes the blocks, the last what follows them. Blocks
        beyond those counted are in no stage.
        """
        stack = self.stack
        ends = list(accumulate(counts, initial=0))
        kept = [min(end, stack.num_blocks) for end in ends]
        stages = [
            list(range(stack.position(first), stack.position(last)))
            for first, last in pairwise(kept)
        ]
        stages[0] = [*range(stack.starts[0]), *stages[0]]
        stages[-1] = [*stages[-1], *range(stack.end, stack.num_layers)]
        excess = _count_excess(ends[-1], stack.num_blocks, "blocks")
        return ImportedCut(tuple(map(tuple, stages)), len(self.names), excess=excess, **form)


def _count_parameters(profile: Profile) -> tuple[int, ...]:
    counts = [0] * len(profile.layers)
    for entry in profile.parameters:
        if entry.kind == "parameter" and entry.trainable:
            for layer in entry.layers:
                counts[layer] += entry.numel
    return tuple(counts) if any(counts) else ()


def _count_excess(listed: int, there: int, unit: str) -> str:
    return f"the stages have {listed} {unit}, but the model has {there}" * (listed > there)


@dataclass(frozen=True)
class Target:
    """A runtime: what it can express, and how to write and read its form.

    Attributes:
        name: As in ``--to``, ``--for`` and ``--from``.
        title: Its own name.
        checked_with: Version, and how it was checked.
        file_name: Usual name of the file.
        rules: What it can express.
        write: Writes a plan that keeps the rules.
        read: Reads the settings of its form back for a model; raises `InvalidInput` for other text.
        check: Refuses what the rules do not cover, such as a bug of that version.
        default_split: Numbers of blocks that the runtime itself would choose for a number of
            blocks and stages, empty where it refuses them; `None` if it has no default, or one
            that needs more than these numbers.
    """

    name: str
    title: str
    checked_with: str
    file_name: str
    rules: TargetRules
    write: Callable[[Plan], Export]
    read: Callable[[Settings, ModelLayers], ImportedCut]
    check: Callable[[Plan], tuple[Rejection, ...]]
    default_split: Callable[[int, int], tuple[int, ...]] | None


def write_header(
    plan: Plan,
    title: str,
    checked_with: str,
    *use: str,
    comment: str = "#",
    visible: Sequence[Gpu] | None = None,
) -> str:
    """Return the opening comment of an export: the plan's digest, versions, and how to use it.

    ``visible`` are the GPUs of the runtime's ranks, if they have to be set; by default those of
    the pipeline where they are not in the cluster's order.
    """
    if visible is None:
        visible = list_gpus(plan) if plan.ranks else ()
    digest = plan.content_id().partition("_")[2]
    lines = (
        f"A plan of {plan.model or 'a model'}, written for {title}; digest {digest}.",
        f"Checked with {checked_with}.",
        *use,
        f"{describe_devices(plan)}.",
        *[PHASE] * is_for_inference(plan),
        *(list_visible(visible) if visible else ()),
    )
    return "".join(f"{comment} {line}".rstrip() + "\n" for line in lines)


def is_for_inference(plan: Plan) -> bool:
    """Return whether a plan is of forward passes alone, by its objective or its profile."""
    return plan.schedule == "forward_only" or not any(
        stage.backward_time_s or stage.send_backward_bytes or stage.memory.gradients_bytes
        for stage in plan.stages
    )


def find_tied(plan: Plan) -> list[Parameter]:
    """Return the trained parameters that layers of several stages use."""
    ends = list(accumulate(plan.balance))
    return [
        entry
        for entry in plan.shared_weights
        if entry.trainable and len({bisect_right(ends, layer) for layer in entry.layers}) > 1
    ]


def parse_literal(text: str, opening: str) -> Any:
    """Return the first Python or JSON literal that begins with ``opening``; `None` if none does.

    What is in front of it, and what follows it, is passed over.
    """
    start = text.find(opening)
    if start < 0:
        return None
    closing = {"{": "}", "[": "]"}[opening[0]]
    depth, end = 1, start + 1
    while depth and end < len(text):
        depth += (text[end] == opening[0]) - (text[end] == closing)
        end += 1
    try:
        return ast.literal_eval(text[start:end])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def find_skipping_value(boundaries: Sequence[Boundary]) -> str:
    """Return the name of a value that crosses two consecutive cuts; empty if none does."""
    for before, after in pairwise(boundaries):
        passed = {tensor.name for tensor in before.tensors} & {each.name for each in after.tensors}
        if passed:
            return min(passed)
    return ""


def count_blocks(plan: Plan) -> tuple[int, ...]:
    """Return the number of whole blocks in each stage of a plan cut between blocks."""
    stack = ModelLayers.of(plan).stack
    ends = [stack.count(cut) for cut in accumulate(plan.balance, initial=0)]
    return tuple(last - first for first, last in pairwise(ends))


def count_ranks(plan: Plan) -> int:
    """Return the length of the pipeline in devices, which hold a stage of each chunk."""
    return plan.num_stages // plan.chunks
