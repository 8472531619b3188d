"""Profiles: the cost of each layer of a model on a device, for one micro-batch."""

from __future__ import annotations

import operator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..document import Document, LongTuple, Name, NonEmptyTuple, Notes, Record
from ..graph.graph import (
    Boundary,
    ChainBreak,
    Edge,
    Layer,
    Parameter,
    check_boundaries,
    check_edges,
    check_layer_indices,
)
from ..graph.tensors import TensorSpec
from ..models.families import ModelSpec
from ..models.training_memory import Recipe

Tf32 = Literal["off", "products", "convolutions", "products and convolutions"]
"""The float32 operations that are rounded to tf32."""


class Timing(Record):
    """A measured duration in seconds: the median of ``repeats`` warm runs.

    ``spread_s`` is the distance between the quartiles; 0 for an estimate or a single run.
    """

    median_s: float = Field(ge=0)
    spread_s: float = Field(0.0, ge=0)
    repeats: int = Field(1, ge=1)


class LayerProfile(Record):
    """Costs of one layer for one micro-batch.

    Attributes:
        layer: Its name, type, modules and parameter bytes, as captured.
        forward: Forward time.
        backward: Whole backward time (gradients of inputs and parameters).
        backward_input: Part of it for gradients of inputs, where measured apart.
        backward_weight: Part of it for gradients of parameters, where measured apart.
        recompute: Forward time when run again in the backward; as `forward` where not measured.
        dispatch_forward: CPU time that issued the forward, on devices that work on their own.
        dispatch_backward: The same of the backward.
        saved_activation_bytes: Distinct storages autograd keeps for this layer's backward.
        output_bytes: What the layer hands to later layers.
        workspace_bytes: Highest memory in use during the layer beyond its inputs, outputs,
            parameters and saved activations.
        error_band: Relative error to expect of its times; if `None`, the profile's holds.
    """

    layer: Layer
    forward: Timing
    backward: Timing
    backward_input: Timing | None = None
    backward_weight: Timing | None = None
    recompute: Timing | None = None
    dispatch_forward: Timing | None = None
    dispatch_backward: Timing | None = None
    saved_activation_bytes: int = Field(0, ge=0)
    output_bytes: int = Field(0, ge=0)
    workspace_bytes: int = Field(0, ge=0)
    error_band: float | None = Field(None, ge=0, exclude_if=lambda band: band is None)


class SavedStorage(Record):
    """A storage autograd keeps until backward, and every layer that keeps it.

    Activation memory is not additive over layers: neighbours often keep the same storage. An
    interval of layers holds the sum of ``size_bytes`` over storages with a layer inside it.
    """

    size_bytes: int = Field(ge=0)
    layers: NonEmptyTuple[int]


class LossProfile(Record):
    """Costs of the loss function, carried by whatever stage comes last.

    ``error_band`` is as of a `LayerProfile`.
    """

    forward: Timing
    backward: Timing
    saved_activation_bytes: int = Field(0, ge=0)
    error_band: float | None = Field(None, ge=0, exclude_if=lambda band: band is None)


class Reconciliation(Record):
    """The sum of the layers against the whole model, measured in the same run."""

    whole_forward: Timing
    whole_backward: Timing
    relative_error: float
    """(sum of layers - whole) / whole, over forward and backward together."""


class Clocks(Record):
    """A GPU's clock before and after the measurement, and what held it back meanwhile.

    Attributes:
        before_mhz: Of the multiprocessors.
        after_mhz: The same at the end.
        throttled_by: Reasons the driver names, such as ``thermal``; empty if none.
    """

    before_mhz: int = Field(ge=0)
    after_mhz: int = Field(ge=0)
    throttled_by: LongTuple[Name] = ()


class Provenance(Record):
    """Origin of a profile's numbers: device, software and settings."""

    source: Literal["measured", "estimated"] = "measured"
    device: Name = "cpu"
    device_name: Name = ""
    torch_version: Name = ""
    stagewright_version: Name = ""
    num_threads: int | None = None
    busy_neighbours: int = Field(0, ge=0)
    """Processes that kept other cores busy during the measurement."""
    autocast: Literal["bfloat16", "float16"] | None = None
    precision: Recipe | None = None
    """Recipe of training that was asked for; `None` for the usual one of the weights' type."""
    tf32: Tf32 | None = None
    """Which float32 operations CUDA ran as tf32; `None` on other devices, or if not recorded."""
    compiled: bool = False
    cuda_version: Name = ""
    driver: Name = ""
    clocks: Clocks | None = None
    calibrated_by: LongTuple[Name] = ()
    """Ids of the measured profiles an estimate was calibrated by."""
    error_band: float | None = None
    """Relative error to expect, itself measured; required reading for an estimate."""
    rests_on: LongTuple[Name] = ()
    """Of an estimate: what each kind of operation rests on (a table, a rule or a guess)."""


