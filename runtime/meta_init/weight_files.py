"""Readers of weights by name: training checkpoints, safetensors files and state dicts."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidInput, first_line
from ...core.units import list_some
from ..checkpoint_files.manifest import RECORD, Checkpoint, model_key
from ..checkpoint_files.rank_agreement import RankAgreement
from ..checkpoint_files.safe_reader import read_tensors
from ..checkpoint_files.step_folder import find_step
from .tensor_slots import ModelTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""File names in folders saved by Hugging Face: the index of several files, and a single file."""

STATE_DICTS = (".pt", ".pth", ".bin")


def open_weight_source(path: str | Path) -> WeightSource:
    """Open a checkpoint of any of the formats listed in `Weights`."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    if path.suffix in STATE_DICTS:
        return _StateDict(path)
    if not path.is_dir():
        raise InvalidInput(
            f"{path} is not a checkpoint; pass a folder of save_checkpoint, a .safetensors file or "
            f"a state_dict in a {', '.join(STATE_DICTS)} file"
        )
    if (path / INDEX).exists():
        return _Safetensors(_indexed_files(path / INDEX))
    if (path / SINGLE).exists() and not (path / RECORD).exists():
        return _Safetensors([path / SINGLE])
    return _SavedStep(*find_step(path))


class _SavedStep:
    """Reader of a step saved by `save_checkpoint`."""

    def __init__(self, path: Path, record: Checkpoint) -> None:
        self._path = path
        self._names = {name: name for name in record.model} | record.aliases
        self.shapes = {
            name: tuple(record.model[saved].shape) for name, saved in self._names.items()
        }

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        room = {model_key(self._names[name]): tensor for name, tensor in wanted.items()}
        read_tensors(self._path, room, RankAgreement(alone=True))


class _Safetensors:
    """Reader of safetensors files, of which only the wanted tensors are read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if importlib.util.find_spec("safetensors") is None:
            raise InvalidInput("safetensors is not installed; run pip install safetensors")
        self._paths: dict[str, Path] = {}
        self._aliases: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    self._paths[name] = path
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
                aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
            for alias, name in aliases.items():
                if self._paths.get(name) == path:
                    self._paths[alias], self.shapes[alias] = path, self.shapes[name]
                    self._aliases[alias] = name

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        by_path: dict[Path, list[str]] = {}
        for name in wanted:
            by_path.setdefault(self._paths[name], []).append(name)
        for path, names in by_path.items():
            with _opened(path) as file:
                for name in names:
                    wanted[name].copy_(file.get_tensor(self._aliases.get(name, name)))


class _StateDict:
    """Reader of a ``state_dict`` mapped into memory, so that only what is used is loaded."""

    def __init__(self, path: Path) -> None:
        try:
            held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise InvalidInput(f"cannot read {path}: {first_line(error)}") from error
        if isinstance(held, dict) and isinstance(held.get("model"), dict):
            held = held["model"]  # what ``stagewright checkpoint convert --with-optimizer`` writes
        if not isinstance(held, dict) or not all(isinstance(v, Tensor) for v in held.values()):
            raise InvalidInput(
                f"{path} is not a state_dict; save the model's alone: "
                "torch.save(model.state_dict(), path)"
            )
        self._held: dict[str, Tensor] = held
        self.shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        for name, tensor in wanted.items():
            tensor.copy_(self._held[name])


WeightSource = _SavedStep | _Safetensors | _StateDict
"""Has the ``shapes`` of tensors by name, and ``fill`` reads some into allocated memory."""


def _indexed_files(index: Path) -> list[Path]:
    """Return the files of an index, which must be in its own folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{index} is not an index of safetensors: {error}") from error
    # An index comes with a download: its names must not lead to other files of this machine.
    paths = [index.parent / name for name in names if Path(name).name == name]
    if len(paths) < len(names):
        raise InvalidInput(f"{index} names files outside its folder")
    return paths


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from error


SHOWN = 5
"""The number of names listed for each kind of mismatch."""


class WeightReader:
    """Reader of a model's tensors from a checkpoint, checked to fit before anything is read."""

    def __init__(self, path: str | Path, tensors: Sequence[ModelTensor], *, strict: bool) -> None:
        self._source = open_weight_source(path)
        shapes = self._source.shapes
        self._names = {
            each.name: next((name for name in each.names if name in shapes), None)
            for each in tensors
        }
        """The name under which each tensor was saved."""
        lines = list(self._find_mismatches(tensors, strict=strict))
        if lines:
            raise InvalidInput(f"{path} does not fit the model: {'; '.join(lines)}")

    def has(self, tensor: ModelTensor) -> bool:
        """Return True if the checkpoint has values for a tensor."""
        return self._names[tensor.name] is not None

    def fill(self, tensors: Iterable[ModelTensor]) -> None:
        """Read the values of the given tensors into the memory at their first slots."""
        wanted: dict[str, Tensor] = {}
        for each in tensors:
            name = self._names[each.name]
            if name is not None:
                wanted[name] = each.home.get().detach()
        with torch.no_grad():
            self._source.fill(wanted)

    def _find_mismatches(self, tensors: Sequence[ModelTensor], *, strict: bool) -> Iterator[str]:
        shapes, names = self._source.shapes, self._names
        wrong = [
            f"{each.name} is {list(each.tensor.shape)} in the model, {list(shapes[name])} there"
            for each in tensors
            if (name := names[each.name]) is not None and shapes[name] != tuple(each.tensor.shape)
        ]
        missing = [each.name for each in tensors if each.is_persistent and names[each.name] is None]
        known = {name for each in tensors for name in each.names}
        unused = [name for name in shapes if name not in known]
        if wrong:
            yield list_some(wrong, SHOWN)
        if missing and strict:
            yield f"it lacks {list_some(missing, SHOWN)}"
        if unused and strict:
            yield f"the model has no {list_some(unused, SHOWN)}"
        if strict and not wrong and (missing or unused):
            yield "pass Weights(strict=False) to initialise what is missing"
