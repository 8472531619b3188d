"""Small documents to store."""

from __future__ import annotations

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Graph, Layer
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.service.documents import InfeasibleAnswer, PlanRecord


def planned(profile_id: str, answer: Plan, devices: str = "2xcpu") -> PlanRecord:
    return PlanRecord(
        status="planned",
        profile_id=profile_id,
        cluster=Cluster.parse(devices),
        options=PlanOptions(),
        plan=answer,
    )


def infeasible(profile_id: str, required: float = 2.0) -> PlanRecord:
    return PlanRecord(
        status="infeasible",
        profile_id=profile_id,
        cluster=Cluster.parse("1x1GB"),
        options=PlanOptions(),
        infeasible=InfeasibleAnswer(
            constraint="memory", required=required, available=1.0, message="too small"
        ),
    )


def a_graph(model: str = "Tiny") -> Graph:
    return Graph(model=model, mode="modules", inputs=(), outputs=(), layers=(Layer(name="only"),))
