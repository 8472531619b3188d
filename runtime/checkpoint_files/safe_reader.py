"""Safe reading of torch's distributed checkpoints, without executing code from them.

Torch's index of a checkpoint (``.metadata``) is a pickle, and unpickling can call any function it
names. Here only the names that an index needs can be resolved; the tensors themselves are read by
torch with ``weights_only=True``.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ...core.errors import InvalidInput
from .checksums import check_sums, list_summed_files
from .manifest import RECORD
from .rank_agreement import RankAgreement, silence_warnings, simplify_errors

INDEX = ".metadata"

ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    },
    **{
        (module, name): getattr(pathlib, name)
        # Python 3.13 defines the classes in the second module, and pickles record that.
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}  # fmt: skip
"""Names that an index of tensors may contain, and the objects they resolve to."""


def read_tensors(path: Path, wanted: Mapping[str, Tensor], ranks: RankAgreement) -> None:
    """Read the values saved under the tensors' keys into them, converted to their dtype.

    Checksums are verified first: several ranks share all files among them, a single process
    verifies those it reads. A disk error after that may leave tensors partly read.

    ``wanted`` are this rank's tensors, each with its own memory; they are changed in place.
    """
    ranks.each(lambda: _check_files(path, wanted, ranks))
    with simplify_errors(f"cannot read {path.name}"), silence_warnings():
        load(
            dict(wanted),
            storage_reader=TensorReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group,
            no_dist=not ranks.together,
        )


def _check_files(path: Path, wanted: Mapping[str, Tensor], ranks: RankAgreement) -> None:
    if ranks.together:
        check_sums(path, list_summed_files(path)[ranks.rank :: ranks.size])
        return
    check_sums(path, (RECORD, INDEX))
    index = TensorReader(path).read_metadata()
    places = index.storage_data.items()
    check_sums(path, sorted({place.relative_path for at, place in places if at.fqn in wanted}))


class TensorReader(FileSystemReader):
    """Torch's reader, restricted to checkpoints of tensors and with an untrusted index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the step's index; refuse anything but tensors in files of the same folder."""
        path = Path(self.path) / INDEX
        try:
            with open(path, "rb") as file:
                index = _IndexUnpickler(file).load()
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
        except InvalidInput:
            raise
        except Exception as error:  # noqa: BLE001 - a broken pickle raises anything
            raise InvalidInput(f"{path} is damaged: {error}") from None
        _check_index(path, index)
        index.storage_meta.load_id = self.load_id
        return index  # type: ignore[no-any-return]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise _refused(f"{module}.{name}")


def _member_of(kind: Any, name: Any) -> Enum:
    """Return a member of an enumeration, which Python 3.11.2 pickles as a call of ``getattr``."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise _refused(f"{name} of {kind}")


def _refused(what: str) -> InvalidInput:
    return InvalidInput(
        f"the checkpoint's index refers to {what}, which a checkpoint of tensors never does; it "
        "was not written by save_checkpoint, and none of its code was run"
    )


def _check_index(path: Path, index: Any) -> None:
    sound = (
        isinstance(index, Metadata)
        and isinstance(index.storage_meta, metadata.StorageMeta)
        and isinstance(index.state_dict_metadata, dict)
        and isinstance(index.storage_data, dict)
        and all(isinstance(t, TensorStorageMetadata) for t in index.state_dict_metadata.values())
        and all(_is_in_same_folder(place) for place in index.storage_data.values())
    )
    if not sound:
        raise InvalidInput(f"{path} is not the index of tensors that save_checkpoint writes")


def _is_in_same_folder(place: Any) -> bool:
    """Return True for a tensor stored untransformed in a file of the same folder."""
    if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
        return False
    # A transform names an extension that torch would look up and run.
    return Path(place.relative_path).name == place.relative_path and not place.transform_descriptors
