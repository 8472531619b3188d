"""Tensors of a checkpoint by name, read one by one."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
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

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""How Hugging Face names what it saves in a folder, in several files and in one."""

STATE_DICTS = (".pt", ".pth", ".bin")


class Source(Protocol):
    """Where tensors are read from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor there is, by name."""

    def fill(self, wanted: Mapping[str, Tensor]) -> None:
        """Read tensors into memory that is there; values are converted to its dtype."""


def open_source(path: str | Path) -> Source:
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
        return _Safetensors(_listed(path / INDEX))
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


def _listed(index: Path) -> list[Path]:
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
