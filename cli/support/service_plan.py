"""``stagewright plan --server``: the same words, carried out by a service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidInput
from ..options.model import is_stored_id, named_model, read_precision
from ..options.server import client_of
from .output import say
from .read_documents import read_document

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.plan.plan import Plan, PlanOptions
    from ..options.estimate import EstimateWords


def plan_on_service(
    server: str,
    token: str | None,
    models: Sequence[str],
    name: str | None,
    words: EstimateWords,
    cluster: Cluster,
    options: PlanOptions,
    deadline_s: float | None,
    *,
    quiet: bool,
) -> Plan:
    """A plan that a service makes and keeps.

    Args:
        server: Its address.
        token: Its token, if not in the environment.
        models: Files with profiles, or one with a graph or an exported program.
        name: Of a published model instead, or the id of what the service has.
        words: How to estimate it.
        cluster: The devices.
        options: What to plan for.
        deadline_s: Longest to search.
        quiet: Whether to say nothing beside the plan.

    Raises:
        InvalidInput: Files and options do not go together, or the service says so.
        Infeasible: Nothing fits.
    """
    model, sample = _from_files(models, words) if name is None else _from_name(name, words)
    with client_of(server, token, quiet=quiet) as client:
        answer = client.plan(
            model,
            sample,
            cluster=cluster,
            options=options,
            estimate=_estimate(words),
            deadline_s=deadline_s,
        )
    reused = {"plan": ", which had it already", "profile": ", which knew the model's costs"}
    say(f"{answer.id} on {server}{reused.get(answer.reused or '', '')}", quiet=quiet)
    return answer.require()


def _from_files(paths: Sequence[str], words: EstimateWords) -> tuple[Any, None]:
    from ...core.graph.graph import Graph
    from ...core.profile.profile import Profile

    if len(paths) == 1 and paths[0].endswith(".pt2"):
        return Path(paths[0]), None
    found = [read_document(Path(path), Profile, Graph) for path in paths]
    if isinstance(found[0], Graph):
        if len(found) > 1:
            raise InvalidInput("give one graph, or profiles of one model")
        return found[0], None
    words.refuse_for_files()
    return found[0] if len(found) == 1 else found, None


def _from_name(name: str, words: EstimateWords) -> tuple[Any, Any]:
    if words.calibrate:
        raise InvalidInput(
            "--calibrate is for estimates made here; leave --server out, or estimate here and send "
            "the profile"
        )
    if is_stored_id(name):
        if name.startswith("profile"):
            words.refuse_for_files()
        return name, None
    return named_model(name, None, words.microbatch or 1, words.sequence)


def _estimate(words: EstimateWords) -> Any:
    from ...core.requests.requests import EstimateOptions

    if words.kind is None and words.precision is None:
        return None
    return EstimateOptions(device=words.kind, precision=read_precision(words.precision))
