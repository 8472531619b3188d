"""``stagewright show``: print a profile, a plan, a cluster or a graph; draw a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import InvalidInput
from ..options.server import Server, Token, token_needs_server
from ..support.flag_names import plan_text
from ..support.next_steps import after_plan, command_line, measuring, planning
from ..support.output import JsonFlag, check_writable, emit, profile_text, say, say_next, write_file
from ..support.read_documents import read_document
from ..support.service_documents import after_showing, stored_document

if TYPE_CHECKING:
    from ...core.document import Document
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile


def command(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="A profile, plan, cluster or graph; with --server its id there."
        ),
    ],
    svg: Annotated[
        Path | None, Option(help="Draw the plan's timeline to this file (plans only).")
    ] = None,
    trace: Annotated[
        Path | None,
        Option(help="Write the plan's timeline for Perfetto or chrome://tracing (plans only)."),
    ] = None,
    html: Annotated[
        Path | None,
        Option(help="Write one page that shows the plan, offline, to this file (plans only)."),
    ] = None,
    profile: Annotated[
        Path | None,
        Option(help="The profile a plan was made from: then --html shows what layers cost."),
    ] = None,
    gantt: Annotated[
        bool, Option("--gantt", help="Draw the plan's step in the terminal, too (plans only).")
    ] = False,
    tree: Annotated[
        bool, Option("--tree/--flat", help="Fold a profile's layers by module, or not.")
    ] = True,
    depth: Annotated[
        int | None, Option(min=1, help="Levels of modules to show (profiles, with --tree).")
    ] = None,
    server: Server = None,
    token: Token = None,
    as_json: JsonFlag = False,
) -> None:
    """Print a profile, a plan, a cluster or a captured graph; draw a plan."""
    from ...core.cluster.cluster import Cluster
    from ...core.graph.graph import Graph
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile

    for path in (svg, trace, html):
        if path is not None:
            check_writable(path)
    if depth is not None and not tree:
        raise InvalidInput("--depth folds modules, and --flat does not; give one of them")
    token_needs_server(server, token)
    document: Document
    if server is None:
        document = read_document(file, Profile, Plan, Cluster, Graph)
    else:
        document = stored_document(server, token, str(file), quiet=as_json)
    if not isinstance(document, Profile) and (depth is not None or not tree):
        raise InvalidInput(f"--depth and --flat are for profiles; {file} is {document.SCHEMA}")
    drawn = gantt or any(path is not None for path in (svg, trace, html))
    if not isinstance(document, Plan) and drawn:
        raise InvalidInput(
            f"--svg, --trace, --html and --gantt draw plans; {file} is {document.SCHEMA}"
        )
    if profile is not None and html is None:
        raise InvalidInput("--profile goes with --html; give the file to write by --html")
    if isinstance(document, Plan):
        _draw(document, svg, trace, quiet=as_json)
        if html is not None:
            costs = _costs(document, profile, server, token)
            _write_page(document, costs, html, quiet=as_json)
        text = plan_text(document)
        if gantt:
            text += "\n\n" + _gantt(document)
        follow = after_plan(document, file, drawn=drawn)
    elif isinstance(document, Profile):
        text = profile_text(document, tree=tree, depth=depth)
        follow = planning(document, file)
    elif isinstance(document, Graph):
        text, follow = str(document), measuring(document, file)
    else:
        text = str(document)
        follow = command_line("plan", "profile.json", "--devices", file, "-o", "plan.json")
    if server is not None:
        follow = after_showing(server, document, str(file))
    emit(document.to_json(indent=2) if as_json else text)
    say_next(follow, quiet=as_json)


def _draw(plan: Plan, svg: Path | None, trace: Path | None, *, quiet: bool) -> None:
    """Write the plan's simulated timeline as a picture, as a trace, or both."""
    if svg is None and trace is None:
        return
    from ...formats.chrome_trace import chrome_trace
    from ...formats.svg import timeline_svg
    from ...planner.simulator.plan_timeline import plan_timeline

    timeline = plan_timeline(plan)
    if svg is not None:
        write_file(svg, timeline_svg(plan, timeline))
        say(f"wrote {svg}", quiet=quiet)
    if trace is not None:
        write_file(trace, chrome_trace(timeline))
        say(f"wrote {trace}; open it at ui.perfetto.dev", quiet=quiet)


def _gantt(plan: Plan) -> str:
    """The plan's step as wide as the terminal, in colours if that shows any."""
    from rich.console import Console

    from ...view.build_plan_view import build_plan_view
    from ...view.terminal_gantt import gantt_text

    console = Console()
    with console.capture() as captured:
        console.print(gantt_text(build_plan_view(plan), console.width))
    return captured.get().rstrip("\n")


def _costs(
    plan: Plan, profile_file: Path | None, server: str | None, token: str | None
) -> Profile | None:
    """The profile a plan was made from: the file given, or the service's that has the plan."""
    from ...core.profile.profile import Profile

    if profile_file is not None:
        profile = read_document(profile_file, Profile)
        if profile.content_id() != plan.profile_id:
            raise InvalidInput(
                f"{profile_file} is {profile.content_id()}, and the plan was made from "
                f"{plan.profile_id or 'a profile it does not name'}; give that one"
            )
        return profile
    if server is None or not plan.profile_id:
        return None
    found = stored_document(server, token, plan.profile_id, quiet=True)
    assert isinstance(found, Profile), "the id of a profile is a profile's"
    return found


def _write_page(plan: Plan, profile: Profile | None, html: Path, *, quiet: bool) -> None:
    """Write the plan, and what its layers cost if that is known, as one page."""
    from ...view.build_plan_view import build_plan_view
    from ...view.html import plan_page

    write_file(html, plan_page(build_plan_view(plan, profile)))
    said = f"wrote {html}; open it in a browser"
    say(said if profile else f"{said}, or add what layers cost with --profile", quiet=quiet)
