"""Estimate a profile without the device: FLOPs and bytes against a catalogue of devices."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.equivalence.check import NOT_OBSERVED
from ...capture.sample import CallStructure
from ...core.cluster.accelerators import (
    Accelerator,
    Precision,
    check_precision,
    default_precision,
    find_by_driver_name,
    get_accelerator,
)
from ...core.errors import CaptureError, InvalidInput, MeasurementError, first_line
from ...core.graph.graph import Layer
from ...core.graph.tensors import Sample
from ...core.models.families import ModelSpec, list_left_out
from ...core.models.training_memory import Recipe
from ...core.profile.profile import LayerProfile, LossProfile, Profile, Provenance, Timing
from ...core.requests.default_samples import default_sample
from ...core.requests.precision import AskedPrecision, split_precision
from ..layers.loss_layer import LossFunction
from ..layers.tensor_shares import list_splits
from ..measure.to_profile import graph_fields
from ..models.families import build_loss, build_model
from .basis import describe_basis, model_class
from .calibration import (
    TENSORS,
    CalibrationPoint,
    calibrate,
    check_settings,
    floating_dtype,
    make_calibration_point,
)
from .calibration_table import CalibrationTable
from .device_table import Launch, load_gpu_table
from .error_band import (
    MeasuredError,
    error_note,
    kernel_bands,
    list_layer_bands,
    measured_error,
)
from .layer_costs import EstimateTarget, LayerWork, ModelWork, model_work
from .meta_device import META, empty_meta, on_meta, without_values
from .repeated_blocks import repeated_work
from .roofline import CostTable, DeviceRates, default_rates

DTYPES: dict[Precision, torch.dtype] = {
    precision: getattr(torch, name) for precision, name in TENSORS.items()
}


def target(
    device: str | Accelerator, precision: Precision | None = None, num_threads: int | None = None
) -> EstimateTarget:
    """Build a target; defaults are 16 bits on GPUs, float32 and all cores on a CPU."""
    found = get_accelerator(device) if isinstance(device, str) else device
    is_cpu = found.backend == "cpu"
    if precision is not None:
        check_precision(found, precision)
    return EstimateTarget(
        found,
        precision or default_precision([found]),
        (num_threads or os.cpu_count() or 1) if is_cpu else 1,
    )


def estimate(
    model: nn.Module,
    sample: Any,
    *,
    device: str | Accelerator,
    precision: AskedPrecision | None = None,
    num_threads: int | None = None,
    loss_fn: LossFunction | None = None,
    target_tensor: Tensor | None = None,
    spec: ModelSpec | None = None,
    calibrate_by: Sequence[Profile] = (),
    launch: Launch = "eager",
    table: CalibrationTable | None = None,
) -> Profile:
    """Estimate a model's profile on a device that need not be present.

    The model is copied without its values; it and its sample may be on the meta device.

    Args:
        model: Any module `capture.capture.trace` accepts.
        sample: One micro-batch: an argument, a tuple (positional) or a dict of them (keywords).
        device: A name from the catalogue, such as ``H100``.
        precision: Of parameters, activations and products, or a recipe of training; bfloat16 on
            GPUs that have it, float16 on others, if not given.
        num_threads: CPU cores, if the device is the CPU; all of this machine's if not given.
        loss_fn: ``loss_fn(output, target)``; if given, its cost is charged to the last stage.
        target_tensor: What the loss is taken against.
        spec: Recorded in the profile, so that a plan can build the model again.
        calibrate_by: Measured profiles of models of a family, on the same kind of device.
        launch: How kernels are started: one by one (``eager``), by compiled code, which also fuses
            elementwise operations, or as a CUDA ``graph``.
        table: What ``stagewright calibrate`` measured on the device, at this precision.

    Raises:
        InvalidInput: Device, sample or a profile to calibrate by does not fit.
        CaptureError: The model cannot be traced or run on the meta device; it can be measured.
    """
    computed, recipe = split_precision(precision)
    wanted = target(device, computed, num_threads)
    dtype = DTYPES[wanted.precision]
    with measured_instead(type(model).__name__):
        work = model_work(
            without_values(model, dtype),
            on_meta(sample, dtype),
            wanted,
            loss_fn,
            target=None if target_tensor is None else on_meta(target_tensor, dtype),
        )
    rates = rates_for(wanted, calibrate_by, launch, table)
    return document(work, wanted, rates, spec, calibrate_by, table=table, recipe=recipe)


def estimate_spec(
    spec: ModelSpec,
    sample: Sample | None = None,
    *,
    device: str | Accelerator,
    precision: AskedPrecision | None = None,
    num_threads: int | None = None,
    calibrate_by: Sequence[Profile] = (),
    table: CalibrationTable | None = None,
) -> Profile:
    """Estimate a model of a named family with its usual loss, built on the meta device.

    Arguments and errors are those of `estimate`, except that a layer which fails on the meta device
    raises `MeasurementError`. The loss is left out of a sample without a target.
    """
    computed, recipe = split_precision(precision)
    wanted = target(device, computed, num_threads)
    work = spec_work(spec, sample or default_sample(spec), wanted)
    rates = rates_for(wanted, calibrate_by, table=table)
    return document(work, wanted, rates, spec, calibrate_by, table=table, recipe=recipe)


def spec_work(spec: ModelSpec, sample: Sample, wanted: EstimateTarget) -> ModelWork:
    """Count the work of the layers of a model of a named family."""
    dtype = DTYPES[wanted.precision]
    with META:
        model = build_model(spec).to(dtype)
    inputs = on_meta({name: empty_meta(entry) for name, entry in sample.inputs.items()}, dtype)
    target = None if sample.target is None else empty_meta(sample.target)
    loss_fn = None if target is None else build_loss(spec)
    repeated = repeated_work(model, inputs, wanted, loss_fn, target)
    return repeated or model_work(model, inputs, wanted, loss_fn, target)


def rates_for(
    wanted: EstimateTarget,
    profiles: Sequence[Profile],
    launch: Launch = "eager",
    table: CalibrationTable | None = None,
) -> DeviceRates:
    """Return the device's usual rates, or its own table's; fitted to profiles if any are given."""
    start = default_rates(wanted.device, wanted.precision, wanted.num_threads, launch=launch)
    if table is not None:
        _check_table(table, wanted)
        start = replace(
            start,
            efficiency={kind: table.efficiency[kind] for kind in start.efficiency},
            traffic=table.traffic,
            overhead_s=table.overhead_s if launch == "eager" else start.overhead_s,
        )
    if not profiles:
        return start
    return calibrate(start, [_observed(profile, wanted) for profile in profiles])


def _check_table(table: CalibrationTable, wanted: EstimateTarget) -> None:
    made = (table.device, table.precision, table.num_threads)
    needed = (wanted.device.name, wanted.precision, wanted.num_threads)
    if made != needed:
        raise InvalidInput(
            f"the calibration is of {made[0]} at {made[1]} with {made[2]} threads, and the "
            f"estimate for {needed[0]} at {needed[1]} with {needed[2]}; run stagewright calibrate "
            "for that",
            field="/table",
        )


def _observed(profile: Profile, wanted: EstimateTarget) -> CalibrationPoint:
    found = profile.provenance
    if found.source != "measured":
        raise InvalidInput(
            f"an estimate can only be calibrated by measured profiles; that of {profile.model} "
            "is itself estimated",
            field="/calibrate_by",
        )
    if found.device == "cpu":
        kind = "CPU"
    else:
        entry = find_by_driver_name(found.device_name)
        kind = entry.name if entry else found.device_name
    if kind != wanted.device.name:
        raise InvalidInput(
            f"the profile of {profile.model} was measured on {found.device_name or found.device}, "
            f"and the estimate is for {wanted.device.full_name}; calibrate by profiles of the "
            "same kind of device",
            field="/calibrate_by",
        )
    if profile.spec is None:
        raise InvalidInput(
            f"{profile.model} is no model of a family, so what its layers compute is not known; "
            "calibrate by profiles made with --family",
            field="/calibrate_by",
        )
    is_cpu = wanted.device.backend == "cpu"
    check_settings(profile, wanted.precision, wanted.num_threads if is_cpu else None)
    return make_calibration_point(profile_work(profile, wanted), profile)


def profile_work(profile: Profile, wanted: EstimateTarget) -> ModelWork:
    """Count the work of a profiled model of a named family, at the profile's shapes."""
    assert profile.spec is not None
    with META:
        model = build_model(profile.spec)
        floating = floating_dtype(profile)
        model = model.to(getattr(torch, floating)) if floating else model
    flat = [empty_meta(spec) for spec in profile.inputs]
    goal = None
    if profile.loss is not None:
        # A profile does not record its target; the shape follows from the family's usual one: the
        # last input's for two dimensions, one label per pixel for three.
        batch = profile.inputs[0].shape[0]
        usual = default_sample(profile.spec, batch).target
        assert usual is not None
        shape = profile.inputs[-1].shape if len(usual.shape) == 2 else usual.shape
        if len(usual.shape) == 3:
            shape = (batch, *profile.inputs[0].shape[2:])
        goal = torch.empty(shape, dtype=torch.int64, device=META)
    structure = CallStructure.from_json(profile.input_structure)
    loss_fn = None if goal is None else build_loss(profile.spec)
    work = model_work(model, structure.as_sample(flat), wanted, loss_fn, goal)
    names = [entry.layer.name for entry in profile.layers]
    if names != [layer.name for layer in work.graph.layers]:
        raise InvalidInput(
            f"the layers of the profile of {profile.model} are not those its family has now; "
            "measure it again",
            field="/calibrate_by",
        )
    return work


