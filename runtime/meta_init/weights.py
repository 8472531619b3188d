"""Options for the values of a model on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

Init = Callable[[nn.Module], object]
"""Sets the parameters and buffers of one module, as ``nn.Module.apply`` calls it."""


@dataclass(frozen=True)
class Weights:
    """Source of the values of a model on the meta device: a checkpoint, an initialiser, or both.

    Attributes:
        checkpoint: A folder of `save_checkpoint`, or one step's in it; a ``.safetensors`` file, or
            a folder with ``model.safetensors`` or ``model.safetensors.index.json``; or a
            ``state_dict`` written by ``torch.save`` (``.pt``, ``.pth``, ``.bin``). Each rank reads
            only its own part. `None` to initialise everything.
        init: Called as by ``model.apply(init)``, children before parents, for every module that
            contains a tensor of this rank; `None` for each module's ``reset_parameters``. With a
            checkpoint it serves only what the checkpoint lacks: non-persistent buffers and, unless
            ``strict``, missing names.
        seed: Seed of random initialisation. Values depend on the seed, the parameter's name and
            the kind of device, and not on the plan, the rank or the order of modules.
        strict: Whether the checkpoint must contain every name of the model and no other.
    """

    checkpoint: str | Path | None = None
    init: Init | None = None
    seed: int = 0
    strict: bool = True
