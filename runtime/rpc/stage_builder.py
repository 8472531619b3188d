"""A worker builds its own stages: it makes the model, cuts it, and keeps what is its own."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.utils import _pytree as pytree

from ...capture.captured import Captured
from ...capture.observation.nested_values import TensorPosition, insert_tensors
from ...capture.sample import CallStructure
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..partition.cut import CutModel, TiedGroup, cut_for_plan
from .calls import packed
from .stage import StageServer


@dataclass(frozen=True)
class Source:
    """How a worker comes by the model.

    Attributes:
        data: The module with its weights, or a pickled function without arguments that builds it.
        is_module: Which of the two.
        seed: Of the function's random numbers, so that all workers build the same weights.
    """

    data: bytes
    is_module: bool
    seed: int

    @classmethod
    def of(cls, model: Any, seed: int) -> Source:
        """The source of a module, or of a function that builds one.

        Raises:
            InvalidInput: It is neither, or cannot be pickled.
        """
        if isinstance(model, nn.Module):
            return cls(_saved(model), True, seed)
        if not callable(model):
            raise InvalidInput(
                f"the model is a {type(model).__name__}; give a torch.nn.Module, or a function "
                "without arguments that builds it on each worker"
            )
        return cls(packed(model, "the function that builds the model"), False, seed)

    def build(self) -> nn.Module:
        """The model, on a worker.

        Raises:
            InvalidInput: Its code is not there, or the function returns something else.
        """
        try:
            if self.is_module:
                model = torch.load(io.BytesIO(self.data), map_location="cpu", weights_only=False)
            else:
                model = self._built()
        except (AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise InvalidInput(
                f"the model cannot be built here ({type(error).__name__}: {error}); its code has "
                "to be importable by the same name on every worker"
            ) from error
        if not isinstance(model, nn.Module):
            raise InvalidInput(f"the function built a {type(model).__name__}, not a module")
        return model

    def _built(self) -> Any:
        factory = pickle.loads(self.data)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return factory()


def _saved(model: nn.Module) -> bytes:
    stream = io.BytesIO()
    try:
        torch.save(model, stream)
    except Exception as error:
        raise InvalidInput(
            f"the model cannot be sent to the workers ({type(error).__name__}: {error}); give a "
            "function that builds it instead"
        ) from error
    return stream.getvalue()


@dataclass(frozen=True)
class OutputForm:
    """How the model's output is put together from flat values.

    Attributes:
        nested: The output with a `TensorPosition` for every value.
    """

    nested: Any

    @classmethod
    def of(cls, captured: Captured) -> OutputForm:
        """The form of a captured model's output."""
        if captured.program.output is not None:
            return cls(captured.program.output)
        places = [TensorPosition(index) for index in range(len(captured.program.flat_outputs))]
        return cls(pytree.tree_unflatten(places, captured.program.out_spec))

    def unflatten(self, flat: Sequence[Any]) -> Any:
        """The output as the model returns it."""
        return insert_tensors(self.nested, list(flat))


@dataclass(frozen=True)
class Order:
    """What a worker is asked to build.

    Attributes:
        source: The model.
        plan: Where to cut.
        stages: The indices of its stages.
        devices: Where each of these runs; `None` for the CPU.
        sample: See `runtime.cut.cut_for_plan`.
    """

    source: Source
    plan: Plan
    stages: tuple[int, ...]
    devices: tuple[str | None, ...]
    sample: Any


@dataclass(frozen=True)
class Built:
    """A worker's stages, and what the master has to know of the model.

    Attributes:
        stages: References to them, as ordered.
        names: The model's parameters and buffers, in its own order.
        tied: Weights of several stages.
        structure: How the model is called.
        output: A pickled `OutputForm`.
        microbatch_size: Samples that a micro-batch has to have; `None` for any number.
    """

    stages: tuple[rpc.RRef[StageServer], ...]
    names: tuple[str, ...]
    tied: tuple[TiedGroup, ...]
    structure: CallStructure
    output: bytes
    microbatch_size: int | None


def build(order: Order) -> Built:
    """Build a worker's stages, all from one capture, since tracing is not made for threads.

    Raises:
        PlanMismatch: The plan is for another model.
        InvalidInput: The model cannot be built here.
    """
    model = order.source.build()
    pieces = cut_for_plan(model, order.plan, order.sample)
    fixed = pieces.captured.program.mode == "export" and order.plan.inputs
    return Built(
        tuple(
            rpc.RRef(_serve(pieces, index, device))
            for index, device in zip(order.stages, order.devices, strict=True)
        ),
        tuple(model.state_dict()),
        pieces.tied,
        pieces.structure,
        packed(OutputForm.of(pieces.captured), "the form of the model's output"),
        order.plan.inputs[0].shape[0] if fixed else None,
    )


def _serve(pieces: CutModel, index: int, device: str | None) -> StageServer:
    stage = pieces.stages[index]
    held = dict(stage.named_parameters(remove_duplicate=False))
    owned, borrowed = {}, {}
    for number, tied in enumerate(pieces.tied):
        names = tuple(name for name in tied.names if name in held)
        if index == tied.stages[0]:
            owned[number] = names[0]
        elif index in tied.stages:
            borrowed[number] = names
    place = None if device is None else torch.device(device)
    return StageServer(stage, index, place, owned, borrowed)
