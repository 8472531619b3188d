"""What a service has stored, and what it measures, for commands that take ``--server``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.errors import InvalidInput
from ..options.model import own_model, refuse
from ..options.server import client_of
from .next_steps import command_line, devices_like

if TYPE_CHECKING:
    from ...core.document import Document
    from ...core.graph.graph import Graph
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile
    from ...core.requests.requests import MeasureRequest, ProfilingOptions


def stored_document(
    server: str, token: str | None, identifier: str, *, quiet: bool
) -> Plan | Profile | Graph:
    """The document with that id on a service.

    Raises:
        InvalidInput: It is no id of a document.
        NotFound: There is none.
        Infeasible: It is the id of a request that nothing fitted.
    """
    kind = identifier.partition("_")[0]
    with client_of(server, token, quiet=quiet) as client:
        if kind == "plan":
            return client.get_plan(identifier).require()
        if kind == "profile":
            return client.get_profile(identifier).profile
        if kind == "graph":
            return client.get_graph(identifier).graph
    raise InvalidInput(
        f"{identifier!r} is no id of a service's document: plan_..., profile_... or graph_...; "
        "without --server, show takes files"
    )


def after_showing(server: str, document: Document, identifier: str) -> str:
    """The command that follows: draw a plan; plan what tells costs."""
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
    **unsent: str | None,
) -> Profile:
    """A profile that a service measures and keeps.

    Args:
        server: Its address.
        token: Its token, if not in the environment.
        request: The model as data; `None` for one that code makes, which is captured here.
        options: How to measure.
        model: Who makes the module, as for `own_model`.
        sample: Who makes its inputs.
        quiet: Whether to say nothing.
        unsent: Options of a model of one's own that a graph does not carry, by name.

    Raises:
        CaptureError: The module does not go without its code.
        StagewrightError: The service refuses, or the measurement fails.
    """
    with client_of(server, token, quiet=quiet) as client:
        if request is not None:
            what = request.graph or request.model
            assert what is not None, "a request has a model or a graph"
            job = client.profile_job(what, request.sample, profiling=options)
        else:
            refuse("--server", {f"--{name}": value for name, value in unsent.items()})
            job = client.profile_job(*own_model(model, sample), profiling=options)
        result = client.wait(job).result
        assert result is not None, "a job that succeeded has a result"
        return client.get_profile(result.id).profile
