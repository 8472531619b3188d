"""Verdict of one row of the capture table: if the captured model does what the model does."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.capture.observation.preserve import copy_module
from stagewright.core.errors import PlanMismatch, StagewrightError
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.profiler.measure.profile import profile

from .architecture import DRAWN, Architecture
from .behaviour import TOLERANCE, Behaviour, call, differences, flatten, observe, seed_all, weights
from .row import Row

LEARNING_RATE = 0.1
STEPS = 2
PERTURBATION = 0.02
"""Added to every parameter: a bias or a scale that starts at zero hides a lost gradient."""

MEASURING_S = 0.01

TRACING_SEED, FIRST_SEED = 100, 1


class NotBuilt(Exception):
    """The architecture does not build, or does not run eagerly, as it was drawn."""


class Wrong(Exception):
    """The captured model silently does something else."""


def judge(architecture: Architecture, trace: Callable[[nn.Module, Any], Any]) -> Row:
    """Capture, compare, and give the verdict; only a crash of the process gets past this."""
    row = Row(architecture.name, architecture.kind, architecture.trap)
    try:
        Trial(architecture, trace, row).run()
    except NotBuilt as error:
        row.verdict, row.reason = "not built", str(error)
    except Wrong as wrong:
        row.verdict, row.reason = "WRONG", str(wrong)
    except StagewrightError as refusal:
        row.verdict, row.reason = "refused", _first_line(refusal)
    except Exception as error:  # noqa: BLE001 - an architecture that fails is a row, not the end
        row.verdict, row.reason = "failed", f"{type(error).__name__}: {_first_line(error)}"
    else:
        row.verdict = "equal, with opaque layers" if row.opaque else "equal"
        if row.eval == "refused":
            row.verdict, row.reason = "equal in training", "; ".join(row.notes)
    return row


class Trial:
    """One architecture, captured, beside copies of it that do every step eagerly.

    It runs in one piece, and cut into pieces that share nothing; each way beside an eager copy of
    its own. Neither is ever set back, so that what they remember from step to step is compared as
    well.
    """

    def __init__(
        self, architecture: Architecture, trace: Callable[[nn.Module, Any], Any], row: Row
    ) -> None:
        self.architecture, self.trace, self.row = architecture, trace, row
        self.model, self.sample = self.fresh(), self.inputs(TRACING_SEED)
        start = time.perf_counter()
        try:
            self.captured = trace(self.model, self.sample)
        finally:
            row.capture_s = time.perf_counter() - start
        graph = self.captured.graph
        row.mode, row.layers, row.notes = graph.mode, len(graph.layers), graph.notes
        row.opaque = {layer.name: layer.opaque for layer in graph.layers if layer.opaque}
        row.cuts = len(graph.boundaries)
        row.legal_cuts = sum(boundary.legal for boundary in graph.boundaries)

    def fresh(self) -> nn.Module:
        """Return the model as built, the same every time, in training mode.

        Raises:
            NotBuilt: A drawn architecture does not build, or does not run on its sample.
        """
        seed_all(0)
        try:
            model = self.architecture.build().train()
            if self.architecture.kind in DRAWN:
                sample = self.inputs(TRACING_SEED)
                call(copy.deepcopy(model), sample, flatten(sample))
        except Exception as error:
            if self.architecture.kind not in DRAWN:
                raise
            raise NotBuilt(f"{type(error).__name__}: {_first_line(error)}") from error
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=PERTURBATION)
        return model

    def inputs(self, seed: int) -> Any:
        seed_all(seed)
        return self.architecture.sample()

    def run(self) -> None:
        """Every check; the first one that fails raises."""
        self.compare("after tracing", weights(self.model), weights(self.fresh()))
        boundaries = self.captured.graph.boundaries
        legal = [boundary.after + 1 for boundary in boundaries if boundary.legal]
        spans = list(pairwise([0, *legal, self.row.layers]))
        ways = [("whole", CutRun(self.captured, [(0, self.row.layers)], self.model))]
        if legal:  # copied now, before the whole model changes what it keeps
            again = lambda: self.trace(self.fresh(), self.sample)  # noqa: E731
            ways.append(("cut", Isolated(self.captured, spans, self.fresh(), again)))
        for way, run in ways:
            eager = self.fresh()
            for seed in range(FIRST_SEED, FIRST_SEED + self.architecture.seeds):
                self.one_step(way, run, eager, seed)
            self.several_steps(way, run, eager)
            self.evaluation(way, run, eager)
        self.profile()

    def one_step(self, way: str, run: CutRun, eager: nn.Module, seed: int) -> None:
        """Forward and backward; gradients of inputs too while the model is in one piece."""
        flat = flatten(self.inputs(seed))
        with_inputs = self.architecture.differentiable_inputs and way == "whole"
        expected = self.eager_step(eager, flat, seed=seed, with_inputs=with_inputs)
        found = self.captured_step(run, flat, seed=seed, with_inputs=with_inputs)
        self.compare(f"{way}, inputs {seed}", found, expected)

    def eager_step(self, eager: nn.Module, flat: list[Tensor], **how: Any) -> Behaviour:
        return observe(eager, lambda x: call(eager, self.sample, x), flat, **how)

    def captured_step(self, run: CutRun, flat: list[Tensor], **how: Any) -> Behaviour:
        return observe(run.model, run, flat, hand_back=run.hand_back, **how)

    def several_steps(self, way: str, run: CutRun, eager: nn.Module) -> None:
        """Plain SGD, the same pieces step after step."""
        for step in range(STEPS):
            flat = flatten(self.inputs(FIRST_SEED + step))
            self.eager_step(eager, flat, seed=step)
            self.captured_step(run, flat, seed=step)
            descend(eager)
            descend(run.model)
            run.hand_out()
        self.compare(f"after {STEPS} steps, {way}", weights(run.model), weights(eager))

    def evaluation(self, way: str, run: CutRun, eager: nn.Module) -> None:
        """Check evaluation mode and back: equal, or refused loudly."""
        if self.row.eval == "refused":
            return
        self.row.eval = "WRONG"
        flat = flatten(self.inputs(FIRST_SEED))
        for training in (False, True):
            try:
                for piece in run.pieces:
                    piece.train(training)
            except PlanMismatch:
                self.row.eval = "refused"
                for piece in run.pieces:
                    piece.train(True)
                return
            eager.train(training)
            expected = self.eager_step(eager, flat, seed=7, differentiate=False)
            found = self.captured_step(run, flat, seed=7, differentiate=False)
            mode = "training again" if training else "evaluation"
            self.compare(f"in {mode}, {way}", found, expected)
        self.row.eval = "equal"

    def profile(self) -> None:
        """Measure the model: one that is equal but cannot be measured could not be planned."""
        options = ProfilingOptions(budget_s=MEASURING_S, num_threads=1)
        found = profile(self.fresh(), self.sample, options=options)
        names = [entry.layer.name for entry in found.layers]
        if names != [layer.name for layer in self.captured.graph.layers]:
            raise Wrong(f"measured, its layers are {', '.join(names)}")

    def compare(self, when: str, found: Behaviour, expected: Behaviour) -> None:
        """Note in the row what of each kind is off most.

        Raises:
            Wrong: One of them is beyond rounding.
        """
        off = differences(found, expected)
        wrong = []
        for kind in ("output", "gradient", "buffer", "parameter"):
            those = {what: by for what, by in off.items() if what.startswith(kind)}
            if those:
                worst = max(those, key=lambda what: those[what])
                self.row.note(kind, those[worst])
                if not those[worst] <= TOLERANCE:
                    wrong.append(f"{worst} by {those[worst]:.2g}")
        if wrong:
            raise Wrong(f"{when}, off are {', '.join(wrong)}")


class CutRun:
    """Pieces one after the other, nothing but copies of tensors between them, as machines would.

    Args:
        captured: The traced model.
        spans: First layer and one past the last of each piece.
        model: Whose gradients, buffers and parameters the run's are.
    """

    def __init__(self, captured: Any, spans: Sequence[tuple[int, int]], model: nn.Module) -> None:
        self.captured, self.model = captured, model
        self.pieces = [captured.segment(first, last) for first, last in spans]
        self.crossing = [captured.graph.boundaries[last - 1].tensors for _, last in spans[:-1]]
        self.links: list[list[tuple[Tensor, Tensor]]] = []

    def __call__(self, flat: list[Tensor]) -> Any:
        values: list[Any] = list(flat)
        self.links = []
        for piece, crossing in zip(self.pieces, [None, *self.crossing], strict=True):
            if crossing is not None:
                values = self._send(values, [tensor.requires_grad for tensor in crossing])
            values = list(piece(*values))
        return self.captured.unflatten_output(values)

    def _send(self, values: list[Tensor], differentiable: list[bool]) -> list[Tensor]:
        received = [
            value.detach().clone().requires_grad_(wanted and torch.is_grad_enabled())
            for value, wanted in zip(values, differentiable, strict=True)
        ]
        self.links.append(list(zip(values, received, strict=True)))
        return [tensor.clone() for tensor in received]

    def hand_back(self) -> None:
        """Gradients from each piece to the one before it, the last one's outputs being done."""
        for link in reversed(self.links):
            pairs = [
                (sent, received.grad)
                for sent, received in link
                if sent.requires_grad and received.grad is not None
            ]
            if pairs:
                torch.autograd.backward([s for s, _ in pairs], [gradient for _, gradient in pairs])

    def hand_out(self) -> None:
        """Let the pieces know the model's parameters after a step; here they are its own."""


