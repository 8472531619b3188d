"""GPT-2 small and ResNet-50 by way of a service: the same plans as the library makes.

Each is said in every way (module, graph, family, exported program, profile, id), to both clients,
and to a service in a process of its own. Run it with ``make roundtrip``.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

import stagewright
from stagewright import AsyncClient, Client, Plan, PlanOptions
from stagewright.capture.capture import capture
from stagewright.cli.commands.demo import MODELS
from stagewright.cli.support.local_service import LocalService, running_service
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.tensors import Sample
from stagewright.core.models.families import ModelSpec
from stagewright.profiler.estimates.for_cluster import (
    estimate_for_cluster,
    estimate_graph_for_cluster,
)
from stagewright.profiler.models.families import build_model, make_sample

DEVICES = "4xH100"
OPTIONS = PlanOptions(num_microbatches=8, num_stages=4)
ASKED: dict[str, Any] = {"cluster": DEVICES, "options": OPTIONS}


def check(name: str, service: LocalService, folder: Path) -> bool:
    """Compare the plans of one model; print a line for each way."""
    spec: ModelSpec = TypeAdapter(ModelSpec).validate_python(MODELS[name]["model"])
    sample = Sample.model_validate(
        {key: value for key, value in MODELS[name]["sample"].items() if key != "target"}
    )
    module, (tensors, _) = build_model(spec), make_sample(sample)
    graph, cluster = capture(module, tensors), Cluster.parse(DEVICES)
    of_spec = estimate_for_cluster(spec, sample, cluster)
    of_graph = estimate_graph_for_cluster(graph, cluster)
    by_spec = stagewright.plan(of_spec.profile, of_spec.cluster, OPTIONS)
    by_graph = stagewright.plan(of_graph.profile, of_graph.cluster, OPTIONS)
    with Client(service.url, service.token) as client:
        stored = client.put_profile(of_spec.profile)
    program = folder / f"{name}.pt2"
    torch.export.save(torch.export.export(module, (), kwargs=tensors, strict=False), program)
    ways = {
        "module": (module, tensors, by_graph),
        "graph": (graph, None, by_graph),
        "family": (spec, sample, by_spec),
        "profile": (of_spec.profile, None, by_spec),
        "id": (stored.id, None, by_spec),
        "program": (program, None, None),
    }
    same = True
    for way, (model, inputs, expected) in ways.items():
        started = time.monotonic()
        found = both(service, model, inputs)
        elapsed_s = time.monotonic() - started
        if expected is None:
            verdict = "agree" if found[0] == found[1] else "DIFFER"
        else:
            verdict = "same" if found == [expected, expected] else "DIFFERS"
        same = same and verdict in ("same", "agree")
        balance = list(found[0].balance)
        print(f"{name:9} {way:8} {verdict:8} {balance} in {elapsed_s:.1f} s", flush=True)
    return same


def both(service: LocalService, model: Any, sample: Any) -> list[Plan]:
    """Return the plan by the blocking client, and by the asynchronous one with nothing reused."""
    with Client(service.url, service.token) as client:
        first = client.plan(model, sample, **ASKED).require()

    async def plan() -> Plan:
        async with AsyncClient(service.url, service.token) as client:
            return (await client.plan(model, sample, fresh=True, **ASKED)).require()

    return [first, asyncio.run(plan())]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_service(folder / "stagewright.db") as service:
            found = [check(model, service, folder) for model in MODELS]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
