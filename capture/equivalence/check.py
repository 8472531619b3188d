"""Equivalence check: a traced model must compute what the model computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import CaptureError, InvalidInput, StagewrightError, first_line
from ...core.graph.graph import Boundary
from ..captured import Captured
from ..observation.forward_observation import ForwardObservation
from ..observation.interception import ParameterGuard, changes_parameter
from ..observation.nested_values import collect_constants, extract_tensors
from ..observation.observe import watch_forward
from ..observation.outside_state import find_changes, read_outside_state
from ..observation.preserve import preserve_model, preserve_modes, seed_everything
from ..observation.state_changes import (
    PythonStateTracker,
    report_outside_changes,
    report_repeated_changes,
    report_state_changes,
)
from ..sample import CallStructure
from .piecewise_run import PiecewiseRun

RELATIVE_TOLERANCE = 1e-3
"""A wrong graph differs by far more; another kernel for the same operation (flash instead of math
attention) by far less. Lower precisions get a larger tolerance, see `_tolerance`."""

EVALUATION_TOLERANCE = 1e-5
"""Without dropout both run the same kernels, and what training alone does may be small: DINOv3's
jitter of positions moves an untrained model's output by 4e-4."""

GRADIENT_FLOOR = 1e-4
"""Share of the largest gradient below which a gradient is rounding error, such as that of a bias
before a normalisation."""


NOT_THE_MODEL = "the traced model is not the model: "

FAILS = "the traced model fails where the model does not"

IN_FLIGHT = "with two micro-batches in flight"

CAUSES = (
    ". The tracer misses something in forward: hooks, Python's random numbers, state kept outside "
    "buffers, or a custom derivative"
)

SEEDS = (0, 1)
"""Seeds of the random generators at the start of each step."""


@dataclass(frozen=True)
class StepBehaviour:
    """Results of one training step.

    ``form`` is the returned value, with a `TensorPosition` for each of the ``outputs``; ``buffers``
    are those after the step.
    """

    outputs: list[Tensor]
    form: Any
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class EagerReference:
    """Two successive training steps of the model itself, on different inputs.

    ``seen`` is the observation of the first forward.
    """

    seen: ForwardObservation
    inputs: list[tuple[Tensor, ...]]
    behaviours: list[StepBehaviour]

    @property
    def varied(self) -> bool:
        """Return True if the two steps had different inputs."""
        return self.inputs[0] is not self.inputs[1]


def run_eager_steps(
    model: nn.Module, structure: CallStructure, flat: tuple[Tensor, ...]
) -> EagerReference:
    """Run two training steps of the model itself.

    The second step starts from the state that the first leaves behind, as in training. Its inputs
    and random numbers differ, to reveal a graph that has frozen values of the sample.

    Raises:
        InvalidInput: The model fails on this sample by itself.
        CaptureError: The model tried to change its own parameters, which was prevented.
    """
    with preserve_model(model), torch.enable_grad():
        seed_everything(SEEDS[0])
        seen, output = _watched_forward(model, structure, flat)
        try:
            with ParameterGuard(model):
                first = _behaviour(model, output)
        except RuntimeError as error:
            raise InvalidInput(
                f"{type(model).__name__} itself fails in its backward pass: {first_line(error)}"
            ) from error
        del output
        # The model may reject made-up inputs or compute NaN from them. Try variations from the most
        # to the least different; the last one is the sample itself.
        for other in vary_inputs(flat):
            try:
                with preserve_model(model), ParameterGuard(model):
                    kept, outside = PythonStateTracker(model), read_outside_state(model)
                    second = _step(model, structure, other)
                    again = kept.finish()
                    outside_again = find_changes(outside, read_outside_state(model))
            except CaptureError:
                raise
            except Exception:  # noqa: BLE001 - these made-up inputs do not suit the model
                continue
            if _as_finite(second, first):
                report_repeated_changes(seen, again)
                report_outside_changes(seen, outside_again)
                same = all(ours is theirs for ours, theirs in zip(other, flat, strict=True))
                return EagerReference(seen, [flat, flat if same else other], [first, second])
    raise CaptureError("the model ran once and then failed on the same sample")


