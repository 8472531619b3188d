"""Whether a captured model does what the model does: the verdict of one row of the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.core.errors import PlanMismatch, StagewrightError

from .architecture import Architecture
from .behaviour import TOLERANCE, Behaviour, call, differences, flatten, observe, seed_all, weights
from .row import Row

LEARNING_RATE = 0.1
STEPS = 2
PERTURBATION = 0.02
"""Added to every parameter: a bias or a scale that starts at zero hides a lost gradient."""

TRACING_SEED, FIRST_SEED = 100, 1


class Wrong(Exception):
    """The captured model silently does something else."""


def judge(architecture: Architecture, trace: Callable[[nn.Module, Any], Any]) -> Row:
    """Capture, compare, and give the verdict; only a crash of the process gets past this."""
    row = Row(architecture.name, architecture.kind, architecture.trap)
    try:
        Trial(architecture, trace, row).run()
    except Wrong as wrong:
        row.verdict, row.reason = "WRONG", str(wrong)
    except StagewrightError as refusal:
        row.verdict, row.reason = "refused", _first_line(refusal)
    except Exception as error:  # noqa: BLE001 - an architecture that fails is a row, not the end
        row.verdict, row.reason = "failed", f"{type(error).__name__}: {_first_line(error)}"
    else:
        row.verdict = "equal, with opaque layers" if row.opaque else "equal"
    return row


class Trial:
    """One architecture, captured, beside fresh copies of it that run eagerly."""

    def __init__(
        self, architecture: Architecture, trace: Callable[[nn.Module, Any], Any], row: Row
    ) -> None:
        self.architecture, self.row = architecture, row
        self.model = self.fresh()
        self.sample = self.inputs(TRACING_SEED)
        start = time.perf_counter()
        self.captured = trace(self.model, self.sample)
        row.capture_s = time.perf_counter() - start
        graph = self.captured.graph
        row.mode, row.layers, row.notes = graph.mode, len(graph.layers), graph.notes
        row.opaque = {layer.name: layer.opaque for layer in graph.layers if layer.opaque}
        row.cuts = len(graph.boundaries)
        row.legal_cuts = sum(boundary.legal for boundary in graph.boundaries)

    def fresh(self) -> nn.Module:
        """The model as built, the same every time, in training mode."""
        seed_all(0)
        model = self.architecture.build().train()
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
        for seed in range(FIRST_SEED, FIRST_SEED + self.architecture.seeds):
            self.one_step(seed)
        self.several_steps()
        self.evaluation()

    def one_step(self, seed: int) -> None:
        """Whole, gradients of inputs included, and cut wherever it may be."""
        flat = flatten(self.inputs(seed))
        for cut in (False, True):
            eager = self.fresh()
            expected = observe(
                eager, lambda x: call(eager, self.sample, x), flat, seed=seed, with_inputs=not cut
            )
            self.restore()
            found = self.captured_step(flat, seed, cut=cut)
            self.compare(f"{'cut' if cut else 'whole'}, inputs {seed}", found, expected)

    def captured_step(self, flat: list[Tensor], seed: int, *, cut: bool) -> Behaviour:
        run = CutRun(self.captured, self.pieces(cut))
        return observe(
            self.model, run, flat, seed=seed, with_inputs=not cut, hand_back=run.hand_back
        )

    def pieces(self, cut: bool) -> list[Any]:
        """First and last layer of each piece: all layers as one, or every legal cut made."""
        boundaries = self.captured.graph.boundaries
        legal = [boundary.after + 1 for boundary in boundaries if boundary.legal and cut]
        return list(pairwise([0, *legal, self.row.layers]))

    def several_steps(self) -> None:
        """Plain SGD on the cut model, step after step, its state kept from one to the next."""
        eager = self.fresh()
        self.restore()
        for step in range(STEPS):
            flat = flatten(self.inputs(FIRST_SEED + step))
            observe(eager, lambda x: call(eager, self.sample, x), flat, seed=step)
            self.captured_step(flat, step, cut=True)
            descend(eager)
            descend(self.model)
        off = self.compare(f"after {STEPS} steps", weights(self.model), weights(eager))
        self.row.trained = max(off.values(), default=0.0)

    def evaluation(self) -> None:
        """Evaluation mode and back: equal, or refused loudly."""
        self.row.eval = "WRONG"
        for cut in (False, True):
            self.restore()
            run = CutRun(self.captured, self.pieces(cut))
            try:
                for piece in run.pieces:
                    piece.eval()
            except PlanMismatch:
                self.row.eval = "refused"
                return
            for training in (False, True):
                self.restore()
                for piece in run.pieces:
                    piece.train(training)
                self.in_mode(run, training)
        self.row.eval = "equal"

    def in_mode(self, run: CutRun, training: bool) -> None:
        eager = self.fresh().train(training)
        flat = flatten(self.inputs(FIRST_SEED))
        expected = observe(
            eager, lambda x: call(eager, self.sample, x), flat, seed=7, differentiate=False
        )
        found = observe(self.model, run, flat, seed=7, differentiate=False)
        mode = "training again" if training else "evaluation"
        self.compare(f"in {mode}", found, expected)

    def restore(self) -> None:
        """The captured model's weights, buffers and plain Python state as they were built."""
        fresh = self.fresh()
        with torch.no_grad():
            for ours, theirs in zip(self.model.parameters(), fresh.parameters(), strict=True):
                ours.copy_(theirs)
            for ours, theirs in zip(self.model.buffers(), fresh.buffers(), strict=True):
                ours.copy_(theirs)
        for ours, theirs in zip(self.model.modules(), fresh.modules(), strict=True):
            restore_plain_state(ours, theirs)

    def compare(self, when: str, found: Behaviour, expected: Behaviour) -> dict[str, float]:
        """Note the differences in the row.

        Raises:
            Wrong: One of them is beyond rounding.
        """
        off = differences(found, expected)
        for column in ("output", "gradient", "buffer"):
            those = [by for what, by in off.items() if what.startswith(column)]
            if those:
                setattr(self.row, f"{column}s", max(getattr(self.row, f"{column}s") or 0, *those))
        worst = max(off, key=lambda what: off[what], default="")
        if worst and not off[worst] <= TOLERANCE:
            raise Wrong(f"{worst} differs by {off[worst]:.2g} ({when})")
        return off


class CutRun:
    """Pieces one after the other, nothing but copies of tensors between them, as machines would.

    Args:
        captured: The traced model.
        spans: First layer and one past the last of each piece.
    """

    def __init__(self, captured: Any, spans: Sequence[tuple[int, int]]) -> None:
        self.captured = captured
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


def descend(model: nn.Module) -> None:
    """One step along the normalised gradient, so that no model runs away."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(LEARNING_RATE * parameter.grad / (norm + 1e-6))


_OWN = set(nn.Module().__dict__)


def restore_plain_state(ours: nn.Module, theirs: nn.Module) -> None:
    """Numbers, texts and tensors that a module keeps as attributes; modules are left alone."""
    for name in set(vars(ours)) | set(vars(theirs)):
        if name in _OWN:
            continue
        if name not in vars(theirs):
            delattr(ours, name)
        elif _is_plain(vars(theirs)[name]):
            setattr(ours, name, vars(theirs)[name])


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return value is None or isinstance(value, bool | int | float | str | Tensor)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [""])[0]
