"""Parts of tensors in checkpoints: each element once, wherever it is."""

import itertools

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stagewright.runtime.checkpoint_files.divided_tensor import DividedTensor
from stagewright.runtime.checkpoint_files.rank_agreement import silence_warnings
from tests.runtime.tensor_parallel.pieces import cut_by_hand

SHAPES = [((12, 5), 0, ()), ((5, 12), 1, ()), ((12, 3), 0, (4, 8)), ((3, 12), 1, (4, 4, 4))]


@pytest.mark.parametrize(("shape", "dim", "parts"), SHAPES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_blocks_of_all_ranks_fill_the_whole(shape, dim, parts, degree):
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    filled = torch.full(shape, -1)
    for shard in range(degree):
        local = cut_by_hand(whole, dim, parts, shard, degree)
        part = DividedTensor(local, dim, parts, shard, degree, shape)
        assert part.shape == whole.shape
        for chunk in part.__create_chunk_list__():
            block = part.__get_tensor_shard__(MetadataIndex("x", chunk.offsets))
            place = tuple(
                slice(begin, begin + size)
                for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            assert (filled[place] == -1).all()
            filled[place] = block
    assert torch.equal(filled, whole)


@pytest.mark.parametrize(("shape", "dim", "parts"), SHAPES)
def test_a_part_is_read_from_a_checkpoint_of_the_whole(tmp_path, shape, dim, parts):
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    with silence_warnings():
        save({"x": whole}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    for degree, shard in itertools.product((2, 4), (0, 1)):
        wanted = cut_by_hand(whole, dim, parts, shard, degree)
        local = torch.zeros_like(wanted)
        part = DividedTensor(local, dim, parts, shard, degree, shape)
        with silence_warnings():
            load({"x": part}, storage_reader=FileSystemReader(tmp_path), no_dist=True)
        assert torch.equal(local, wanted)


def test_a_part_is_no_tensor_to_compute_with():
    part = DividedTensor(torch.zeros(2, 3), 0, (), 0, 2, (4, 3))
    with pytest.raises(TypeError, match="does not support"):
        torch.add(part, 1)
