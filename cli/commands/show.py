"""``stagewright show``: print a profile, a plan, a cluster or a graph; draw a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import InvalidInput
from ..options.service import Server, Token, check_token
from ..support.flag_names import plan_text
from ..support.next_steps import (
    command_line,
    suggest_after_plan,
    suggest_measuring,
    suggest_planning,
)
from ..support.output import (
    JsonFlag,
    VerboseFlag,
    check_writable,
    emit,
    profile_text,
    say,
    say_next,
    write_file,
)
from ..support.read_documents import read_document, read_json_file
from ..support.service import fetch_document, suggest_after_show

if TYPE_CHECKING:
    from ...core.document import Document
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile


@dataclass(frozen=True)
class PlanDrawings:
    """Files for a plan's timeline (SVG, Chrome trace) and page; ``gantt`` draws in the terminal."""

    svg: Path | None = None
    trace: Path | None = None
    html: Path | None = None
    gantt: bool = False

    def __bool__(self) -> bool:
        return any((self.svg, self.trace, self.html, self.gantt))


def command(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE",
            help="A profile, plan, cluster, graph or schedule (torch's CSV); with --server, an id.",
        ),
    ],
    svg: Annotated[
        Path | None, Option(help="Draw the timeline to this file (plans and schedules).")
    ] = None,
    trace: Annotated[
        Path | None,
        Option(help="Write the timeline for Perfetto or chrome://tracing (plans and schedules)."),
    ] = None,
    html: Annotated[
        Path | None,
        Option(help="Write a self-contained page that shows the plan (plans only)."),
    ] = None,
    profile: Annotated[
        Path | None,
        Option(help="The profile the plan was made from, to show layer costs with --html."),
    ] = None,
    verbose: VerboseFlag = False,
    gantt: Annotated[
        bool, Option("--gantt", help="Also draw the plan's step in the terminal (plans only).")
    ] = False,
    tree: Annotated[
        bool, Option("--tree/--flat", help="Group a profile's layers by module, or list them all.")
    ] = True,
    depth: Annotated[
        int | None, Option(min=1, help="Module levels to show (profiles, with --tree).")
    ] = None,
    server: Server = None,
    token: Token = None,
    as_json: JsonFlag = False,
) -> None:
    """Print a profile, a plan, a cluster or a captured graph; draw a plan."""
    drawings = PlanDrawings(svg, trace, html, gantt)
    for path in (svg, trace, html):
        check_writable(path)
    check_token(server, token)
    if file.suffix == ".csv" and server is None:
        _show_schedule(file, drawings, as_json=as_json)
        return
    if server is None:
        document = read_local(file)
    else:
        document = fetch_document(server, token, str(file), quiet=as_json)
    _check_flags(document, file, drawings, profile, tree=tree, depth=depth)
    text, follow = _format(document, file, drawings, tree=tree, depth=depth, details=verbose)
    from ...core.plan.plan import Plan

    if isinstance(document, Plan) and drawings:
        costs = _read_costs(document, profile, server, token) if html is not None else None
        write_drawings(document, drawings, costs, quiet=as_json)
    if server is not None:
        follow = suggest_after_show(server, document, str(file))
    emit(document.to_json(indent=2) if as_json else text)
    say_next(follow, quiet=as_json)


def _show_schedule(file: Path, drawings: PlanDrawings, *, as_json: bool) -> None:
    """Show an order of work in torch's CSV, simulated with equal stages."""
    from ...core.units import format_time
    from ...formats.chrome_trace import chrome_trace
    from ...formats.svg import schedule_svg
    from ...formats.torch_schedule import read_schedule_csv, simulate_schedule

    if drawings.html is not None or drawings.gantt:
        raise InvalidInput(
            "--html and --gantt are for plans; draw a schedule with --svg or --trace"
        )
    schedule = read_schedule_csv(read_json_file(file).decode(errors="replace"))
    timeline = simulate_schedule(schedule)
    if drawings.svg is not None:
        write_file(drawings.svg, schedule_svg(schedule, timeline))
        say(f"wrote {drawings.svg}", quiet=as_json)
    if drawings.trace is not None:
        write_file(drawings.trace, chrome_trace(timeline))
        say(f"wrote {drawings.trace}; open it at ui.perfetto.dev", quiet=as_json)
    text = (
        f"{schedule.num_stages} stages on {len(schedule.ranks)} ranks, "
        f"{schedule.num_microbatches} micro-batches\n"
        f"with equal stages, forwards of 1 s and backwards of 2 s: step "
        f"{format_time(timeline.step_time_s)}, bubble {timeline.bubble_fraction:.1%}"
    )
    emit(timeline.to_json(indent=2) if as_json else text)


