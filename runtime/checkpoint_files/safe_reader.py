"""Reading what torch wrote, and running nothing it did not write.

Torch's index of a checkpoint (``.metadata``) is a pickle, and reading a pickle runs what it names.
Only the names that such an index needs are found here; the tensors themselves torch reads with
``weights_only=True``.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Mapping
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
from .checksums import check_sums, summed
from .manifest import RECORD
from .rank_agreement import Ranks, plain_errors, quiet

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
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}  # fmt: skip
"""What an index of tensors is made of, and what each name stands for here."""


def read_tensors(path: Path, wanted: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Fill tensors with what a step holds under their keys; values are converted to their dtype.

    Files are checked first: by ranks that read together each file once, by one alone those that it
    reads from. What fails afterwards, such as a disk, may leave tensors with mixed values.

    Args:
        path: The step's folder.
        wanted: This rank's, each with its own memory; changed in place.
        ranks: Who reads; all of them call it.

    Raises:
        InvalidInput: A file is damaged, or is not what `save_checkpoint` writes.
    """
    ranks.each(lambda: _check_files(path, wanted, ranks))
    with plain_errors(f"cannot read {path.name}"), quiet():
        load(
            dict(wanted),
            storage_reader=TensorReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group,
            no_dist=not ranks.together,
        )


def _check_files(path: Path, wanted: Mapping[str, Tensor], ranks: Ranks) -> None:
    if ranks.together:
        check_sums(path, summed(path)[ranks.rank :: ranks.size])
        return
    check_sums(path, (RECORD, INDEX))
    index = TensorReader(path).read_metadata()
    places = index.storage_data.items()
    check_sums(path, sorted({place.relative_path for at, place in places if at.fqn in wanted}))


class TensorReader(FileSystemReader):
    """Torch's reader, for checkpoints of tensors alone and with a pickle that is not trusted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index of the step.

        Raises:
            InvalidInput: It names something else than tensors in files beside it.
        """
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
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise InvalidInput(
            f"the checkpoint's index names {module}.{name}, which no checkpoint of tensors does; "
            "it was not written by save_checkpoint, and nothing of it was run"
        )


def _check_index(path: Path, index: Any) -> None:
    sound = (
        isinstance(index, Metadata)
        and isinstance(index.storage_meta, metadata.StorageMeta)
        and isinstance(index.state_dict_metadata, dict)
        and isinstance(index.storage_data, dict)
        and all(isinstance(t, TensorStorageMetadata) for t in index.state_dict_metadata.values())
        and all(_is_beside(place) for place in index.storage_data.values())
    )
    if not sound:
        raise InvalidInput(f"{path} is not the index of tensors that save_checkpoint writes")


def _is_beside(place: Any) -> bool:
    """Whether a tensor lies in a file of the same folder, as it is."""
    if not isinstance(place, _StorageInfo) or not isinstance(place.relative_path, str):
        return False
    return Path(place.relative_path).name == place.relative_path and not place.transform_descriptors
