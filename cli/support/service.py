"""Work that commands hand to a service with ``--server``: planning, measuring, reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidInput
from .load_object import load_model, refuse_options
from .named_models import is_stored_id, read_model, read_precision
from .next_steps import command_line, devices_like
from .output import say
from .read_documents import read_document

if TYPE_CHECKING:
    from ...client.client import Client
    from ...core.cluster.cluster import Cluster
    from ...core.document import Document
    from ...core.graph.graph import Graph
    from ...core.plan.plan import Plan, PlanOptions
    from ...core.profile.profile import Profile
    from ...core.requests.requests import MeasureRequest, ProfilingOptions
    from .named_models import EstimateFlags


def open_client(server: str | None, token: str | None, *, quiet: bool) -> Client:
    """Return a client for a service; ``STAGEWRIGHT_SERVER`` names it where ``server`` is `None`."""
    from ...client.client import Client

    return Client(server, token, on_wait=None if quiet else say)


def fetch_document(
    server: str, token: str | None, identifier: str, *, quiet: bool
) -> Plan | Profile | Graph:
    """Fetch a document from a service by its id."""
    kind = identifier.partition("_")[0]
    with open_client(server, token, quiet=quiet) as client:
        if kind == "plan":
            return client.get_plan(identifier).require()
        if kind == "profile":
            return client.get_profile(identifier).profile
        if kind == "graph":
            return client.get_graph(identifier).graph
    raise InvalidInput(
        f"{identifier!r} is not a document id (plan_..., profile_... or graph_...); "
        "to show a file, leave out --server"
    )


def suggest_after_show(server: str, document: Document, identifier: str) -> str:
    """Return the command to run next: draw a plan, or plan with anything else."""
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile

    if isinstance(document, Plan):
        return command_line("show", identifier, "--server", server, "--svg", "plan.svg")
    devices = devices_like(document) if isinstance(document, Profile) else "4xH100"
    return command_line("plan", identifier, "--server", server, "--devices", devices)


def profile_on_service(
    server: str,
    token: str | None,
    request: MeasureRequest | None,
    options: ProfilingOptions,
    model: str | None,
    sample: str | None,
    *,
    quiet: bool,
    **not_sent: str | None,
) -> Profile:
    """Have a service measure and store a profile; a model built by code is captured here.

    ``not_sent`` are options of a user's own model that a captured graph does not carry, by name.
    """
    with open_client(server, token, quiet=quiet) as client:
        if request is not None:
            subject = request.graph or request.model
            assert subject is not None, "a request has a model or a graph"
            job = client.profile_job(subject, request.sample, profiling=options)
        else:
            refuse_options("--server", {f"--{name}": value for name, value in not_sent.items()})
            job = client.profile_job(*load_model(model, sample), profiling=options)
        result = client.wait(job).result
        assert result is not None, "a job that succeeded has a result"
        return client.get_profile(result.id).profile


def plan_on_service(
    server: str,
    token: str | None,
    files: Sequence[str],
    name: str | None,
    estimate: EstimateFlags,
    cluster: Cluster,
    options: PlanOptions,
    deadline_s: float | None,
    *,
    quiet: bool,
) -> Plan:
    """Have a service make and store a plan of files or, by ``name``, of a model or stored document.

    Files are profiles, or a single captured graph or exported program.
    """
    if name is None:
        model, sample = _read_model_files(files, estimate), None
    else:
        model, sample = _resolve_name(name, estimate)
    with open_client(server, token, quiet=quiet) as client:
        answer = client.plan(
            model,
            sample,
            cluster=cluster,
            options=options,
            estimate=_estimate_options(estimate),
            deadline_s=deadline_s,
        )
    reused = {"plan": " (existing plan)", "profile": " (existing profile)"}
    say(f"{answer.id} on {server}{reused.get(answer.reused or '', '')}", quiet=quiet)
    return answer.require()


def _read_model_files(paths: Sequence[str], estimate: EstimateFlags) -> Any:
    from ...core.graph.graph import Graph
    from ...core.profile.profile import Profile

    if len(paths) == 1 and paths[0].endswith(".pt2"):
        return Path(paths[0])
    found = [read_document(Path(path), Profile, Graph) for path in paths]
    if isinstance(found[0], Graph):
        if len(found) > 1:
            raise InvalidInput("give a single graph, or profiles of a single model")
        return found[0]
    estimate.refuse_for_profiles()
    return found[0] if len(found) == 1 else found


def _resolve_name(name: str, estimate: EstimateFlags) -> tuple[Any, Any]:
    if estimate.calibrate:
        raise InvalidInput(
            "--calibrate cannot be combined with --server; run 'stagewright estimate --calibrate' "
            "here and plan with the profile it writes"
        )
    if is_stored_id(name):
        if name.startswith("profile"):
            estimate.refuse_for_profiles()
        return name, None
    return read_model(name, None, estimate.microbatch or 1, estimate.sequence)


def _estimate_options(estimate: EstimateFlags) -> Any:
    from ...core.requests.requests import EstimateOptions

    if estimate.kind is None and estimate.precision is None:
        return None
    return EstimateOptions(device=estimate.kind, precision=read_precision(estimate.precision))
