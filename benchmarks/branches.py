"""Models with branches, planned in any order: how many sets of layers, how long, what it gains.

    python benchmarks/branches.py --json

For every model: its layers, the sets of layers that may lie in front of a cut and the stages
between them (nothing where they are too many to list), seconds to plan with the given order and
with any, and how much shorter the step is. One device a stage, 1F1B.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tables import markdown_table

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import MODEL_INPUT, Boundary, Edge, Layer, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, SavedStorage, Timing
from stagewright.formats.pipedream_graph import read_pipedream_graph, to_profile
from stagewright.planner.dag.layer_graph import LayerGraph
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate

Pairs = list[tuple[int, int]]


def unet(levels: int) -> tuple[int, Pairs]:
    """Return a U-Net: every level of the encoder is read again by the decoder."""
    count = 2 * levels + 1
    pairs = [(index, index + 1) for index in range(count - 1)]
    return count, pairs + [(level, count - 1 - level) for level in range(levels - 1)]


def inception(modules: int) -> tuple[int, Pairs]:
    """Modules of four branches, one to four layers deep, between a split and a concatenation."""
    pairs, source, count = [], 0, 1
    for _ in range(modules):
        ends = []
        for depth in (1, 2, 3, 2):
            before = source
            for _ in range(depth):
                pairs.append((before, count))
                before, count = count, count + 1
            ends.append(before)
        pairs += [(end, count) for end in ends]
        source, count = count, count + 1
    return count, pairs


def towers(blocks: int, *, parts: int = 2) -> tuple[int, Pairs]:
    """Two towers of blocks, each cut into ``parts`` layers, and a head that reads both."""
    each = blocks * parts
    pairs = [(index, index + 1) for index in range(2 * each - 1) if index + 1 != each]
    return 2 * each + 1, [*pairs, (each - 1, 2 * each), (2 * each - 1, 2 * each)]


def bert(blocks: int) -> tuple[int, Pairs]:
    """BERT as single operators: embeddings and a mask, then blocks of attention and an MLP.

    Query, key and value are four operators each (product, bias, reshape, transpose); the key is
    transposed once more. Scores are scaled, masked, normalised and dropped out.
    """
    pairs: Pairs = []

    def add(*sources: int) -> int:
        node = count[0]
        count[0] += 1
        pairs.extend((source, node) for source in sources)
        return node

    def chain(source: int, length: int) -> int:
        for _ in range(length):
            source = add(source)
        return source

    count = [0]
    words, places, kinds = add(), add(), add()
    mask = chain(add(), 4)
    hidden = chain(add(add(words, places), kinds), 2)
    for _ in range(blocks):
        query, key, value = chain(hidden, 4), chain(hidden, 5), chain(hidden, 4)
        scores = chain(add(chain(add(query, key), 1), mask), 2)
        attended = chain(add(scores, value), 5)
        hidden = chain(add(attended, hidden), 1)
        hidden = chain(add(chain(hidden, 6), hidden), 1)
    pooled, words_out = chain(hidden, 4), chain(hidden, 5)
    add(pooled, words_out)
    return count[0], pairs


def series_parallel(operators: int, seed: int) -> tuple[int, Pairs]:
    """Nested splits and joins, drawn at random: one operator, a sequence, or branches."""
    draw = random.Random(seed)
    pairs: Pairs = []
    count = [1]

    def grow(source: int, size: int) -> int:
        if size < 3 or draw.random() < 0.2:
            for _ in range(max(size, 1)):
                pairs.append((source, count[0]))
                source, count[0] = count[0], count[0] + 1
            return source
        if draw.random() < 0.7:
            share = draw.randint(1, size - 1)
            return grow(grow(source, share), size - share)
        branches = draw.choice([2, 2, 3])
        ends = [grow(source, max(1, (size - 1) // branches)) for _ in range(branches)]
        join, count[0] = count[0], count[0] + 1
        pairs.extend((end, join) for end in ends)
        return join

    grow(0, operators)
    return count[0], pairs


MODELS: dict[str, Callable[[], tuple[int, Pairs]]] = {
    "U-Net, 5 levels": lambda: unet(5),
    "Inception, 8 modules": lambda: inception(8),
    "two towers, 12 blocks": lambda: towers(12, parts=1),
    "two towers, 12 blocks, 2 cuts each": lambda: towers(12),
    "two towers, 24 blocks, 2 cuts each": lambda: towers(24),
    "Inception, 12 modules": lambda: inception(12),
    "BERT, 3 blocks, operators": lambda: bert(3),
    "BERT, 6 blocks, operators": lambda: bert(6),
    "BERT, 12 blocks, operators": lambda: bert(12),
    **{
        f"series-parallel, {size} operators, {seed}": partial(series_parallel, size, seed)
        for size, seed in ((100, 0), (100, 1), (200, 2), (200, 3), (400, 4), (400, 5))
    },
}


def profile_of(count: int, pairs: Pairs, seed: int = 0) -> Profile:
    """Layers of uneven work and weights; every output is read by the targets of its pairs."""
    draw = random.Random(seed)
    seconds = [draw.lognormvariate(0, 0.6) * 4e-3 for _ in range(count)]
    outputs = [
        TensorSpec(
            name=f"t{index}",
            shape=(draw.randrange(1, 9) * 2**20,),
            dtype="uint8",
            requires_grad=True,
        )
        for index in range(count)
    ]
    last_read = {source: max(t for s, t in pairs if s == source) for source, _ in pairs}
    reading = {target for _, target in pairs}
    image = TensorSpec(name="x", shape=(2**18,), dtype="uint8")
    read_image = [target for target in range(count) if target not in reading]
    boundaries = []
    for after in range(count - 1):
        crossing = [outputs[one] for one, two in last_read.items() if one <= after < two]
        if after < max(read_image):
            crossing.append(image)
        boundaries.append(Boundary(after=after, tensors=tuple(crossing)))
    return Profile(
        model="LayerGraph",
        inputs=(image,),
        layers=tuple(
            LayerProfile(
                layer=Layer(name=f"layer.{index}", parameter_bytes=2**22),
                forward=Timing(median_s=time_s),
                backward=Timing(median_s=2 * time_s),
            )
            for index, time_s in enumerate(seconds)
        ),
        boundaries=tuple(boundaries),
        edges=(
            *(Edge(source=MODEL_INPUT, target=target, tensor=image) for target in read_image),
            *(Edge(source=one, target=two, tensor=outputs[one]) for one, two in sorted(pairs)),
        ),
        parameters=tuple(
            Parameter(names=(f"layer.{index}.weight",), size_bytes=2**22, numel=2**20,
                      layers=(index,))
            for index in range(count)
        ),
        storages=tuple(
            SavedStorage(size_bytes=2 * outputs[index].size_bytes, layers=(index,))
            for index in range(count)
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One model on one number of devices."""

    model: str
    layers: int
    devices: int
    sets: int | None
    stages: int | None
    table_s: float
    given_s: float
    any_s: float
    step_given_s: float
    step_any_s: float
    objective_given_s: float
    objective_any_s: float
    lower_bound_s: float
    reordered: bool

    @property
    def gain(self) -> float:
        """Return the relative gain of planning over any order of the layers."""
        return 1 - self.step_any_s / self.step_given_s

    @property
    def gap(self) -> float:
        return 1 - self.lower_bound_s / self.objective_any_s