def document(
    work: ModelWork,
    wanted: EstimateTarget,
    rates: DeviceRates,
    spec: ModelSpec | None = None,
    calibrate_by: Sequence[Profile] = (),
    table: CalibrationTable | None = None,
    recipe: Recipe | None = None,
) -> Profile:
    """Write the estimate as a profile."""
    lists = [
        costs for part in work.parts for costs in (part.forward, part.backward, part.backward_input)
    ]
    # One row per part, the loss last; the three columns follow the order of `lists`.
    costs = CostTable(lists)
    times = costs.seconds(rates).reshape(-1, 3)
    by_class = costs.seconds_by_class(rates).reshape(len(times), 3, -1)
    graph = work.graph
    # A family's model is built here, and keeps nothing that would have to be looked for.
    notes = [note for note in graph.notes if spec is None or not note.startswith(NOT_OBSERVED)]
    error = _error_to_expect(work, wanted, calibrate_by)
    is_calibrated = bool(calibrate_by)
    bands = list_layer_bands(
        times[:, :2].sum(axis=1),
        by_class[:, :2].sum(axis=1),
        kernel_bands(wanted.device, wanted.precision, is_calibrated=is_calibrated, kept=table),
        error.largest,
    )
    layers = tuple(
        _layer(entry.model_copy(update={"cost_class": name}), part, band, *map(float, row))
        for entry, name, part, band, row in zip(
            graph.layers, work.classes, work.layers, bands, times, strict=False
        )
    )
    loss = None
    if work.loss is not None:
        loss = LossProfile(
            forward=Timing(median_s=float(times[-1][0])),
            backward=Timing(median_s=float(times[-1][1])),
            saved_activation_bytes=work.loss.saved_bytes,
            error_band=bands[-1],
        )
    return Profile(
        **graph_fields(graph),
        spec=spec,
        input_structure=graph.input_structure or work.structure.to_json(),
        layers=layers,
        storages=work.storages,
        splits=list_splits(work.shares, layers),
        loss=loss,
        provenance=_provenance(work, wanted, error, calibrate_by, table, recipe),
        notes=(
            f"ESTIMATED for {wanted.device.full_name} at {wanted.precision}: " + error_note(error),
            *list_left_out(spec),
            *notes,
        ),
    )