def read_local(file: Path) -> Document:
    """Read any document that ``show`` prints from a file."""
    from ...core.cluster.cluster import Cluster
    from ...core.graph.graph import Graph
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile

    return read_document(file, Profile, Plan, Cluster, Graph)


def _check_flags(
    document: Document,
    file: Path,
    drawings: PlanDrawings,
    profile: Path | None,
    *,
    tree: bool,
    depth: int | None,
) -> None:
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile

    if depth is not None and not tree:
        raise InvalidInput("--depth cannot be combined with --flat")
    if not isinstance(document, Profile) and (depth is not None or not tree):
        raise InvalidInput(f"--depth and --flat are for profiles; {file} is {document.SCHEMA}")
    if not isinstance(document, Plan) and drawings:
        raise InvalidInput(
            f"--svg, --trace, --html and --gantt are for plans; {file} is {document.SCHEMA}"
        )
    if profile is not None and drawings.html is None:
        raise InvalidInput("--profile requires --html")


def _format(
    document: Document,
    file: Path,
    drawings: PlanDrawings,
    *,
    tree: bool,
    depth: int | None,
    details: bool,
) -> tuple[str, str]:
    from ...core.graph.graph import Graph
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile

    if isinstance(document, Plan):
        text = plan_text(document, details=details) + (
            "\n\n" + _gantt(document) if drawings.gantt else ""
        )
        return text, suggest_after_plan(document, file, drawn=bool(drawings))
    if isinstance(document, Profile):
        return profile_text(document, tree=tree, depth=depth), suggest_planning(document, file)
    if isinstance(document, Graph):
        return str(document), suggest_measuring(document, file)
    follow = command_line("plan", "profile.json", "--devices", file, "-o", "plan.json")
    return str(document), follow


def _gantt(plan: Plan) -> str:
    """Draw the plan's step as wide as the terminal, in colour if the terminal supports it."""
    from rich.console import Console

    from ...view.build_plan_view import build_plan_view
    from ...view.terminal import gantt_text

    console = Console()
    with console.capture() as captured:
        console.print(gantt_text(build_plan_view(plan), console.width))
    return captured.get().rstrip("\n")


def _read_costs(
    plan: Plan, profile_file: Path | None, server: str | None, token: str | None
) -> Profile | None:
    """Read the profile a plan was made from: from the file given, or from the plan's service."""
    from ...core.profile.forward_only import match_profile
    from ...core.profile.profile import Profile

    if profile_file is not None:
        profile = match_profile(read_document(profile_file, Profile), plan.profile_id)
        if profile.content_id() != plan.profile_id:
            raise InvalidInput(
                f"{profile_file} is {profile.content_id()}, but the plan was made from "
                f"{plan.profile_id or 'an unnamed profile'}"
            )
        return profile
    if server is None or not plan.profile_id:
        return None
    found = fetch_document(server, token, plan.profile_id, quiet=True)
    assert isinstance(found, Profile), "a profile's id names a profile"
    return found


def write_drawings(
    plan: Plan, drawings: PlanDrawings, profile: Profile | None, *, quiet: bool
) -> None:
    """Write a plan's drawings; the page shows layer costs if the profile is given."""
    from ...formats.chrome_trace import chrome_trace
    from ...formats.svg import timeline_svg
    from ...planner.simulator.plan_timeline import plan_timeline

    if drawings.svg is not None:
        write_file(drawings.svg, timeline_svg(plan, plan_timeline(plan)))
        say(f"wrote {drawings.svg}", quiet=quiet)
    if drawings.trace is not None:
        write_file(drawings.trace, chrome_trace(plan_timeline(plan)))
        say(f"wrote {drawings.trace}; open it at ui.perfetto.dev", quiet=quiet)
    if drawings.html is not None:
        from ...view.build_plan_view import build_plan_view
        from ...view.html import plan_page

        write_file(drawings.html, plan_page(build_plan_view(plan, profile)))
        hint = "" if profile else "; add layer costs with --profile"
        say(f"wrote {drawings.html}; open it in a browser{hint}", quiet=quiet)
