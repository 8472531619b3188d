"""View of a plan as plain data, shared by the page, the HTML file and the API.

Every number is the plan's, the profile's or the simulated timeline's own; nothing is computed
again here but sums over what one device holds.
"""

from __future__ import annotations

from typing import Literal

from ..core.document import Record
from ..core.plan.plan import Baseline, MemoryUse, Proof
from ..core.profile.profile import Provenance


class Header(Record):
    """Key figures of a plan.

    Attributes:
        num_devices: That hold a stage.
        num_samples: Of a step; `None` where the size of micro-batches is not known.
        samples_per_s: `None` where the size of micro-batches is not known.
        peak_memory_bytes: Of the device nearest to its limit, or without limits, of the fullest.
        peak_memory_limit_bytes: What that device allows; `None` for no limit.
        peak_memory_device: Its name.
        equal_layers_step_time_s: Of a split into equal layer counts; `None` if unusable.
        gain: By how much this is faster than that split: 0.1 for ten percent.
        expected_error: Error to expect of an estimated step, in words; empty if not known.
        proof: How good the plan is, in words, a sentence each.
    """

    model: str
    schedule: str
    objective: str
    num_stages: int
    num_devices: int
    num_microbatches: int
    num_samples: int | None
    step_time_s: float
    samples_per_s: float | None
    bubble_fraction: float
    peak_memory_bytes: int
    peak_memory_limit_bytes: int | None
    peak_memory_device: str
    equal_layers_step_time_s: float | None
    gain: float | None
    estimated: bool
    expected_error: str
    proof: tuple[str, ...]


class LayerColumns(Record):
    """The layers in the order the plan has them; each field has an entry a layer.

    Times and bytes are the profile's, of one micro-batch on the device profiled, and empty where
    only the plan is known.

    Attributes:
        stages: Where each is.
        parameter_bytes: Weights and buffers; what several layers share counts for each.
        saved_bytes: Activations kept for the backward; what several layers share counts for each.
        cut_bytes: What a cut behind it would send, both ways; the last has 0.
        cut_reasons: Why no cut may be made behind it; empty where one may.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    types: tuple[str, ...] = ()
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    spread_s: tuple[float, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    cut_bytes: tuple[int, ...] = ()
    cut_reasons: tuple[str, ...] = ()


class StageRow(Record):
    """One stage, in the plan's numbers.

    Attributes:
        devices: Device ``replica * tensor + shard`` holds that shard of that replica.
        tensor: Devices that split the layers of a replica.
        strategy: How replicas share parameters, as in `Stage`.
        mesh: Its devices in words.
        collective_forward_s: Part of the forward's time in which split layers exchange values;
            `None` where layers are whole, or profile or cluster are not known.
        collective_backward_s: Part of the backward's own time, without a forward computed again.
    """

    devices: tuple[str, ...]
    replicas: int
    tensor: int
    strategy: str
    mesh: str
    collective_forward_s: float | None
    collective_backward_s: float | None
    first_layer: int
    num_layers: int
    first_name: str
    last_name: str
    forward_time_s: float
    backward_time_s: float
    in_flight: int
    recompute: str
    send_bytes: int
    sync_time_s: float
    memory: MemoryUse
    memory_bytes: int
    memory_limit_bytes: int | None


class Lane(Record):
    """One rank of the pipeline.

    Attributes:
        device: Its name.
        stages: Those it holds.
        busy_s: For how long it computes.
        memory_bytes: Peak of its device, over all its stages.
        memory_limit_bytes: What that device allows; `None` for no limit.
    """

    device: str
    stages: tuple[int, ...]
    busy_s: float
    memory_bytes: int
    memory_limit_bytes: int | None


class Boxes(Record):
    """Everything that happens in a step; each field has an entry a piece of work.

    Attributes:
        kinds: As in `TimelineEvent`.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    kinds: tuple[str, ...]
    microbatches: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]


class MemoryCurve(Record):
    """Bytes one rank's device holds over a step.

    Attributes:
        fixed_bytes: LayerMemory all the time: weights, gradients, optimizer, buffers, workspace.
        limit_bytes: What it allows.
        time_s: When what it holds changes, ascending.
        held_bytes: From then on, the fixed bytes left out.
        peak_bytes: By the plan.
    """

    device: str
    fixed_bytes: int
    limit_bytes: int | None
    time_s: tuple[float, ...]
    held_bytes: tuple[int, ...]
    peak_bytes: int


class GraphView(Record):
    """The model folded by module, a column a stage.

    Only what opens has a row here: a box is in the column of its first layer, what it opens into
    are the rows that name it as their parent, and between those single layers.

    Attributes:
        names: Of the modules, whole; ``h.0..11`` for equal neighbours, ``a … z`` for neighbours
            that are put together because there are many.
        parents: The row each is in, always before it; -1 for none.
        first_layers: Index of its first layer.
        num_layers: How many it has, one right after another.
        repeats: Equal neighbours that stand there as one.
        is_open: Whether its parts show at first.
        time_s: Forward and backward; empty where only the plan is known.
        parameter_bytes: Likewise; what its layers share counts once.
        cut_bytes: What each stage but the last sends forward.
        skip_sources: Layers whose results go past others.
        skip_targets: Where to.
        skip_bytes: How much.
    """

    names: tuple[str, ...] = ()
    parents: tuple[int, ...] = ()
    first_layers: tuple[int, ...] = ()
    num_layers: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    is_open: tuple[bool, ...] = ()
    time_s: tuple[float, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    cut_bytes: tuple[int, ...] = ()
    skip_sources: tuple[int, ...] = ()
    skip_targets: tuple[int, ...] = ()
    skip_bytes: tuple[int, ...] = ()


class Reproduce(Record):
    """Commands that reproduce a plan, ready to paste."""

    shell: str
    curl: str
    python: str


class PlanView(Record):
    """A plan to be looked at.

    Attributes:
        balance: Layers of each stage.
        lanes: One a rank, top to bottom.
        memory: One a rank.
        boxes: `None` where there are too many to draw.
        assumptions: What nobody measured and is taken for granted, a sentence each.
        notes: Of plan and profile.
    """

    schema_version: Literal["stagewright.view/1"] = "stagewright.view/1"
    header: Header
    balance: tuple[int, ...]
    stages: tuple[StageRow, ...]
    layers: LayerColumns
    lanes: tuple[Lane, ...]
    boxes: Boxes | None
    memory: tuple[MemoryCurve, ...]
    graph: GraphView
    baselines: tuple[Baseline, ...]
    proof: Proof
    profile_id: str
    provenance: Provenance | None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reproduce: Reproduce
