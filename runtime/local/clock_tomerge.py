"""GPipe's order of work."""

from __future__ import annotations

from collections.abc import Iterator


def clock_order(num_microbatches: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    """What runs at each clock: stage ``s`` works on micro-batch ``clock - s``.

    Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3.

    Yields:
        Pairs of micro-batch and stage, stages ascending. No two of a clock depend on each other.
    """
    for clock in range(num_microbatches + num_stages - 1):
        yield [
            (clock - stage, stage)
            for stage in range(num_stages)
            if 0 <= clock - stage < num_microbatches
        ]