def _error_to_expect(
    work: ModelWork, wanted: EstimateTarget, calibrate_by: Sequence[Profile]
) -> MeasuredError:
    is_gpu = wanted.device.backend != "cpu"
    share = load_gpu_table().product_share(wanted.device, wanted.precision) if is_gpu else None
    return measured_error(
        wanted.device,
        model_class(work.parts, wanted.precision),
        is_calibrated=bool(calibrate_by),
        is_measured=share is not None and share[1] == "table",
    )


def _provenance(
    work: ModelWork,
    wanted: EstimateTarget,
    error: MeasuredError,
    calibrate_by: Sequence[Profile],
    table: CalibrationTable | None,
    recipe: Recipe | None,
) -> Provenance:
    backend = wanted.device.backend
    return Provenance(
        source="estimated",
        # torch names AMD's devices cuda, too.
        device="cpu" if backend == "cpu" else "cuda",
        device_name=wanted.device.full_name,
        torch_version=torch.__version__,
        stagewright_version=version("stagewright"),
        precision=recipe,
        num_threads=wanted.num_threads if backend == "cpu" else None,
        calibrated_by=tuple(profile.content_id() for profile in calibrate_by),
        error_band=error.largest,
        rests_on=describe_basis(
            wanted.device, wanted.precision, work.parts, len(calibrate_by), table
        ),
    )


def _layer(
    entry: Layer,
    part: LayerWork,
    band: float | None,
    forward_s: float,
    backward_s: float,
    input_s: float,
) -> LayerProfile:
    # The two are priced from separate backwards; their difference must not fall below zero.
    input_s = min(input_s, backward_s)
    return LayerProfile(
        layer=entry,
        forward=Timing(median_s=forward_s),
        backward=Timing(median_s=backward_s),
        backward_input=Timing(median_s=input_s),
        backward_weight=Timing(median_s=backward_s - input_s),
        saved_activation_bytes=part.saved_bytes,
        output_bytes=part.output_bytes,
        workspace_bytes=part.workspace_bytes,
        error_band=band,
    )


@contextmanager
def measured_instead(model: str) -> Iterator[None]:
    """Turn the error of a model that does not run without values into advice to measure it."""
    try:
        yield
    except (CaptureError, MeasurementError) as error:
        module, operation = getattr(error, "module", None), getattr(error, "operation", None)
        where = repr(module) if module else ""
        where += f" ({operation})" if module and operation else ""
        reason = f"{where} needs them" if where else first_line(error).rstrip(".")
        raise CaptureError(
            f"{model} cannot be estimated: an estimate runs without values, and {reason}. "
            "Measure it where it can run: stagewright.profile(model, sample), or 'stagewright "
            "profile package.module:model --sample package.module:sample'",
            module=module,
            operation=operation,
        ) from error
