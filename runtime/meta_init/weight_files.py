"""Tensors of a checkpoint by name, read one by one."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.errors import InvalidInput, first_line
from ..checkpoint_files.manifest import RECORD, Checkpoint, model_key
from ..checkpoint_files.rank_agreement import Ranks
from ..checkpoint_files.safe_reader import read_tensors
from ..checkpoint_files.step_folder import find
from .tensor_slots import ModelTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""How Hugging Face names what it saves in a folder, in several files and in one."""

STATE_DICTS = (".pt", ".pth", ".bin")


class WeightSource(Protocol):
    """Where tensors are read from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor there is, by name."""

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        """Read tensors into memory that is there; values are converted to its dtype."""


def open_weight_source(path: str | Path) -> WeightSource:
    """A checkpoint of any of the forms in `Weights`.

    Raises:
        InvalidInput: There is none, or it is damaged.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    if path.suffix in STATE_DICTS:
        return _StateDict(path)
    if not path.is_dir():
        raise InvalidInput(
            f"{path} is no checkpoint; give a folder of save_checkpoint, a .safetensors file or a "
            f"state_dict in a {', '.join(STATE_DICTS)} file"
        )
    if (path / INDEX).exists():
        return _Safetensors(_indexed_files(path / INDEX))
    if (path / SINGLE).exists() and not (path / RECORD).exists():
        return _Safetensors([path / SINGLE])
    return _Saved(*find(path))


class _Saved:
    """A step of `save_checkpoint`."""

    def __init__(self, path: Path, record: Checkpoint) -> None:
        self._path = path
        self._names = {name: name for name in record.model} | record.aliases
        self.shapes = {
            name: tuple(record.model[saved].shape) for name, saved in self._names.items()
        }

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        room = {model_key(self._names[name]): tensor for name, tensor in wanted.items()}
        read_tensors(self._path, room, Ranks(alone=True))


class _Safetensors:
    """Files that say where each tensor is, so that no other is touched."""

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
    """A ``state_dict`` mapped into memory, of which the disk is asked for what is read."""

    def __init__(self, path: Path) -> None:
        try:
            held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise InvalidInput(f"cannot read {path}: {first_line(error)}") from error
        if isinstance(held, dict) and isinstance(held.get("model"), dict):
            held = held["model"]  # what ``stagewright checkpoint convert --with-optimizer`` writes
        if not isinstance(held, dict) or not all(isinstance(v, Tensor) for v in held.values()):
            raise InvalidInput(
                f"{path} is no state_dict; save the model's alone: "
                "torch.save(model.state_dict(), path)"
            )
        self._held: dict[str, Tensor] = held
        self.shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        for name, tensor in wanted.items():
            tensor.copy_(self._held[name])


def _indexed_files(index: Path) -> list[Path]:
    """The files of an index."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{index} is no index of safetensors: {error}") from error
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
"""Names listed of each kind of mismatch."""


class WeightReader:
    """Which of a model's tensors a checkpoint has, found out before anything is read.

    Args:
        path: See `Weights`.
        slots: All of the model's.
        strict: See `Weights`.

    Raises:
        InvalidInput: There is no checkpoint, or it does not fit the model.
    """

    def __init__(self, path: str | Path, slots: Sequence[ModelTensor], *, strict: bool) -> None:
        self._source = open_weight_source(path)
        self._names = {slot.name: _name_in(self._source, slot) for slot in slots}
        _check(str(path), self._source, slots, self._names, strict=strict)

    def has(self, slot: ModelTensor) -> bool:
        """Whether the checkpoint has values for it."""
        return self._names[slot.name] is not None

    def fill(self, slots: Iterable[ModelTensor]) -> None:
        """Read the values of some, which have memory at their homes; the others' are not read."""
        wanted: dict[str, Tensor] = {}
        for slot in slots:
            name = self._names[slot.name]
            if name is not None:
                wanted[name] = slot.home.get().detach()
        with torch.no_grad():
            self._source.fill(wanted)


def _name_in(source: WeightSource, slot: ModelTensor) -> str | None:
    """Under which of its names a tensor was saved."""
    return next((name for name in slot.names if name in source.shapes), None)


def _check(
    path: str,
    source: WeightSource,
    slots: Sequence[ModelTensor],
    names: dict[str, str | None],
    *,
    strict: bool,
) -> None:
    wrong = [
        f"{slot.name} is {list(slot.tensor.shape)} in the model, {list(source.shapes[name])} there"
        for slot in slots
        if (name := names[slot.name]) is not None
        and source.shapes[name] != tuple(slot.tensor.shape)
    ]
    missing = [slot.name for slot in slots if slot.is_persistent and names[slot.name] is None]
    known = {name for slot in slots for name in slot.names}
    unused = [name for name in source.shapes if name not in known]
    lines = [f"{_listed(wrong)}"] if wrong else []
    if missing and strict:
        lines.append(f"it lacks {_listed(missing)}")
    if unused and strict:
        lines.append(f"the model has no {_listed(unused)}")
    if lines:
        way_out = "" if wrong else "; pass Weights(strict=False) to initialise what is missing"
        raise InvalidInput(f"{path} does not fit the model: {'; '.join(lines)}{way_out}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
