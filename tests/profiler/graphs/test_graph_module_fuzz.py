"""Graphs changed at random: refused on reading, refused on rebuilding, or measured."""

import json
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.graph import Graph
from tests.portable_models import awkward, gpt2, inception, lstm

BUILDERS = (awkward, inception, lstm, gpt2)

ODD = [
    None, True, -1, 0, 1, 3, 2**31, 2**62, 2**80, 0.5, 1e300, "", "x", "aten.mul.Tensor",
    "float16", "int64", [], [1, 2], {}, {"node": "relu"}, {"state": "scale"}, {"device": "here"},
]  # fmt: skip


def places(value, path=()):
    """Every place in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


def mutated(document, draw):
    """A copy with one to three values replaced, removed, repeated, or exchanged with another's."""
    found = json.loads(json.dumps(document))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        path = draw.choice([path for path in places(found) if path])
        owner = found
        for key in path[:-1]:
            owner = owner[key]
        how, key = draw.randrange(5), path[-1]
        if how == 0:
            del owner[key]
        elif how == 1 and isinstance(owner, list):
            owner.append(owner[key])
        elif how == 2 and isinstance(owner[key], int) and not isinstance(owner[key], bool):
            owner[key] = owner[key] * draw.choice([-1, 2, 10**3, 10**9]) + draw.choice([-1, 0, 1])
        elif how == 3 and isinstance(owner, list) and len(owner) > 1:
            other = draw.randrange(len(owner))
            owner[key], owner[other] = owner[other], owner[key]
        else:
            owner[key] = draw.choice(ODD)
    return found


@pytest.fixture(scope="module")
def documents():
    torch.manual_seed(0)
    return [json.loads(graph_of(build).to_json()) for build in BUILDERS]


def graph_of(build):
    model, sample = build()
    return trace(model.train(), sample, check=False).graph


def read_or_none(text):
    try:
        return Graph.from_json(text)
    except InvalidInput:
        return None


def test_reading_refuses_or_reads_but_never_fails(documents):
    draw = random.Random(1)
    outcomes = []
    for index in range(400):
        text = json.dumps(mutated(documents[index % len(documents)], draw))
        outcomes.append(read_or_none(text) is None)
    assert 50 < sum(outcomes) < 390  # both happen


def test_reading_garbage_refuses_it(documents):
    draw = random.Random(2)
    text = json.dumps(documents[0])
    for _ in range(50):
        position, length = draw.randrange(len(text)), draw.randrange(1, 40)
        garbled = text[:position] + text[position + length :]
        read_or_none(garbled)
    for garbage in ("", "[]", "null", "[" * 100_000, '{"operations": ' + "[" * 5000):
        assert read_or_none(garbage) is None


CHILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
from stagewright.core.errors import StagewrightError
from stagewright.core.graph.graph import Graph
from stagewright.core.requests.requests import MeasureRequest, ProfilingOptions
from stagewright.profiler.measure_worker import measure_here

options = ProfilingOptions(budget_s=0.001, num_threads=1)
for line in sys.stdin:
    try:
        measure_here(MeasureRequest(graph=Graph.from_json(line), profiling=options))
        said = "measured"
    except StagewrightError as error:
        said = type(error).__name__
    print(said, flush=True)
"""


def test_what_is_read_is_refused_or_measured_and_a_crash_stays_in_the_process(documents):
    """A process that dies of one document is followed by another for the rest."""
    draw = random.Random(3)
    waiting = []
    while len(waiting) < 40:
        text = json.dumps(mutated(documents[draw.randrange(2)], draw))
        graph = read_or_none(text)
        if graph is not None and graph.rebuildable:
            waiting.append(text)
    outcomes: list[str] = []
    while waiting:
        result = subprocess.run(
            [sys.executable, "-c", CHILD],
            input="\n".join(waiting),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        said = result.stdout.split()
        if len(said) < len(waiting):
            assert result.returncode < 0, result.stderr  # no exception: a signal
            said.append("died")
        outcomes += said
        waiting = waiting[len(said) :]
    assert set(outcomes) <= {"measured", "InvalidInput", "MeasurementError", "died"}
    assert "measured" in outcomes
    assert "InvalidInput" in outcomes


def test_sizes_that_would_fill_memory_are_refused_before_anything_is_made():
    graph = trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), check=False).graph
    document = json.loads(graph.to_json())
    for tensor in (document["inputs"][0], document["sample"]["inputs"]["input"]):
        tensor["shape"] = [2**30, 2**10]
    with pytest.raises(InvalidInput):
        Graph.from_json(json.dumps(document))
