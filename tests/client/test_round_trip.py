"""A plan by way of the service is the plan the library makes, whichever way the model is said."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import stagewright
from stagewright import AsyncClient, Client, Graph, Plan, PlanOptions, Profile
from stagewright.capture.capture import capture
from stagewright.cli.support.named_models import read_model
from stagewright.client.model_sources import describe_model
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.tensors import Sample, SampleTensor
from stagewright.core.models.families import ModelSpec, ResNetConfig, ResNetSpec
from stagewright.profiler.estimates.for_cluster import (
    estimate_for_cluster,
    estimate_graph_for_cluster,
)
from stagewright.profiler.models.families import build_model, make_sample
from tests.live_service import TOKEN
from tests.torch_models import SPECS

DEVICES = "3xH100"
OPTIONS = PlanOptions(num_microbatches=6)
SAMPLES = {
    "gpt2": Sample(
        inputs={"input_ids": SampleTensor(shape=(2, 12), dtype="int64", fill="randint", high=64)}
    ),
    "resnet": Sample(inputs={"x": SampleTensor(shape=(2, 3, 32, 32))}),
}


SMALL: dict[str, ModelSpec] = {
    "gpt2": SPECS["gpt2"],
    "resnet": ResNetSpec(family="resnet", config=ResNetConfig(depth=18, width=8, num_classes=10)),
}
"""`scripts/client_round_trip.py` does the same with GPT-2 small and ResNet-50."""


@dataclass(frozen=True)
class Said:
    """A model in each way it can be said, and what the library plans for it."""

    module: torch.nn.Module
    tensors: dict[str, torch.Tensor]
    spec: ModelSpec
    sample: Sample
    graph: Graph
    profile: Profile
    by_spec: Plan
    by_graph: Plan


@pytest.fixture(scope="module", params=["gpt2", "resnet"])
def said(request: pytest.FixtureRequest) -> Said:
    name = request.param
    if name == "gpt2":
        pytest.importorskip("transformers")
    spec, sample, cluster = SMALL[name], SAMPLES[name], Cluster.parse(DEVICES)
    module, (tensors, _) = build_model(spec), make_sample(sample)
    graph = capture(module, tensors)
    of_spec = estimate_for_cluster(spec, sample, cluster)
    of_graph = estimate_graph_for_cluster(graph, cluster)
    return Said(
        module,
        tensors,
        spec,
        sample,
        graph,
        of_spec.profile,
        by_spec=stagewright.plan(of_spec.profile, of_spec.cluster, OPTIONS),
        by_graph=stagewright.plan(of_graph.profile, of_graph.cluster, OPTIONS),
    )


def test_by_graph_spec_profile_and_id(said: Said, client: Client):
    made = client.plan(said.graph, cluster=DEVICES, options=OPTIONS)
    assert made.require() == said.by_graph
    spec = client.plan(said.spec, said.sample, cluster=DEVICES, options=OPTIONS)
    assert spec.require() == said.by_spec
    profile = client.plan(said.profile, cluster=DEVICES, options=OPTIONS)
    assert profile.require() == said.by_spec
    stored = client.put_profile(said.profile)
    assert client.plan(stored, cluster=DEVICES, options=OPTIONS).id == profile.id
    assert client.plan(stored.id, cluster=DEVICES, options=OPTIONS).id == profile.id
    assert client.get_profile(stored.id).profile == said.profile
    assert client.get_graph(said.graph.content_id()).graph == said.graph


@pytest.mark.parametrize("said", ["gpt2"], indirect=True)
def test_a_module_and_its_tensors_in_one_line(said: Said, client: Client):
    first = client.plan(said.graph, cluster=DEVICES, options=OPTIONS)
    made = client.plan(said.module, said.tensors, cluster=DEVICES, options=OPTIONS)
    assert made.require() == said.by_graph
    assert (made.id, made.reused) == (first.id, "plan"), "it is the graph that was sent before"
    assert str(made) == f"{made.id}\n\n{said.by_graph}"
    short = client.plan(said.profile, cluster="2x1MB", options={"memory_fraction": 0.001})
    assert short.infeasible is not None
    assert str(short) == f"{short.id}: infeasible\n{short.infeasible.message}"


def test_the_asynchronous_client_does_the_same_side_by_side(said: Said, server: str):
    ways = (
        (said.graph, None),
        (said.spec, said.sample),
        (said.profile, None),
    )

    async def plan_all() -> list[Plan]:
        async with AsyncClient(server, TOKEN) as client:
            made = await asyncio.gather(
                *(
                    client.plan(model, sample, cluster=DEVICES, options=OPTIONS)
                    for model, sample in ways
                )
            )
        return [answer.require() for answer in made]

    assert asyncio.run(plan_all()) == [
        said.by_graph, said.by_spec, said.by_spec,
    ]  # fmt: skip


def test_an_exported_program_is_captured_here_and_planned_as_its_module(
    client: Client, server: str, tmp_path: Path
):
    model, sample = (
        torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8)),
        (torch.randn(4, 512),),
    )
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, sample), path)
    by_file, by_module = (
        client.plan(*given, cluster="2xH100").require() for given in ((path,), (model, sample))
    )
    assert by_file.balance == by_module.balance
    assert by_file.step_time_s == by_module.step_time_s

    async def plan() -> Plan:
        async with AsyncClient(server, TOKEN) as waiting:
            return (await waiting.plan(str(path), cluster="2xH100")).require()

    assert asyncio.run(plan()) == by_file


def test_a_published_model_by_name_is_the_command_lines():
    spec, sample = read_model("resnet50", None, 1, None)
    assert describe_model("resnet50") == {
        "model": spec.model_dump(mode="json"),
        "sample": sample.model_dump(mode="json"),
    }