class SplitLayer(Record):
    """One layer on one of the devices that split it, for one micro-batch.

    Attributes:
        compute_share: Share of the layer's time that one device computes; 1 if it is not split.
        parameter_bytes: Parameters and buffers that one device holds.
        saved_activation_bytes: What autograd keeps on one device.
        workspace_bytes: As in `LayerProfile`, on one device.
        forward_reduced_bytes: Bytes all-reduced over the devices in a forward, all together.
        backward_reduced_bytes: Bytes all-reduced in a backward.
        forward_reductions: Number of all-reduces that carry them in a forward.
        backward_reductions: Number of them in a backward.
        forward_gathered_bytes: Bytes of whole tensors that are all-gathered in a forward.
        backward_gathered_bytes: Bytes of whole tensors that are gathered, or scattered after a
            reduction, in a backward.
        gathers: Number of those collectives, in a forward and a backward together.
        reasons: Why it, or a part of it, is not split.
    """

    compute_share: float = Field(1.0, gt=0, le=1)
    parameter_bytes: int = Field(0, ge=0)
    saved_activation_bytes: int = Field(0, ge=0)
    workspace_bytes: int = Field(0, ge=0)
    forward_reduced_bytes: int = Field(0, ge=0)
    backward_reduced_bytes: int = Field(0, ge=0)
    forward_reductions: int = Field(0, ge=0)
    backward_reductions: int = Field(0, ge=0)
    forward_gathered_bytes: int = Field(0, ge=0)
    backward_gathered_bytes: int = Field(0, ge=0)
    gathers: int = Field(0, ge=0)
    reasons: Notes = ()


class TensorSplit(Record):
    """All layers of a model split over ``degree`` devices (tensor parallelism).

    Attributes:
        divided: Names of the tensors at boundaries of which each device holds an equal part.
    """

    degree: int = Field(ge=2, le=1024)
    layers: LongTuple[SplitLayer]
    divided: LongTuple[Name] = ()


class Profile(Document):
    """Per-layer costs of a model for one micro-batch on one device.

    Attributes:
        model: Class name of the model.
        spec: The family and configuration it was built from, if it was.
        inputs: Flat tensor inputs at micro-batch size.
        input_structure: How the model is called with them (see `capture.sample`).
        boundaries: One per gap between consecutive layers: what a cut there sends.
        edges: Which layer reads what another made; empty if not known. Needed only to reorder
            branches.
        parameters: Every parameter and buffer with the layers using it (ties included).
        storages: What autograd keeps (see `SavedStorage`).
        splits: How layers split over several devices, one entry per number of devices, ascending;
            empty if not known.
        fixed_mode: What keeps to training mode however the model is switched (see `Graph`).
        chain_break: See `Graph`.
    """

    SCHEMA: ClassVar[str] = "stagewright.profile/1"

    schema_version: Literal["stagewright.profile/1"] = "stagewright.profile/1"
    model: Name = ""
    spec: ModelSpec | None = None
    inputs: LongTuple[TensorSpec] = ()
    input_structure: str = Field("", max_length=100_000)
    layers: NonEmptyTuple[LayerProfile]
    boundaries: LongTuple[Boundary]
    edges: LongTuple[Edge] = ()
    parameters: LongTuple[Parameter] = ()
    storages: LongTuple[SavedStorage] = ()
    splits: LongTuple[TensorSplit] = Field((), exclude_if=operator.not_)
    loss: LossProfile | None = None
    reconciliation: Reconciliation | None = None
    provenance: Provenance = Provenance()
    fixed_mode: Notes = ()
    chain_break: ChainBreak = None
    notes: Notes = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_boundaries(self.boundaries, len(self.layers))
        check_edges(self.edges, len(self.layers))
        check_layer_indices(self.parameters, len(self.layers))
        # Pins, groups and comparisons refer to layers by name.
        names: set[str] = set()
        for entry in self.layers:
            if entry.layer.name in names:
                raise ValueError(f"two layers are named {entry.layer.name!r}; names must be unique")
            names.add(entry.layer.name)
        for position, storage in enumerate(self.storages):
            # Once they ascend, the first and the last bound all others.
            if list(storage.layers) != sorted(set(storage.layers)) or not (
                storage.layers[0] >= 0 and storage.layers[-1] < len(self.layers)
            ):
                raise ValueError(
                    f"storages[{position}] lists layers {storage.layers}; they must be ascending "
                    f"and between 0 and {len(self.layers) - 1}"
                )
        degrees = [split.degree for split in self.splits]
        if degrees != sorted(set(degrees)):
            raise ValueError(f"splits are of {degrees} devices; they must ascend")
        for position, split in enumerate(self.splits):
            if len(split.layers) != len(self.layers):
                raise ValueError(
                    f"splits[{position}] has {len(split.layers)} layers, the profile "
                    f"{len(self.layers)}"
                )
        return self

    def __str__(self) -> str:
        from .table import format_profile

        return format_profile(self)


def list_parameters(profile: Profile) -> tuple[Parameter, ...]:
    """Return the profile's parameters; if it lists none, one fp32 parameter per layer.

    Profiles written by hand often give only each layer's bytes; taking them for nothing would
    promise memory that is not there.
    """
    # Not validated, as the sizes are valid already: that would take longer than all else here.
    return profile.parameters or tuple(
        Parameter.model_construct(
            names=(entry.layer.name,),
            size_bytes=entry.layer.parameter_bytes,
            numel=-(-entry.layer.parameter_bytes // 4),
            layers=(index,),
        )
        for index, entry in enumerate(profile.layers)
        if entry.layer.parameter_bytes
    )