NOT_OBSERVED = (
    "state that the model keeps, hooks and weights used from elsewhere were not looked for, since "
)
"""Beginning of the remark on a model whose forward could not be run before it was traced."""


def observe_forward(
    model: nn.Module, structure: CallStructure, flat: tuple[Tensor, ...]
) -> ForwardObservation:
    """Run one forward of the model itself and observe it.

    A model that fails on this sample is not rejected here: synthetic inputs may not suit it. The
    observation then says that nothing was seen.
    """
    with preserve_model(model), torch.enable_grad():
        seed_everything(SEEDS[0])
        try:
            seen, _ = _watched_forward(model, structure, flat)
        except InvalidInput as error:
            reason = str(error)
            if any(tensor.is_meta for tensor in flat):
                # torch's own error speaks of meta tensors, of which a user has seen none. Models of
                # transformers lead to it: they look for packed sequences in the positions.
                reason = (
                    f"the forward of {type(model).__name__} reads values, and it ran without any; "
                    "a measured profile looks for them"
                )
            return ForwardObservation(remarks=[NOT_OBSERVED + reason])
        report_state_changes(seen)
        return seen


def _watched_forward(
    model: nn.Module, structure: CallStructure, flat: Sequence[Tensor]
) -> tuple[ForwardObservation, Any]:
    args, kwargs = structure.unflatten([tensor.clone() for tensor in flat])
    parameters = dict(model.named_parameters())
    versions = {name: parameter._version for name, parameter in parameters.items()}
    with watch_forward(model) as (seen, watch):
        try:
            output = model(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise InvalidInput(
                f"{type(model).__name__} itself fails on this sample: "
                f"{type(error).__name__}: {first_line(error)}",
                field="/sample/inputs",
            ) from error
        watch.settle("", output)
    # The guard sees operations; this also finds parameters that were replaced, or whose version
    # counter shows a write that bypassed dispatch.
    for name, parameter in model.named_parameters():
        if parameter is not parameters.get(name) or parameter._version != versions[name]:
            raise changes_parameter(name)
    return seen, output


def _step(model: nn.Module, structure: CallStructure, flat: Sequence[Tensor]) -> StepBehaviour:
    seed_everything(SEEDS[1])
    args, kwargs = structure.unflatten([tensor.clone() for tensor in flat])
    return _behaviour(model, model(*args, **kwargs))


def _as_finite(second: StepBehaviour, first: StepBehaviour) -> bool:
    """Return True if outputs are finite wherever those of the first step were."""
    pairs = zip(second.outputs, first.outputs, strict=False)
    return len(second.outputs) == len(first.outputs) and all(
        bool(ours.isfinite().all()) or not theirs.isfinite().all() for ours, theirs in pairs
    )


def check_piecewise_run(cut: PiecewiseModel, expected: EagerReference) -> None:
    """Take the reference's steps with the traced model, split at every legal cut, and compare.

    Both steps' micro-batches are in flight at once, as in a pipeline: every piece runs both before
    the next piece runs any, and the backwards come last.
    """
    try:
        cut.compare_in_flight(expected)
    except CaptureError as error:
        cut.compare_in_turn(expected)
        # Autograd has noticed a change in place of what a backward reads, as it will in training.
        if "modified by an inplace operation" in str(error):
            return
        difference = str(error).removeprefix(NOT_THE_MODEL).partition(CAUSES)[0]
        raise CaptureError(
            f"{IN_FLIGHT}, though not one after the other, {difference}. The "
            "second forward changes something that is still needed for the first, such as a "
            "buffer written through .data, a global variable or an attribute of another module; "
            "let forward read a copy (buffer.clone()), or pass the value on as an argument"
        ) from error


@dataclass(frozen=True)
class PiecewiseModel:
    """The traced model, cut into pieces."""

    model: nn.Module
    pieces: Sequence[nn.Module]
    boundaries: Sequence[Boundary]
    unflatten: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(cls, captured: Captured) -> PiecewiseModel:
        """Cut a traced model at every legal cut."""
        legal = [cut.boundary for cut in captured.cuts if cut.boundary.legal]
        edges = [0, *(boundary.after + 1 for boundary in legal), len(captured.layers)]
        pieces = [captured.segment(first, last) for first, last in pairwise(edges)]
        return cls(captured.program.model, pieces, legal, captured.unflatten_output)

    def compare_in_flight(self, expected: EagerReference) -> None:
        with preserve_model(self.model), torch.enable_grad(), as_capture_error(FAILS):
            runs = []
            for seed, flat in zip(SEEDS, expected.inputs, strict=False):
                seed_everything(seed)
                runs.append(PiecewiseRun(self.boundaries, flat))
            for piece in self.pieces:
                for run in runs:
                    run.run_piece(self.model, piece)
            for run, wanted in zip(runs, expected.behaviours, strict=True):
                found = _behaviour(self.model, self.unflatten(run.outputs), run.backward)
                # All forwards are done: buffers are those after the last step.
                buffers = expected.behaviours[-1].buffers
                compare(found, replace(wanted, buffers=buffers))

    def compare_in_turn(self, expected: EagerReference) -> None:
        with preserve_model(self.model), torch.enable_grad(), as_capture_error(FAILS):
            steps = zip(SEEDS, expected.inputs, expected.behaviours, strict=False)
            for seed, flat, wanted in steps:
                seed_everything(seed)
                run = self.run(flat)
                compare(_behaviour(self.model, self.unflatten(run.outputs), run.backward), wanted)

    def run(self, flat: Sequence[Tensor]) -> PiecewiseRun:
        run = PiecewiseRun(self.boundaries, flat)
        for piece in self.pieces:
            run.run_piece(self.model, piece)
        return run


@contextmanager
def as_capture_error(what: str, kept: type[StagewrightError] = CaptureError) -> Iterator[None]:
    """Turn all errors but the ``kept`` into a `CaptureError` that begins with ``what``."""
    try:
        yield
    except kept:
        raise
    except Exception as error:
        raise CaptureError(f"{what}: {type(error).__name__}: {first_line(error)}") from error


def _behaviour(
    model: nn.Module, output: Any, rest: Callable[[], None] = lambda: None
) -> StepBehaviour:
    """Differentiate the outputs for fixed pseudo-random cotangents, and copy all results."""
    leaves: list[Tensor] = []
    form = extract_tensors(output, leaves)
    for parameter in model.parameters():
        parameter.grad = None
    roots = [leaf for leaf in leaves if leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_cotangent(root) for root in roots])
        rest()
    named = model.named_parameters()
    return StepBehaviour(
        outputs=[leaf.detach().clone() for leaf in leaves],
        form=form,
        gradients={name: p.grad.to_dense() for name, p in named if p.grad is not None},
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    )


