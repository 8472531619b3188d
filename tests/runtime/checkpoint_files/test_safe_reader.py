"""A checkpoint is data: whatever else lies in its files is refused, and not run."""

import os
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from stagewright.core.errors import InvalidInput
from stagewright.runtime.checkpoint.load import load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint
from stagewright.runtime.checkpoint_files.checksums import SUMS
from stagewright.runtime.checkpoint_files.manifest import Checkpoint


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def rewritten(path, change):
    """Put other bytes in place of the index, of the size the record knows, without checksums."""
    index = path / ".metadata"
    data = change(pickle.loads(index.read_bytes()))
    index.write_bytes(data)
    record = Checkpoint.read(path / "checkpoint.json")
    files = record.files | {".metadata": len(data)}
    record.model_copy(update={"files": files}).write(path / "checkpoint.json")
    without_sums(path)


def without_sums(path):
    """Make a step one that was saved before there were checksums."""
    record = Checkpoint.read(path / "checkpoint.json")
    files = {name: size for name, size in record.files.items() if name != SUMS}
    record.model_copy(update={"files": files}).write(path / "checkpoint.json")
    (path / SUMS).unlink()


@pytest.fixture
def saved(tmp_path):
    return save_checkpoint(tmp_path / "run", nn.Linear(2, 2), step=1)


def test_a_pickle_that_runs_something_does_not(saved, tmp_path):
    rewritten(saved, lambda _: pickle.dumps(Command(tmp_path / "ran")))
    with pytest.raises(InvalidInput, match=r"refers to (posix|nt).system, .* was run"):
        load_checkpoint(saved, nn.Linear(2, 2))
    assert not (tmp_path / "ran").exists()
    pickle.loads((saved / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()  # it would have


@pytest.mark.parametrize("name", ["load", "hub.load", "storage._load_from_bytes", "save"])
def test_of_torch_only_types_of_numbers_are_found(saved, name):
    module, _, function = f"torch.{name}".rpartition(".")
    code = f"c{module}\n{function}\n(S'x'\ntR.".encode()
    rewritten(saved, lambda _: code)
    with pytest.raises(InvalidInput, match=f"refers to torch.{name}, "):
        load_checkpoint(saved, nn.Linear(2, 2))


def test_members_of_enumerations_may_be_written_as_attributes(saved, monkeypatch):
    """Python 3.11.2, which Debian 12 has, could not read the checkpoints that it had written."""

    def reduce(self, protocol):
        return getattr, (type(self), self.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    rewritten(saved, pickle.dumps)
    assert b"getattr" in (saved / ".metadata").read_bytes()
    load_checkpoint(saved, nn.Linear(2, 2))


def test_no_other_attribute_is_found(saved):
    code = f"cbuiltins\ngetattr\n(c{Metadata.__module__}\nMetadata\nS'__init__'\ntR.".encode()
    rewritten(saved, lambda _: code)
    with pytest.raises(InvalidInput, match=r"refers to __init__ of .*Metadata.*was run"):
        load_checkpoint(saved, nn.Linear(2, 2))


def outside(index):
    for place in index.storage_data.values():
        place.relative_path = "../secret"
    return index


def transformed(index):
    for place in index.storage_data.values():
        place.transform_descriptors = ("zstd",)
    return index


def with_bytes(index):
    index.state_dict_metadata["extra"] = BytesStorageMetadata()
    return index


def without_places(index):
    return Metadata(index.state_dict_metadata, storage_meta=index.storage_meta)


@pytest.mark.parametrize(
    "change", [outside, transformed, without_places, lambda _: torch.Size([1])]
)
def test_an_index_of_something_else_is_refused(saved, change):
    rewritten(saved, lambda index: pickle.dumps(change(index)))
    with pytest.raises(
        InvalidInput, match="is not the index of tensors that save_checkpoint writes"
    ):
        load_checkpoint(saved, nn.Linear(2, 2))


def test_stored_objects_are_refused(saved):
    """Torch reads them as pickles."""
    rewritten(saved, lambda index: pickle.dumps(with_bytes(index)))
    with pytest.raises(InvalidInput, match=r"refers to torch.*BytesStorageMetadata"):
        load_checkpoint(saved, nn.Linear(2, 2))


@pytest.mark.parametrize("data", [b"", b"not a pickle", pickle.dumps(list(range(9)))[:-3]])
def test_a_broken_index_is_damage(saved, data):
    rewritten(saved, lambda _: data)
    with pytest.raises(InvalidInput, match="is damaged"):
        load_checkpoint(saved, nn.Linear(2, 2))


def test_broken_tensors_are_damage(saved):
    without_sums(saved)
    data = next(saved.glob("*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(InvalidInput, match="cannot read step-000001: rank 0: "):
        load_checkpoint(saved, nn.Linear(2, 2))