def measured(name: str, profile: Profile, num_devices: int, microbatches: int) -> Result:
    cluster = Cluster.uniform(num_devices, memory_bytes=80 * 2**30, bandwidth_bytes_per_s=12e9)
    begin_s = time.perf_counter()
    table = LayerGraph(profile, PlanOptions(layer_order="any")).stages
    table_s = time.perf_counter() - begin_s
    given, given_s = _planned(profile, cluster, microbatches, "given")
    free, any_s = _planned(profile, cluster, microbatches, "any")
    validate(free, profile, cluster)
    return Result(
        model=name,
        layers=len(profile.layers),
        devices=num_devices,
        sets=None if table is None else len(table.members),
        stages=None if table is None else len(table.first),
        table_s=table_s,
        given_s=given_s,
        any_s=any_s,
        step_given_s=given.step_time_s,
        step_any_s=free.step_time_s,
        objective_given_s=given.proof.value,
        objective_any_s=free.proof.value,
        lower_bound_s=free.proof.lower_bound,
        reordered=bool(free.layer_order),
    )


def _planned(
    profile: Profile, cluster: Cluster, microbatches: int, order: Literal["given", "any"]
) -> tuple[Plan, float]:
    options = PlanOptions(num_microbatches=microbatches, layer_order=order, gap=1e-3)
    begin_s = time.perf_counter()
    made = plan(profile, cluster, options)
    return made, time.perf_counter() - begin_s


def profiles(folder: Path | None) -> Iterator[tuple[str, Profile]]:
    """Return the models above, and PipeDream's where a folder with them is given."""
    for name, make in MODELS.items():
        yield name, profile_of(*make())
    for path in sorted(folder.rglob("*.txt")) if folder else []:
        yield str(path.relative_to(folder or path)), to_profile(read_pipedream_graph(path))


def table(results: list[Result]) -> str:
    head = (
        "model", "layers", "sets", "stages", "devices", "given, s", "any, s", "shorter step", "gap",
    )  # fmt: skip
    rows = [
        (
            row.model,
            row.layers,
            "too many" if row.sets is None else f"{row.sets:,}",
            "" if row.stages is None else f"{row.stages:,}",
            row.devices,
            f"{row.given_s:.2f}",
            f"{row.any_s:.2f}",
            f"{row.gain:.1%}",
            f"{row.gap:.1%}",
        )
        for row in results
    ]
    return markdown_table(head, rows, left=len(head))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--pipedream", type=Path, help="a folder of PipeDream's profiles")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for name, profile in profiles(arguments.pipedream):
        for count in arguments.devices:
            row = measured(name, profile, count, arguments.microbatches)
            results.append(row)
            if arguments.json:
                print(json.dumps({**asdict(row), "gain": row.gain, "gap": row.gap}), flush=True)
    if not arguments.json:
        print(table(results))


if __name__ == "__main__":
    main()
