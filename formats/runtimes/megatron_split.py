"""Megatron's own split without a layout, computed from the settings of its scripts."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.errors import InvalidInput

COUNTED = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def split_by_settings(settings: Mapping[str, int], ranks: int, num_blocks: int) -> list[int]:
    """Return the blocks of each stage, in model order, that megatron-core builds without a layout.

    The rules of get_num_layers_to_build of megatron-core 0.16.1: equal numbers for every rank and
    chunk, but for the first and last ranks where they are given, or with the embedding and the
    loss counted as a block each.

    Raises:
        InvalidInput: The numbers do not divide, where Megatron stops.
    """
    num_layers = settings.get("num-layers", num_blocks)
    chunks = count_chunks(settings, num_layers // ranks) if ranks > 1 else 1
    first = settings.get("decoder-first-pipeline-num-layers")
    last = settings.get("decoder-last-pipeline-num-layers")
    counted = [settings.get(name, 0) for name in COUNTED]
    given = [number for number in (first, last) if number is not None]
    if given and any(counted):
        raise InvalidInput(f"Megatron takes --{COUNTED[0]} and the like without first and last")
    left = ranks - len(given)
    shared = num_layers + sum(counted) - sum(given)
    # Without ranks between the first and last Megatron does not compare with the model's blocks.
    if left > 0 and (shared < 0 or shared % left):
        raise InvalidInput(
            f"{shared} blocks are no multiple of {left} ranks, which Megatron refuses; give "
            "--decoder-first-pipeline-num-layers or --pipeline-model-parallel-layout"
        )
    of_rank = [shared // left if left > 0 else 0] * ranks
    if first is not None:
        of_rank[0] = first
    if last is not None:
        of_rank[-1] = last
    uneven = next((number for number in of_rank if number % chunks), None)
    if uneven is not None:
        raise InvalidInput(f"{uneven} blocks of a rank are no multiple of its {chunks} stages")
    counts = [number // chunks for _ in range(chunks) for number in of_rank]
    counts[0] -= counted[0]
    counts[-1] -= counted[1]
    if min(counts) < 0:
        raise InvalidInput(f"{num_layers} blocks are too few for {len(counts)} stages")
    return counts


def count_chunks(settings: Mapping[str, int], layers_of_rank: int) -> int:
    """Return the virtual stages of a rank."""
    if (given := settings.get("virtual-pipeline-model-parallel-size")) is not None:
        return max(1, given)
    share = settings.get("num-layers-per-virtual-pipeline-stage")
    return max(1, layers_of_rank // share) if share else 1
