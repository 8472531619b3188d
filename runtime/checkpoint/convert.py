"""Conversion of a checkpoint to a single file for other programs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidInput
from ..checkpoint_files.manifest import Checkpoint, SavedOptimizer, model_key, slot_key
from ..checkpoint_files.rank_agreement import RankAgreement
from ..checkpoint_files.safe_reader import read_tensors
from ..checkpoint_files.step_folder import find_step
from ..checkpoint_files.tensors import torch_dtype

SUFFIXES = (".safetensors", ".pt", ".pth")


def convert_checkpoint(
    folder: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    with_optimizer: bool = False,
) -> Checkpoint:
    """Write a step to a single file, atomically.

    ``.pt`` and ``.pth`` hold a plain ``state_dict`` with tied weights under all their names; with
    the optimizer, a dictionary of ``model``, ``optimizer`` (in the form of torch's
    ``get_optimizer_state_dict``), ``step`` and ``extra``. Safetensors files hold each tensor
    once; with the optimizer, under the checkpoint's keys and with all else in the metadata.

    Args:
        folder: The folder given to `save_checkpoint`, or one step's folder in it.
        output: Output file; its suffix determines the format.
        step: Step to convert; the latest if `None`.
        with_optimizer: Include the optimizer's state.

    Returns:
        The step's record.

    Raises:
        InvalidInput: The step or its optimizer does not exist, the suffix is unknown, or
            safetensors is not installed.
    """
    path, target = Path(folder), Path(output)
    _check_output(target)
    path, record = find_step(path, step)
    if with_optimizer and record.optimizer is None:
        raise InvalidInput(f"{path.name} was saved without an optimizer")
    tensors = {
        key: torch.empty(saved.shape, dtype=torch_dtype(saved))
        for key, saved in record.tensors(optimizer=with_optimizer).items()
    }
    # Alone, even where process groups exist: other ranks are not here to join a collective.
    read_tensors(path, tensors, RankAgreement(alone=True))
    # In the same folder, since a rename is atomic only within one file system.
    partial = target.with_name(target.name + ".partial")
    try:
        if target.suffix == ".safetensors":
            _write_safetensors(partial, record, tensors, with_optimizer)
        else:
            torch.save(_build_state_dict(record, tensors, with_optimizer), partial)
        partial.replace(target)
    except (OSError, RuntimeError) as error:  # torch.save says RuntimeError of a full disk
        raise InvalidInput(f"cannot write {target}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return record


def _check_output(target: Path) -> None:
    if target.suffix not in SUFFIXES:
        raise InvalidInput(f"unknown suffix of {target}; use one of {', '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise InvalidInput(f"cannot write {target}: folder {target.parent} does not exist")
    if target.suffix == ".safetensors" and importlib.util.find_spec("safetensors") is None:
        raise InvalidInput(
            "safetensors is not installed; run pip install safetensors, or write "
            f"{target.with_suffix('.pt')}"
        )


def _build_state_dict(
    record: Checkpoint, tensors: dict[str, Tensor], with_optimizer: bool
) -> dict[str, Any]:
    model = {name: tensors[model_key(name)] for name in record.model}
    model |= {alias: model[name] for alias, name in record.aliases.items()}
    if not with_optimizer or record.optimizer is None:
        return model
    return {
        "model": model,
        "optimizer": _build_optimizer_state(record.optimizer, tensors),
        "step": record.step,
        "extra": record.extra,
    }


def _build_optimizer_state(saved: SavedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Build state and groups by parameter name."""
    groups: list[dict[str, Any]] = [{"params": [], **group} for group in saved.groups]
    state: dict[str, Any] = {}
    for name, kept in saved.parameters.items():
        groups[kept.group]["params"].append(name)
        slots = {slot: tensors[slot_key(name, slot)] for slot in kept.slots}
        if slots or kept.values:
            state[name] = kept.values | slots
    return {"state": state, "param_groups": groups}


def _write_safetensors(
    path: Path, record: Checkpoint, tensors: dict[str, Tensor], with_optimizer: bool
) -> None:
    from safetensors.torch import save_file

    metadata = {"format": "pt", "step": str(record.step), "aliases": json.dumps(record.aliases)}
    if with_optimizer:
        metadata["checkpoint"] = record.to_json()
    else:
        # Without the aliases: safetensors refuses tensors that share memory.
        tensors = {name: tensors[model_key(name)] for name in record.model}
    save_file(tensors, path, metadata=metadata)
