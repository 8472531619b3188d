"""``stagewright doctor``: report the capabilities of this machine and installation."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ... import __version__
from ...core.errors import StagewrightError
from ...core.units import format_bytes
from ...profiler.machine.memory import free_memory_bytes, host_memory_bytes
from ..support.gpu_report import TorchReport, describe_torch, examine_torch
from ..support.optional_dependencies import EXTRAS, MissingExtra, missing_packages
from ..support.output import JsonFlag, emit, say, say_next

if TYPE_CHECKING:
    from ...profiler.links.records import LinkReport

LINKS_BUDGET_S = 2.0
LINKS_LARGEST_BYTES = 16 * 2**20
"""Small messages and a short budget: doctor shows that links work, not how fast they are."""


@dataclass(frozen=True)
class MachineReport:
    """Software, processor, memory and devices found here.

    Memory and cores are those this process may use, in a container perhaps fewer than there are.
    There is no ``torch`` if it is not installed; ``missing`` lists packages by extra.
    """

    stagewright: str
    python: str
    system: str
    cores: int
    memory_bytes: int
    torch: TorchReport | None
    missing: dict[str, tuple[str, ...]]
    processor: str = ""
    free_memory_bytes: int | None = None


@dataclass(frozen=True)
class LinkCheck:
    """Quick measurement of links; ``error`` is the reason if there is none."""

    report: LinkReport | None = None
    error: str = ""


def command(
    with_links: Annotated[
        bool,
        Option("--links", help="Also measure the links between devices for a few seconds."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Report the devices, memory, links and installed extras of this machine."""
    report = examine()
    links = _measure_links(report, quiet=as_json) if with_links else None
    emit(_as_json(report, links) if as_json else "\n".join(_lines(report, links)))
    follow = "stagewright profile --help" if report.torch else MissingExtra("torch", "").install
    say_next(follow, quiet=as_json)
    if report.torch and not with_links:
        say_next("stagewright doctor --links", quiet=as_json)


def _measure_links(report: MachineReport, *, quiet: bool) -> LinkCheck:
    """Measure links between all CUDA devices, or two CPU ranks with fewer than two devices."""
    if report.torch is None or report.torch.error:
        return LinkCheck(error="not measured: torch is not available")
    from ...profiler.links.launch_local import measure_links_here
    from ...profiler.links.records import LinkOptions
    from ..support.progress import progress_bar

    gpus = len(report.torch.cuda_devices)
    device, count = ("cuda", gpus) if gpus > 1 else ("cpu", 2)
    say(f"measuring links between {count} {device} ranks", quiet=quiet)
    options = LinkOptions(device=device, budget_s=LINKS_BUDGET_S, largest_bytes=LINKS_LARGEST_BYTES)
    try:
        with progress_bar(quiet=quiet) as progress:
            return LinkCheck(measure_links_here(count, options, progress))
    except StagewrightError as error:  # the rest of the report is still worth having
        return LinkCheck(error=str(error))


def _as_json(report: MachineReport, links: LinkCheck | None) -> str:
    body = asdict(report)
    if links is not None:
        found = links.report
        body["links"] = {
            "report": None if found is None else found.model_dump(mode="json"),
            "error": links.error,
        }
    return json.dumps(body, indent=2)


def _lines(report: MachineReport, links: LinkCheck | None) -> list[str]:
    from ..support.links import links_table

    lines = [describe(report)]
    if links is not None:
        lines.append(
            "links        "
            + (links.error or "quick measurement; for planning run: stagewright profile --links")
        )
        if links.report is not None:
            lines += ["", links_table(links.report)]
    return lines


def examine() -> MachineReport:
    """Examine Python, the machine, torch (imported only if installed) and the extras."""
    missing = {extra: missing_packages(extra) for extra in EXTRAS}
    return MachineReport(
        stagewright=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        cores=_cores(),
        memory_bytes=host_memory_bytes(),
        torch=None if "torch" in missing["torch"] else examine_torch(),
        missing=missing,
        processor=_processor(),
        free_memory_bytes=free_memory_bytes(),
    )


def describe(report: MachineReport) -> str:
    """Format the report as text."""
    available = report.free_memory_bytes
    free = "" if available is None else f", {format_bytes(available)} free"
    lines = [
        f"stagewright  {report.stagewright}",
        f"python       {report.python}",
        f"system       {report.system}",
        f"cores        {report.cores}{f', {report.processor}' if report.processor else ''}",
        f"memory       {format_bytes(report.memory_bytes)}{free}",
        *describe_torch(report.torch),
    ]
    for extra, packages in report.missing.items():
        state = "installed"
        if packages:
            install = MissingExtra(extra, packages[0]).install
            state = f"missing {', '.join(packages)}; run: {install}"
        lines.append(f"[{extra}]".ljust(13) + state)
    return "\n".join(lines)


def _cores() -> int:
    # A container or taskset may allow fewer processors than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()