class Isolated(CutRun):
    """Pieces that are deep copies of their own modules alone, as in processes of their own.

    What reaches beyond a piece by an unregistered reference reaches a copy, and shows. The model
    here is another copy, which only collects: sums of the pieces' gradients, and their buffers.
    """

    def __init__(
        self,
        captured: Any,
        spans: Sequence[tuple[int, int]],
        model: nn.Module,
        again: Callable[[], Any],
    ) -> None:
        super().__init__(captured, spans, model)
        self.pieces = [
            _copied(piece) or again().segment(*span)
            for piece, span in zip(self.pieces, spans, strict=True)
        ]

    def __call__(self, flat: list[Tensor]) -> Any:
        for piece in self.pieces:
            piece.zero_grad(set_to_none=True)
        output = super().__call__(flat)
        held = {n: b.clone() for n, b in self.model.named_buffers(remove_duplicate=False)}
        for piece in self.pieces:
            for name, buffer in piece.named_buffers(remove_duplicate=False):
                if name in held and not torch.equal(buffer, held[name]):
                    owner, _, own = name.rpartition(".")
                    self.model.get_submodule(owner)._buffers[own] = buffer.detach().clone()
        return output

    def hand_back(self) -> None:
        super().hand_back()
        mine = dict(self.model.named_parameters(remove_duplicate=False))
        for piece in self.pieces:
            for name, parameter in piece.named_parameters():
                if name in mine and parameter.grad is not None:
                    total, more = mine[name].grad, parameter.grad
                    mine[name].grad = more.clone() if total is None else total + more

    def hand_out(self) -> None:
        mine = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for piece in self.pieces:
                for name, parameter in piece.named_parameters():
                    if name in mine:
                        parameter.copy_(mine[name])


def _copied(piece: nn.Module) -> nn.Module | None:
    """Return a deep copy; `None` if the piece must be of a model of its own, as in a process."""
    if getattr(piece, "_references", ()):  # references in closures are not copied
        return None
    if any(isinstance(module, torch.jit.ScriptModule) for module in piece.modules()):
        return None  # the parameters of its copy would be no leaves, and get no gradients
    try:
        return copy_module(piece)
    except RuntimeError:  # weights that a hook computes are no leaves
        return None


def descend(model: nn.Module) -> None:
    """One step along the normalised gradient, so that no model runs away."""
    gradients = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(LEARNING_RATE * parameter.grad / (norm + 1e-6))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [""])[0]
