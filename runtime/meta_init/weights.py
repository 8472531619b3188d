"""Where the values of a model on the meta device come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

Init = Callable[[nn.Module], object]
"""Sets the parameters and buffers of one module, as ``nn.Module.apply`` calls it."""


@dataclass(frozen=True)
class Weights:
    """Where the values of a model on the meta device come from.

    Attributes:
        checkpoint: A folder of `save_checkpoint`, or one step's in it; a ``.safetensors`` file, or
            a folder with ``model.safetensors`` or ``model.safetensors.index.json``; or a
            ``state_dict`` written by ``torch.save`` (``.pt``, ``.pth``, ``.bin``). Only what this
            rank holds is read. `None` to initialise everything.
        init: Called for every module that holds something here or below, children before parents,
            as ``model.apply(init)`` would; the ``reset_parameters`` of modules that have one if
            `None`. With a checkpoint it is called only for what the checkpoint leaves out:
            non-persistent buffers and, unless ``strict``, missing names.
        seed: Of random initialisation. Numbers follow the seed, the parameter's name and the kind
            of device alone: not the plan, the rank, or the order in which modules are built.
        strict: Whether the checkpoint must hold every name of the model and no other.
    """

    checkpoint: str | Path | None = None
    init: Init | None = None
    seed: int = 0
    strict: bool = True
