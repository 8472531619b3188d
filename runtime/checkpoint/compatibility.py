"""Compatibility check of a checkpoint with a model, over all ranks, before any change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from ...core.errors import InvalidInput
from ...core.units import list_some
from ..checkpoint_files.manifest import Checkpoint
from ..checkpoint_files.tensors import is_same_kind, torch_dtype
from .target import CheckpointTarget

MAX_NAMES = 8
"""Most names listed per kind of mismatch."""


@dataclass(frozen=True)
class TensorMatch:
    """Correspondence of this rank's tensors to those of a checkpoint.

    Attributes:
        names: Saved name of each tensor, by its key on this rank.
        missing: Keys of tensors that were not saved.
        wrong: Descriptions of tensors with another shape or dtype.
        without_state: Parameters in this optimizer but not in the saved one.
        with_state: Names of parameters in both optimizers.
    """

    names: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    without_state: list[str] = field(default_factory=list)
    with_state: list[str] = field(default_factory=list)


def match_tensors(
    target: CheckpointTarget, optimizer: Optimizer | None, record: Checkpoint
) -> TensorMatch:
    """Find this rank's tensors in a checkpoint."""
    found = TensorMatch()
    for key, tensor in target.tensors.items():
        names = record.names_for(target.names[key])
        if not names:
            found.missing.append(key)
        elif problem := _problem(key, target.in_whole(tensor), names, record):
            found.wrong.append(problem)
        else:
            found.names[key] = names[0]
    if optimizer is not None and record.optimizer is not None:
        canonical = target.canonical_names()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                key = canonical.get(id(parameter), "")
                if not key:
                    found.wrong.append(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that "
                        "the model does not have"
                    )
                elif found.names.get(key) in record.optimizer.parameters:
                    found.with_state.append(found.names[key])
                elif key not in found.missing:
                    # Only if its value was saved; a parameter missing altogether is reported once.
                    found.without_state.append(key)
    return found


def compare(
    record: Checkpoint, matches: Sequence[TensorMatch], *, with_optimizer: bool, strict: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Merge the matches of all ranks; raise `InvalidInput` if model and checkpoint do not match.

    Returns:
        The names missing from the checkpoint, prefixed with ``optim.`` if only the optimizer's
        state is missing, and those in it that no rank uses, prefixed in the same way.
    """
    wrong = _ordered(line for found in matches for line in found.wrong)
    used = {name for found in matches for name in found.names.values()}
    missing = _ordered(name for found in matches for name in found.missing)
    stateless = _ordered(name for found in matches for name in found.without_state)
    unused = [name for name in record.model if name not in used]
    stale: list[str] = []
    if with_optimizer and record.optimizer is not None:
        given = {name for found in matches for name in found.with_state}
        # Parameters that the model lacks are among `unused` already.
        stale = [name for name in record.optimizer.parameters if name not in given | set(unused)]
    complaints = {
        "fits no tensor here": wrong,
        "not in the checkpoint": missing if strict else [],
        "not in the model": unused if strict else [],
        "in the optimizer, but not in the one that was saved": stateless if strict else [],
        "in the optimizer that was saved, but not in this one": stale if strict else [],
    }
    lines = [
        f"{what}: {list_some(names, MAX_NAMES)}" for what, names in complaints.items() if names
    ]
    if lines:
        way_out = "load it into the model it was saved from" + (
            "" if wrong else ", or pass strict=False to load what both have"
        )
        raise InvalidInput(f"step {record.step} does not fit: " + "; ".join([*lines, way_out]))
    return (
        (*missing, *(f"optim.{name}" for name in stateless)),
        (*unused, *(f"optim.{name}" for name in stale)),
    )


def _problem(key: str, tensor: Tensor, names: Sequence[str], record: Checkpoint) -> str | None:
    """Describe why a tensor cannot hold the value saved under its names, if so."""
    if len(names) > 1:
        return f"{' and '.join(names)} are one tensor in the model and several in the checkpoint"
    saved = record.model[names[0]]
    if saved.shape != tuple(tensor.shape):
        return f"{key} is {list(tensor.shape)} in the model, {list(saved.shape)} in the checkpoint"
    if not is_same_kind(torch_dtype(saved), tensor.dtype):
        ours = str(tensor.dtype).removeprefix("torch.")
        return f"{key} is {ours} in the model, {saved.dtype} in the checkpoint"
    return None


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
