"""Contract of the runtimes that plans can be written for and cuts read from."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from ..core.errors import InvalidInput
from ..core.graph.graph import Boundary
from ..core.plan.plan import Plan
from ..core.plan.schedule import ScheduleName
from ..core.profile.block_stack import BlockStack, find_stack

RecomputeMode = Literal["never", "except_last", "always"]
"""Values of `core.plan.plan.Stage.recompute`."""


@dataclass(frozen=True)
class TargetRules:
    """Features of a plan that a runtime can express.

    Attributes:
        unit: What it cuts between: any layer of the plan, modules (a cut is in front of a module's
            first layer) or numbered blocks.
        schedules: Orders of work it has, for training.
        inference: Whether it runs forward passes alone; then it has no order of work to choose.
        edges_alone: Whether what precedes or follows the blocks may be a stage without a block.
        replicas: None, equally many a stage (data parallelism), or any number.
        recompute: Ways in which all of its stages may recompute as a whole.
        equal_blocks: Whether every stage must have equally many blocks.
        direct_sends: Whether values may skip the stages that do not use them.
        own_depths: Whether 1f1b may run further ahead than its default.
        tied_weights: Whether it keeps weights that two stages share equal.
    """

    unit: Literal["layer", "module", "block"]
    schedules: tuple[ScheduleName, ...] = ()
    inference: bool = False
    edges_alone: bool = False
    replicas: Literal["none", "equal", "any"] = "none"
    recompute: tuple[RecomputeMode, ...] = ()
    equal_blocks: bool = False
    direct_sends: bool = False
    own_depths: bool = False
    tied_weights: bool = False


@dataclass(frozen=True)
class Refusal:
    """A feature of a plan that a runtime cannot express.

    Attributes:
        feature: Its short name, such as ``replicas``.
        reason: Where the plan uses it, and what the runtime has instead.
        remedy: The option that makes the plan expressible.
    """

    feature: str
    reason: str
    remedy: str


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


@dataclass(frozen=True)
class ImportedCut:
    """A cut read from a runtime's form, as layer indices; it may have mistakes.

    Attributes:
        stages: Layers of each stage, in the order given.
        num_layers: Layers of the model.
        replicas: Devices of each stage; empty for one each.
        schedule: Its order of work, if the form says so.
        chunks: Stages on each device.
        num_microbatches: Micro-batches a step, if the form says so.
        recompute: How stages recompute, if the form says so.
    """

    stages: tuple[tuple[int, ...], ...]
    num_layers: int
    replicas: tuple[int, ...] = ()
    schedule: ScheduleName | None = None
    chunks: int = 1
    num_microbatches: int | None = None
    recompute: RecomputeMode | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the layers in no stage."""
        return tuple(sorted(set(range(self.num_layers)).difference(*self.stages)))

    @property
    def doubled(self) -> tuple[int, ...]:
        """Return the layers in more than one stage, or twice in one."""
        seen: set[int] = set()
        twice: set[int] = set()
        for layer in (layer for stage in self.stages for layer in stage):
            (twice if layer in seen else seen).add(layer)
        return tuple(sorted(twice))

    @property
    def is_ordered(self) -> bool:
        """Return whether stages hold every layer once, in the model's order, and at least one."""
        flat = [layer for stage in self.stages for layer in stage]
        return flat == list(range(self.num_layers)) and all(self.stages)

    @property
    def balance(self) -> tuple[int, ...]:
        """Return the number of layers in each stage. Raises: InvalidInput if not `is_ordered`."""
        if not self.is_ordered:
            raise InvalidInput(
                f"the cut is not a pipeline of the model's {self.num_layers} layers: "
                f"{len(self.lost)} are in no stage, {len(self.doubled)} in several; "
                "run 'stagewright check' to see which"
            )
        return tuple(map(len, self.stages))


@dataclass(frozen=True)
class ModelLayers:
    """Names of a model's layers, in order, and the blocks found in them."""

    names: tuple[str, ...]

    @cached_property
    def stack(self) -> BlockStack:
        """Find the model's blocks. Raises: InvalidInput."""
        return find_stack(self.names)

    def from_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the layers of stages given by their numbers of layers.

        Layers beyond those counted are in no stage; more than there are raise `InvalidInput`.
        """
        ends = list(accumulate(counts, initial=0))
        if ends[-1] > len(self.names):
            raise InvalidInput(
                f"the stages have {ends[-1]} layers, but the model has {len(self.names)}"
            )
        return tuple(tuple(range(first, last)) for first, last in pairwise(ends))

    def from_block_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the layers of stages given by their numbers of blocks.

        The first stage also has what precedes the blocks, the last what follows them. Blocks
        beyond those counted are in no stage; more than there are raise `InvalidInput`.
        """
        stack = self.stack
        ends = list(accumulate(counts, initial=0))
        if ends[-1] > stack.num_blocks:
            raise InvalidInput(
                f"the stages have {ends[-1]} blocks, but the model has {stack.num_blocks}"
            )
        stages = [
            list(range(stack.position(first), stack.position(last)))
            for first, last in pairwise(ends)
        ]
        stages[0] = [*range(stack.starts[0]), *stages[0]]
        stages[-1] = [*stages[-1], *range(stack.end, stack.num_layers)]
        return tuple(map(tuple, stages))


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
        read: Reads its form back for a model; raises `InvalidInput` for other text.
        check: Refuses what the rules do not cover, such as a bug of that version.
        default_split: Numbers of blocks that the runtime itself would choose for a number of
            blocks and stages; `None` if it has no default.
    """

    name: str
    title: str
    checked_with: str
    file_name: str
    rules: TargetRules
    write: Callable[[Plan], Export]
    read: Callable[[str, ModelLayers], ImportedCut]
    check: Callable[[Plan], tuple[Refusal, ...]] = lambda plan: ()
    default_split: Callable[[int, int], tuple[int, ...]] | None = None


def write_header(plan: Plan, title: str, checked_with: str, *use: str, comment: str = "#") -> str:
    """Return the opening comment of an export: the plan's id, versions, and how to use it."""
    lines = (
        f"Plan {plan.content_id()} of {plan.model or 'a model'}, written for {title}.",
        f"Checked with {checked_with}.",
        *use,
    )
    return "".join(f"{comment} {line}".rstrip() + "\n" for line in lines)


def parse_literal(text: str, opening: str) -> Any:
    """Return the first Python or JSON literal that begins with ``opening``; `None` if none does.

    Comments in front of it, and what follows it, are passed over.
    """
    content = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    start = content.find(opening)
    if start < 0:
        return None
    closing = {"{": "}", "[": "]"}[opening[0]]
    depth, end = 1, start + 1
    while depth and end < len(content):
        depth += (content[end] == opening[0]) - (content[end] == closing)
        end += 1
    try:
        return ast.literal_eval(content[start:end])
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
    stack = find_stack(plan.layer_names)
    ends = [stack.count(cut) for cut in accumulate(plan.balance, initial=0)]
    return tuple(last - first for first, last in pairwise(ends))


def list_devices(plan: Plan) -> str:
    """Return a line that says which devices run which stage."""
    return "; ".join(
        f"stage {index} on {', '.join(stage.devices)}" for index, stage in enumerate(plan.stages)
    )
