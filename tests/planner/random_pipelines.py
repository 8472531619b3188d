"""Random pipelines of every schedule."""

import random

from stagewright.planner.simulator.simulate import StageTimes
from stagewright.schedules.action_order import default_depths
from stagewright.schedules.traits import FOLDED, IN_ROUNDS

ANY_REPLICAS = ("gpipe", "1f1b", "forward_only")
SEVERAL_STAGES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
NAMES = (*ANY_REPLICAS, *SEVERAL_STAGES, "zero_bubble")


def random_pipeline(seed, names=NAMES):
    """The arguments of `step_time`."""
    draw = random.Random(seed)
    name = draw.choice(names)
    chunks = draw.choice([1, 2, 3]) if name in SEVERAL_STAGES else 1
    chunks = 2 if name in FOLDED else chunks
    positions = draw.randrange(1, 5 if chunks == 1 else 4)
    replicas = [draw.choice([1, 1, 2])] * positions * chunks
    if name in ANY_REPLICAS:
        replicas = [draw.choice([1, 1, 2, 3]) for _ in range(positions)]
    num_microbatches = draw.randrange(1, 10)
    if name in IN_ROUNDS:
        num_microbatches = positions * replicas[0] * draw.randrange(1, 4)
    depths = random_depths(draw, num_microbatches, replicas) if name == "1f1b" else ()
    return name, random_times(draw, len(replicas)), num_microbatches, replicas, depths, chunks


def random_depths(draw, num_microbatches, replicas):
    """Empty, or the schedule's own with more and more forwards towards the front."""
    if draw.random() < 0.5:
        return ()
    extra, depths = 0, []
    for depth in reversed(default_depths(num_microbatches, replicas)):
        extra += draw.choice([0, 0, 1]) * max(replicas)
        depths.append(depth + extra)
    return depths[::-1]


def random_times(draw, stages):
    """Durations below 1 (backwards 2, sums 5); kinds that may be left out sometimes are."""

    def some(count, most=1.0):
        return [draw.random() * most for _ in range(count)]

    return StageTimes(
        some(stages),
        some(stages, 2),
        draw.choice([[], some(stages - 1)]),
        draw.choice([[], some(stages - 1)]),
        tied_sync_s=draw.choice([0.0, draw.random()]),
        sync_s=draw.choice([[], some(stages, 5)]),
        **draw.choice([{}, {"backward_input_s": some(stages), "backward_weight_s": some(stages)}]),
    )
