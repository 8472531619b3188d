"""A plan: which layers form which stage, where it runs, and what that will cost."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..cluster.cluster import Cluster
from ..cluster.places import list_nodes
from ..cluster.reserves import MemoryReserves, ReservedMemory
from ..document import Document, LongTuple, Name, NonEmptyTuple, Note, Notes, Record, render_html
from ..errors import Infeasible
from ..graph.graph import Boundary, ChainBreak, Parameter
from ..graph.tensors import TensorSpec
from ..models.families import ModelSpec
from ..models.training_memory import BytesPerParameter, Optimizer, Recipe
from .schedule import ScheduleName, TrainingSchedule

Objective = Literal[
    "step_time",
    "throughput",
    "latency",
    "memory",
    "devices",
    "balance_time",
    "balance_size",
    "pipedream",
]

MAX_STAGES = 65536

MAX_CONSTRAINTS = 10_000
"""Most pins, pairs and forbidden cuts of each sort: checking 300,000 pins took 40 s."""


Chosen = Literal["schedule", "chunks", "num_microbatches"]
"""Options that can be chosen for the profile instead of given."""


Sharing = Literal["replicate", "zero1", "fully_shard"]
"""How the replicas of a stage share its parameters: each has all of them (``replicate``), or a part
of the optimizer state and of the copies of the weights (``zero1``), or a part of everything but the
layer at work (``fully_shard``)."""

MAX_TENSOR = 1024


def is_one(value: object) -> bool:
    """Return True for 1, which documents leave out so that their ids stay as they were."""
    return value == 1


def is_replicate_only(value: object) -> bool:
    """Return True for the default of ``strategies``, which documents leave out."""
    return value == ("replicate",)


class Pin(Record):
    """Required place of one layer.

    Attributes:
        layer: Its name.
        stage: Index of its stage, counted from the front.
        kind: Kind of the device it runs on.
    """

    layer: Name
    stage: int | None = Field(None, ge=0, le=MAX_STAGES)
    kind: Name | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stage is None and self.kind is None:
            raise ValueError(f"the pin of layer {self.layer!r} names neither a stage nor a kind")
        return self


class PlanOptions(Record):
    """Options of a plan; `docs/concepts/planner.md` says which options go together.

    Attributes:
        num_microbatches: Micro-batches per step, each of the profile's batch size.
        schedule: The order of work the plan is for.
        objective: What to minimise: ``step_time`` (synchronous training), ``throughput``
            (seconds per micro-batch in steady state), ``latency`` (forward of one micro-batch),
            ``memory`` (the largest device's), ``devices`` (how many are needed),
            ``balance_time`` and ``balance_size`` (the largest stage, nothing else counted) or
            ``pipedream`` (PipeDream's own objective, for comparison).
        num_stages: Exactly this many stages; `None` tries every number up to the devices.
        max_stages: At most this many.
        max_replicas: At most this many devices a stage, its micro-batches dealt to them in turn;
            `None` for any number.
        tensor: Devices that split the layers of each replica between them: this many, or ``auto``
            for the number with the shortest step of 1 and those in the profile's `splits`.
        strategies: How replicas may share parameters, not at all where that saves nothing; with
            ``fully_shard`` beside others, the whole plan by what makes its step shorter.
        recompute: Whether stages keep only their inputs and run forward again before backward:
            ``never``, ``always``, or ``auto`` where they lack memory. With ``layers`` it is not
            the stage but each of its layers that does so, where that halves what is kept of it.
        chunks: Stages a device, for interleaved_1f1b, looped_bfs and interleaved_zero_bubble.
        max_extra_in_flight: Forwards a stage may run ahead beyond 1f1b's own warm-up, where that
            makes the step shorter.
        batch_size: Samples per step: then the size of micro-batches, which has to divide it, is
            chosen and ``num_microbatches`` follows; given both, they say the size. Sizes that no
            profile was measured at are estimated in proportion, and none is chosen for speed
            that is smaller than all that were measured.
        optimizer: Decides the bytes of optimizer state per trainable element.
        precision: Recipe of precision, which decides the other bytes per trainable element
            (`training_memory.RECIPES`); `None` for the usual one of the profile's weights, which a
            plan then names.
        memory_fraction: Share of each device's memory a plan may use.
        reserves: What of that is left to others; `None` for the usual ones of the profile's
            device (`reserves.usual_reserves`), which a plan then names.
        together: Pairs of layer names; the layers from one to the other share a stage.
        no_cut_after: Names of layers behind which no stage may end.
        pins: Layers that have to be on some stage or kind of device.
        tied: Whether layers that share a weight may be in different stages, at the price of
            summing its gradients.
        layer_order: ``given`` cuts the profile's order; ``any`` may reorder independent branches.
        skips: What a later stage needs is relayed through those between (``relay``), or may go
            past those that have no use for it where the step is then no longer (``direct``).
        auto: Options that are chosen for the profile, together; what they say here is then not
            read. The options of the plan have the values chosen, and none that is ``auto``.
        cut_at: ``layers`` may cut wherever the profile does; ``blocks`` only where a repeated
            block of the model begins or ends.
        regular: ``grid`` gives every stage equally many replicas, ``equal_blocks`` equally many
            blocks of the model besides; the first stage has what precedes them, the last what
            follows.
        regular_within: Take the regular plan only if its step is at most this much longer,
            relatively, than without ``regular``; `None` makes it a rule. The options of the plan
            have the rule that was taken.
        gap: The search may stop once it is proven this close, relatively, to the best.
        robust: Whether to take the plan of least worst case within the error bands of the profile
            and of the cluster's links, instead of the best at the times they state.
    """

    num_microbatches: int = Field(8, ge=1, le=2**20)
    schedule: TrainingSchedule = "1f1b"
    objective: Objective = "step_time"
    num_stages: int | None = Field(None, ge=1, le=MAX_STAGES)
    max_stages: int | None = Field(None, ge=1, le=2**20)
    max_replicas: int | None = Field(1, ge=1, le=2**20)
    tensor: Annotated[int, Field(ge=1, le=MAX_TENSOR)] | Literal["auto"] = Field(
        1, exclude_if=is_one
    )
    strategies: NonEmptyTuple[Sharing] = Field(("replicate",), exclude_if=is_replicate_only)
    recompute: Literal["never", "auto", "always", "layers"] = "never"
    chunks: int = Field(2, ge=1, le=64)
    max_extra_in_flight: int = Field(0, ge=0, le=4096)
    batch_size: int | None = Field(None, ge=1, le=2**30)
    optimizer: Optimizer = "adam"
    precision: Recipe | None = None
    memory_fraction: float = Field(1.0, gt=0, le=1)
    reserves: MemoryReserves | None = None
    together: LongTuple[tuple[Name, Name]] = Field((), max_length=MAX_CONSTRAINTS)
    no_cut_after: LongTuple[Name] = Field((), max_length=MAX_CONSTRAINTS)
    pins: LongTuple[Pin] = Field((), max_length=MAX_CONSTRAINTS)
    tied: Literal["priced", "together"] = "priced"
    layer_order: Literal["given", "any"] = "given"
    skips: Literal["relay", "direct"] = "relay"
    auto: tuple[Chosen, ...] = Field((), max_length=3)
    cut_at: Literal["layers", "blocks"] = "layers"
    regular: Literal["no", "grid", "equal_blocks"] = "no"
    regular_within: float | None = Field(None, ge=0, le=10)
    gap: float = Field(0.0, ge=0, le=1)
    robust: bool = Field(False, exclude_if=operator.not_)


class MemoryUse(Record):
    """Bytes of one device at its peak.

    Attributes:
        weights: Parameters and buffers, each storage once.
        gradients: One per trainable parameter, in the type they are summed in.
        weight_copies: Master weights in float32, or those that autocast converts.
        optimizer: Optimizer state.
        activations: Saved activations of every micro-batch in flight at this stage.
        workspace: Highest temporary memory of any one layer.
        receive_buffers: Activations and gradients on their way in.
    """

    weights_bytes: int = Field(0, ge=0)
    gradients_bytes: int = Field(0, ge=0)
    weight_copies_bytes: int = Field(0, ge=0)
    optimizer_bytes: int = Field(0, ge=0)
    activations_bytes: int = Field(0, ge=0)
    workspace_bytes: int = Field(0, ge=0)
    receive_buffers_bytes: int = Field(0, ge=0)

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.weight_copies_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.workspace_bytes
            + self.receive_buffers_bytes
        )


class Stage(Record):
    """Consecutive layers that run together on one device (or on ``replicas`` of them).

    Attributes:
        first_layer: Index of its first layer.
        num_layers: How many layers it holds.
        layer_names: Their names, in order.
        layer_types: Class names of their modules; empty if not known.
        module_fqns: Modules of the model whose parameters and buffers it owns.
        devices: Names of the cluster's devices that hold it.
        forward_time_s: Forward time per micro-batch.
        backward_time_s: Backward time per micro-batch.
        backward_input_time_s: Part of it for the gradients of inputs, where the schedule splits
            backwards and the profile has the times of both parts; `None` for half.
        send_forward_bytes: Activations sent to the next stage per micro-batch.
        send_backward_bytes: Gradients sent to the previous stage per micro-batch.
        send_forward_time_s: Time those activations travel, by the cluster's links.
        send_backward_time_s: Time those gradients travel.
        memory_limit_bytes: What the device allows, `None` for no limit.
        reserved: What of the device's memory that limit leaves to others.
        sync_time_s: Summing the gradients over the replicas, once a step.
        in_flight: Micro-batches whose activations one replica holds at once, at most.
        replicas: Copies of it; micro-batch k runs on replica k mod replicas.
        tensor: Devices that split the layers of one replica between them (tensor parallelism).
            Device ``replica * tensor + shard`` holds that shard of that replica.
        recompute: When its activations are recomputed instead of kept: those of the whole stage,
            or with ``layers`` layer by layer.
        checkpoints: For ``layers``, what is recomputed: the index of the first layer and of the
            one behind the last of each part that keeps only its inputs.
        strategy: How replicas share its parameters (see `Sharing`).
    """

    first_layer: int = Field(ge=0)
    num_layers: int = Field(ge=1)
    layer_names: tuple[Name, ...]
    layer_types: tuple[Name, ...] = Field((), exclude_if=operator.not_)
    module_fqns: tuple[Name, ...] = ()
    devices: tuple[Name, ...] = Field(min_length=1)
    forward_time_s: float = Field(ge=0)
    backward_time_s: float = Field(ge=0)
    backward_input_time_s: float | None = Field(None, ge=0, exclude_if=lambda part: part is None)
    send_forward_bytes: int = Field(0, ge=0)
    send_backward_bytes: int = Field(0, ge=0)
    send_forward_time_s: float = Field(0.0, ge=0)
    send_backward_time_s: float = Field(0.0, ge=0)
    memory: MemoryUse
    memory_limit_bytes: int | None = Field(None, ge=0)
    reserved: ReservedMemory = ReservedMemory()
    sync_time_s: float = Field(0.0, ge=0)
    in_flight: int = Field(1, ge=1)
    replicas: int = Field(1, ge=1)
    recompute: Literal["never", "except_last", "always", "layers"] = "never"
    checkpoints: LongTuple[tuple[int, int]] = Field((), exclude_if=operator.not_)
    tensor: int = Field(1, ge=1, le=MAX_TENSOR, exclude_if=is_one)
    strategy: Literal["single"] | Sharing = "single"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.layer_names) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers but {len(self.layer_names)} layer_names")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers but {len(self.layer_types)} layer_types")
        if len(self.devices) != self.replicas * self.tensor:
            split = f" of {self.tensor} devices each" if self.tensor > 1 else ""
            raise ValueError(f"{self.replicas} replicas{split} but {len(self.devices)} devices")
        self._check_checkpoints()
        return self

    def _check_checkpoints(self) -> None:
        if (self.recompute == "layers") != bool(self.checkpoints):
            raise ValueError("checkpoints come with recompute='layers', and only with it")
        position, end = self.first_layer, self.first_layer + self.num_layers
        for first, last in self.checkpoints:
            if not position <= first < last <= end:
                raise ValueError(
                    f"the checkpoint ({first}, {last}) is not behind the one in front of it, or "
                    f"not among the stage's layers {self.first_layer} to {end - 1}"
                )
            position = last

    @property
    def recomputes_whole(self) -> bool:
        """Return True if the stage as a whole keeps only its inputs."""
        return self.recompute in ("except_last", "always")

    def devices_of(self, replica: int) -> tuple[str, ...]:
        """Return the devices that split one replica's layers between them, or its only one."""
        return self.devices[replica * self.tensor : (replica + 1) * self.tensor]


class DirectSend(Record):
    """Values that one stage sends past others to a later one that reads them, per micro-batch.

    Attributes:
        source: The stage that makes or reads it and has it first.
        target: The next stage that reads it, not the one behind ``source``.
        tensors: Names of what is sent; gradients of those that have one come straight back.
        forward_bytes: Activations; none between stages on the same device.
        backward_bytes: Gradients, likewise.
        forward_time_s: Time those activations travel.
        backward_time_s: Time those gradients travel.
        forward_channel: As in `Plan.forward_channels`.
        backward_channel: Likewise.
    """

    source: int = Field(ge=0)
    target: int = Field(ge=2)
    tensors: tuple[Name, ...] = Field(min_length=1)
    forward_bytes: int = Field(0, ge=0)
    backward_bytes: int = Field(0, ge=0)
    forward_time_s: float = Field(0.0, ge=0)
    backward_time_s: float = Field(0.0, ge=0)
    forward_channel: int = Field(-1, ge=-1)
    backward_channel: int = Field(-1, ge=-1)


ROUNDING = 1e-12
"""Relative difference of two numbers that are equal but for rounding."""


class Proof(Record):
    """Quality of the plan, by its objective: for ``step_time`` that is the simulated step.

    Attributes:
        objective: What was minimised, in words.
        value: The plan's objective.
        lower_bound: No plan has less.
        status: ``optimal`` when value and bound agree to rounding.
        simulated_lower_bound_s: No plan's simulated step is shorter, whatever the objective.
    """

    objective: Name
    value: float = Field(ge=0)
    lower_bound: float = Field(ge=0)
    status: Literal["optimal", "feasible"]
    simulated_lower_bound_s: float = Field(0.0, ge=0)

    @property
    def gap(self) -> float:
        """Return (value - lower bound) / value; 0 is proven optimal."""
        return (self.value - self.lower_bound) / self.value if self.value else 0.0


class Baseline(Record):
    """Another cut of the same profile, priced by the same simulator, for comparison.

    Attributes:
        name: ``equal_layers``, ``balance_by_time`` or ``data_parallel`` (one stage).
        devices: Of each stage; empty where they are those of the plan's stages.
        step_time_s: `None` where that split cannot be used.
        reason: Why not, with the numbers.
    """

    name: Name
    balance: tuple[int, ...]
    devices: tuple[tuple[Name, ...], ...] = ()
    step_time_s: float | None = Field(None, ge=0)
    reason: Note = ""


class Plan(Document):
    """Stages in pipeline order, with the evidence for them.

    Attributes:
        balance: Layers per stage, as torchgpipe writes it.
        step_time_s: One training step (forwards, backwards, gradient synchronisation of tied
            weights; not the optimizer's update), by the simulator.
        bubble_fraction: Idle share of the used devices' time in that step.
        forward_channels: For each boundary the shared connection its activations leave by, -1 for
            one of their own; empty where none is shared.
        backward_channels: Likewise for the gradients on their way back.
        direct_sends: What passes by stages that have no use for it, by ``source`` and ``target``;
            empty where every value is relayed. Stages' own sends are to their neighbours.
        tied_sync_time_s: Part of the step spent summing gradients of weights held by two stages.
        chunks: Stages on each device; more than one only for schedules made for it.
        layer_order: The profile's layer at each position, where branches were reordered; empty
            for the profile's own order. Stages count positions.
        boundaries: What crosses each cut, per micro-batch; one per gap between stages.
        profile_id: Content id of the profile planned from.
        cluster_devices: How many devices the cluster planned for has; 0 if that is not known.
        nodes: Devices of each machine of that cluster; empty for one machine.
        ranks: Numbers of the stages' devices, in order of first appearance, counted machine by
            machine from 0; empty if they are 0, 1, 2 and so on.
        inputs: The model's flat inputs at micro-batch size.
        input_structure: How the model is called with them.
        spec: The family and configuration of the model, if it was built from one.
        fixed_mode: What keeps to training mode however the model is switched (see `Graph`).
        chain_break: See `Graph`.
        shared_weights: Parameters that several layers use.
        bytes_per_parameter: What recipe and optimizer amount to for this model's parameters;
            `None` in plans that name no recipe.
        estimated: Whether the profile was estimated rather than measured.
        error_band: Relative error of such estimates of unsplit steps, itself measured; `None` if
            not known. Steps of pipelines may be further off: a note says how far posted ones were.
    """

    SCHEMA: ClassVar[str] = "stagewright.plan/1"

    schema_version: Literal["stagewright.plan/1"] = "stagewright.plan/1"
    model: Name = ""
    spec: ModelSpec | None = None
    balance: tuple[int, ...] = Field(min_length=1)
    stages: tuple[Stage, ...] = Field(min_length=1)
    boundaries: tuple[Boundary, ...] = ()
    options: PlanOptions
    schedule: ScheduleName
    num_microbatches: int = Field(ge=1)
    chunks: int = Field(1, ge=1)
    layer_order: tuple[int, ...] = ()
    step_time_s: float = Field(ge=0)
    bubble_fraction: float = Field(ge=0, le=1)
    tied_sync_time_s: float = Field(0.0, ge=0)
    forward_channels: tuple[int, ...] = ()
    backward_channels: tuple[int, ...] = ()
    direct_sends: tuple[DirectSend, ...] = ()
    proof: Proof
    baselines: tuple[Baseline, ...] = ()
    profile_id: Name = ""
    cluster_devices: int = Field(0, ge=0)
    nodes: LongTuple[Annotated[int, Field(ge=1)]] = Field((), exclude_if=operator.not_)
    ranks: LongTuple[Annotated[int, Field(ge=0)]] = Field((), exclude_if=operator.not_)
    bytes_per_parameter: BytesPerParameter | None = None
    estimated: bool = False
    error_band: float | None = Field(None, ge=0)
    inputs: tuple[TensorSpec, ...] = ()
    input_structure: str = Field("", max_length=100_000)
    fixed_mode: Notes = ()
    chain_break: ChainBreak = None
    shared_weights: tuple[Parameter, ...] = Field((), exclude_if=operator.not_)
    notes: tuple[Note, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.balance != tuple(stage.num_layers for stage in self.stages):
            raise ValueError("balance disagrees with the stages' num_layers")
        next_layer = 0
        for index, stage in enumerate(self.stages):
            if stage.first_layer != next_layer:
                raise ValueError(
                    f"stages[{index}] starts at layer {stage.first_layer}, expected {next_layer}; "
                    "stages cover every layer once, in order"
                )
            next_layer += stage.num_layers
        devices = [device for stage in self.stages for device in stage.devices]
        # Schedules with several chunks place that many stages on each device.
        if max(Counter(devices).values()) > self.chunks:
            raise ValueError(
                f"a device holds more than {self.chunks} stage{'s' * (self.chunks > 1)}"
            )
        last = max(self.ranks, default=len(set(devices)) - 1)
        if self.ranks and not len(self.ranks) == len(set(self.ranks)) == len(set(devices)):
            raise ValueError(f"ranks are not one number for each of {len(set(devices))} devices")
        if self.nodes and last >= sum(self.nodes):
            raise ValueError(f"a device is number {last} of {sum(self.nodes)} in all nodes")
        # A layer left out would never run, and one given twice would run twice.
        if self.layer_order and sorted(self.layer_order) != list(range(next_layer)):
            raise ValueError(f"layer_order is not a permutation of the {next_layer} layers")
        for send in self.direct_sends:
            if not send.source + 1 < send.target < len(self.stages):
                raise ValueError(
                    f"a direct send goes from stage {send.source} to {send.target} of "
                    f"{len(self.stages)}; it must skip at least one stage"
                )
        if len(self.boundaries) not in (0, len(self.stages) - 1):
            raise ValueError(f"{len(self.stages)} stages have {len(self.stages) - 1} boundaries")
        return self

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return the layers of all stages, in order."""
        return tuple(name for stage in self.stages for name in stage.layer_names)

    def locate(self, cluster: Cluster) -> Self:
        """Return the plan with the places of its devices in the cluster it is for."""
        nodes = list_nodes(cluster)
        numbers = {cluster.devices[at].name: rank for rank, at in enumerate(chain(*nodes))}
        used = dict.fromkeys(name for stage in self.stages for name in stage.devices)
        ranks = tuple(map(numbers.__getitem__, used))
        update = {
            "cluster_devices": len(cluster.devices),
            "nodes": tuple(map(len, nodes)) if len(nodes) > 1 else (),
            "ranks": () if ranks == tuple(range(len(used))) else ranks,
        }
        return self.model_copy(update=update)

    @property
    def microbatch_size(self) -> int | None:
        """Return the samples in a micro-batch; `None` if the inputs do not say."""
        # By convention the first dimension of the first input counts the samples.
        shape = self.inputs[0].shape if self.inputs else ()
        return (shape[0] or None) if shape else None

    @property
    def samples_per_s(self) -> float | None:
        """Return the throughput of a step; `None` if the micro-batch size is unknown."""
        size = self.microbatch_size
        if not size or not self.step_time_s:
            return None
        return size * self.num_microbatches / self.step_time_s

    def memory_by_device(self) -> dict[str, int]:
        """Return the peak memory of each device in bytes, over all stages it holds."""
        held: dict[str, int] = {}
        for stage in self.stages:
            for name in stage.devices:
                held[name] = held.get(name, 0) + stage.memory.total_bytes
        return held

    @property
    def simulated_gap(self) -> float:
        """Return the relative distance of the simulated step from its lower bound."""
        # Step and bound are rounded apart; their difference must not be negative.
        bound_s = min(self.proof.simulated_lower_bound_s, self.step_time_s)
        return (self.step_time_s - bound_s) / self.step_time_s if self.step_time_s else 0.0

    def with_bounds(self, lower_bound: float, simulated_lower_bound_s: float) -> Self:
        """Return the plan with bounds on the objective and the step of all plans, and a status."""
        value = self.proof.value
        is_optimal = value - lower_bound <= ROUNDING * value
        proof = {
            "lower_bound": min(lower_bound, value),
            "status": "optimal" if is_optimal else "feasible",
            "simulated_lower_bound_s": min(simulated_lower_bound_s, self.step_time_s),
        }
        return self.model_copy(update={"proof": self.proof.model_copy(update=proof)})

    def baseline(self, name: str) -> Baseline | None:
        """Return the baseline of a name, e.g. ``equal_layers``."""
        return next((entry for entry in self.baselines if entry.name == name), None)

    def __str__(self) -> str:
        from .table import format_plan

        return format_plan(self)

    def _repr_html_(self) -> str | None:
        """Return HTML for notebooks; `None`, which makes them show text, if nothing renders it."""
        return render_html("plan", self)


@dataclass(frozen=True)
class Remedy:
    """Change of a request under which there would be a plan.

    Attributes:
        text: The change in words, such as ``recompute='auto'``.
        cluster: Cluster of the changed request.
        options: Options of the changed request.
        step_time_s: Step of its plan; `None` if there was no time to find one.
        is_settled: False if the search was cut short, so the step may be shorter.
    """

    text: str
    cluster: Cluster
    options: PlanOptions
    step_time_s: float | None = None
    is_settled: bool = True


Infeasible.__annotations__["remedies"] = tuple[Remedy, ...]  # see there