def _cotangent(output: Tensor) -> Tensor:
    # Random and bounded away from 0: ones would hide errors that cancel, such as in a softmax.
    generator = torch.Generator().manual_seed(output.numel())
    values = torch.rand(output.shape, generator=generator) + 0.5
    return values.to(output.device, output.dtype)


def compare(
    found: StepBehaviour, expected: StepBehaviour, least: float = RELATIVE_TOLERANCE
) -> None:
    """Raise `CaptureError`, with the first difference and its size, unless two steps are equal."""
    tolerance = _tolerance(expected, least)
    if collect_constants(found.form) != collect_constants(expected.form):
        raise CaptureError(
            f"{NOT_THE_MODEL}it returns other values, or in another order "
            f"({found.form} instead of {expected.form}); return tensors instead of Python numbers"
        )
    for position, pair in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        _insist(relative_difference(*pair), tolerance, f"output {position}")
    floor = compute_gradient_floor(expected.gradients.values())
    for name, gradient in sorted({**found.gradients, **expected.gradients}.items()):
        zero = torch.zeros_like(gradient)
        ours, theirs = (step.gradients.get(name, zero) for step in (found, expected))
        error = relative_difference(ours, theirs, floor=floor)
        _insist(error, tolerance, f"the gradient of {name!r}")
    for name, buffer in expected.buffers.items():
        _insist(relative_difference(found.buffers[name], buffer), tolerance, f"the buffer {name!r}")


def compute_gradient_floor(gradients: Iterable[Tensor]) -> float:
    """Return the norm below which differences between gradients are rounding errors."""
    return GRADIENT_FLOOR * max(
        (float(gradient.to_dense().norm()) for gradient in gradients), default=0.0
    )


def _insist(error: float, tolerance: float, what: str) -> None:
    if not error <= tolerance:
        raise CaptureError(f"{NOT_THE_MODEL}{what} differs by {error:.2g} (relative){CAUSES}")


def _tolerance(behaviour: StepBehaviour, least: float) -> float:
    floating = [
        leaf.dtype
        for leaf in (*behaviour.outputs, *behaviour.gradients.values())
        if leaf.is_floating_point()
    ]
    return max([least, *(20 * float(torch.finfo(dtype).eps) for dtype in floating)])


def follows_mode(captured: Captured, flat: Sequence[Tensor]) -> bool:
    """Return True if the pieces in evaluation mode do what the model does in evaluation mode."""
    model, cut = captured.program.model, PiecewiseModel.of(captured)
    together = nn.ModuleList(cut.pieces)
    with preserve_model(model, training=False), preserve_modes(together), torch.no_grad():
        args, kwargs = captured.structure.unflatten([tensor.clone() for tensor in flat])
        try:
            with preserve_model(model):
                seed_everything(SEEDS[0])
                expected = _behaviour(model, model(*args, **kwargs))
            seed_everything(SEEDS[0])
            together.train(False)
            found = _behaviour(model, cut.unflatten(cut.run(flat).outputs))
            compare(found, expected, EVALUATION_TOLERANCE)
        except Exception:  # noqa: BLE001 - whatever it is, evaluation is not what it should be
            return False
    return True


SMALLEST_NORM = 1e-150
"""Replaces a norm of zero; its square does not underflow."""


def relative_difference(found: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return the norm of the difference over the norm of ``expected``, in double precision.

    ``floor`` bounds the norm of ``expected`` below. The difference is infinite if infinities and
    NaN are not in the same places.
    """
    if found.shape != expected.shape:
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    ours, theirs = found.detach().to(wide), expected.detach().to(wide)
    finite = theirs.isfinite()
    if not finite.all():
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        if not bool((finite | same).all()):
            return float("inf")
        ours, theirs = ours[finite], theirs[finite]
    difference = float((ours - theirs).norm())
    if difference != difference:
        return float("inf")
    return difference / max(float(theirs.norm()), floor, SMALLEST_NORM)


def vary_inputs(flat: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs of the same shapes, the most different first and the sample itself last.

    Floating-point values are interpolated between two permutations of the sample's own, so they
    stay in its range; integers, booleans and masks are permuted, so they stay valid indices.
    """
    generator = torch.Generator().manual_seed(1)
    yield tuple(_varied(tensor, generator) for tensor in flat)
    yield tuple(
        _varied(tensor, generator) if tensor.is_floating_point() else tensor for tensor in flat
    )
    yield tuple(flat)


def _varied(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.numel() < 2 or tensor.is_complex():
        return tensor
    if not tensor.is_floating_point():
        return _permuted(tensor, generator)
    low, high = float(tensor.min()), float(tensor.max())
    if low == high:
        noise = torch.rand(tensor.shape, generator=generator).to(tensor)
        return tensor + noise
    if not tensor.isfinite().all() or ((tensor == low) | (tensor == high)).all():
        return _permuted(tensor, generator)
    share = torch.rand(tensor.shape, generator=generator).to(tensor)
    return torch.lerp(_permuted(tensor, generator), _permuted(tensor, generator), share)


def _permuted(tensor: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.detach().reshape(-1)[order].reshape(tensor.shape)
