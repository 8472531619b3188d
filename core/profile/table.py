"""Plain-text table of a profile: modules with bars and shares, then the measurement's quality."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ..graph.module_tree import ModuleNode, module_tree
from ..text_table import format_table, sanitize, truncate
from ..units import count, format_bytes, format_time
from .grade import grade
from .profile import Profile
from .totals import LayerTotals, ProfileTotals

HEADINGS = ("layer", "forward", "backward", "time", "parameters", "activations", "memory", "")

UNRELIABLE = 0.25
"""Relative error above which the sum of the layers is reported as unreliable."""

BAR = 10
"""Length of the longest bar, in characters."""

MOST_REASON = 100
"""Most characters shown of the reason why a layer is opaque."""


@dataclass(frozen=True)
class _Line:
    """A row before its bars are known."""

    label: str
    costs: LayerTotals
    marks: str = ""


def format_profile(profile: Profile, *, tree: bool = True, depth: int | None = None) -> str:
    """Format a profile as `print(profile)` and ``stagewright show`` show it.

    A tree groups layers by module to ``depth`` levels, folding equal neighbours; otherwise each
    layer has a row.
    """
    rows = build_profile_rows(profile, tree=tree, depth=depth)
    return "\n".join([format_table(rows), "", *format_profile_details(profile)])


def build_profile_rows(
    profile: Profile, *, tree: bool = True, depth: int | None = None
) -> list[tuple[str, ...]]:
    """Build the headings, a row per layer or module, and the totals."""
    sums = ProfileTotals(profile)
    names = [entry.layer.name for entry in profile.layers]
    classes = [entry.layer.cost_class for entry in profile.layers]
    nodes = module_tree(names, classes) if tree else ()
    lines = list(
        _node_lines(profile, sums, nodes, depth, 0) if tree else _flat_lines(profile, sums)
    )
    if profile.loss is not None:
        loss = profile.loss
        costs = LayerTotals(
            loss.forward.median_s, loss.backward.median_s, 0, loss.saved_activation_bytes
        )
        lines.append(_Line("(loss)", costs))
    rows = [HEADINGS, *_rows(lines, sums), _total(profile, sums)]
    # The last column would be empty.
    if not any(line.marks for line in lines):
        rows = [row[:-1] for row in rows]
    return rows


def _flat_lines(profile: Profile, sums: ProfileTotals) -> Iterator[_Line]:
    equals = Counter(entry.layer.cost_class for entry in profile.layers)
    for index, entry in enumerate(profile.layers):
        same = equals[entry.layer.cost_class] if entry.layer.cost_class else 1
        yield _Line(entry.layer.name, sums.of([index]), _marks(profile, [index], same))


def _node_lines(
    profile: Profile,
    sums: ProfileTotals,
    nodes: Sequence[ModuleNode],
    depth: int | None,
    level: int,
) -> Iterator[_Line]:
    for node in nodes:
        shown = node.children if depth is None or level + 1 < depth else ()
        # Marks of layers with rows of their own below are left to those rows.
        hidden = [] if shown else list(node.layers)
        marks = _marks(profile, hidden, node.repeats)
        yield _Line("  " * level + node.name, sums.of(node.layers), marks)
        yield from _node_lines(profile, sums, shown, depth, level + 1)


def _marks(profile: Profile, layers: Sequence[int], repeats: int) -> str:
    """Describe how many layers are equal, and which are opaque."""
    marks = [f"x{repeats}"] if repeats > 1 else []
    opaque = [profile.layers[index].layer for index in layers if profile.layers[index].layer.opaque]
    if len(opaque) == 1:
        marks.append(f"OPAQUE: {truncate(opaque[0].opaque, MOST_REASON)}")
    elif opaque:
        marks.append(f"{len(opaque)} OPAQUE")
    return ", ".join(marks)


def _rows(lines: Sequence[_Line], sums: ProfileTotals) -> Iterator[tuple[str, ...]]:
    times = [sums.time_share(line.costs) for line in lines]
    memories = [sums.memory_share(line.costs) for line in lines]
    for line, time, memory in zip(lines, times, memories, strict=True):
        yield _cells(line, _share(time, max(times)), _share(memory, max(memories)))


def _cells(line: _Line, time: str, memory: str) -> tuple[str, ...]:
    costs = line.costs
    return (
        line.label,
        format_time(costs.forward_s),
        format_time(costs.backward_s),
        time,
        format_bytes(costs.parameter_bytes),
        format_bytes(costs.activation_bytes),
        memory,
        line.marks,
    )


def _share(share: float, largest: float) -> str:
    length = round(BAR * share / largest) if largest else 0
    return f"{share:6.1%} {'#' * length}"


def _total(profile: Profile, sums: ProfileTotals) -> tuple[str, ...]:
    # Tied weights and shared storages count once here, so this is not the sum of the rows.
    shares = (f"{share(sums.whole):6.1%}" for share in (sums.time_share, sums.memory_share))
    return _cells(_Line(count(len(profile.layers), "layer"), sums.whole), *shares)


def format_profile_details(profile: Profile) -> list[str]:
    """Describe what was measured, and the measurement's quality, a line each."""
    provenance = profile.provenance
    device = sanitize(provenance.device_name or provenance.device)
    model = sanitize(profile.model)
    lines = [f"{provenance.source.upper()} {model} on {device}, one micro-batch{_shape(profile)}"]
    lines += map(sanitize, format_basis(profile))
    lines += [sanitize(str(grade(profile))), *_reconciliation(profile), *_provenance(profile)]
    return [*lines, *map(sanitize, profile.notes)]


def format_basis(profile: Profile) -> list[str]:
    """Describe an estimate's expected error and what its numbers rest on, a line each."""
    provenance = profile.provenance
    lines = []
    if provenance.error_band is not None:
        bands = [entry.error_band for entry in profile.layers if entry.error_band is not None]
        layers = f" ({min(bands):.1%} to {max(bands):.1%} by layer)" if bands else ""
        lines.append(f"expected error {provenance.error_band:.1%}{layers}")
    if provenance.rests_on:
        lines.append(f"rests on {'; '.join(provenance.rests_on)}")
    return lines


def format_quality(profile: Profile) -> list[str]:
    """Describe the measurement's quality: verdict, sum of layers, spread of repeats, clocks."""
    return [str(grade(profile)), *_reconciliation(profile), *_spread(profile), *_clocks(profile)]


def _shape(profile: Profile) -> str:
    if not profile.inputs:
        return ""
    first = profile.inputs[0]
    return f" of {'x'.join(map(str, first.shape)) or 'one number'} {first.dtype}"


def _reconciliation(profile: Profile) -> list[str]:
    whole = profile.reconciliation
    if whole is None:
        return []
    time_s = whole.whole_forward.median_s + whole.whole_backward.median_s
    lines = [
        f"the whole model took {format_time(time_s)}; "
        f"the sum of its layers differs by {whole.relative_error:+.1%}"
    ]
    if abs(whole.relative_error) > UNRELIABLE:
        lines.append(
            "this is a large error: the machine was busy, or the layers are too small to time; "
            "measure again with a larger --budget or a larger micro-batch"
        )
    return lines


def _provenance(profile: Profile) -> list[str]:
    """Describe software and settings, spread, clocks and the document's id, a line each."""
    provenance = profile.provenance
    software = {
        "torch": provenance.torch_version,
        "CUDA": provenance.cuda_version,
        "driver": provenance.driver,
        "stagewright": provenance.stagewright_version,
    }
    settings = [f"{name} {value}" for name, value in software.items() if value]
    if provenance.num_threads is not None:
        settings.append(count(provenance.num_threads, "thread"))
    if provenance.busy_neighbours:
        settings.append(count(provenance.busy_neighbours, "busy neighbour"))
    if provenance.autocast:
        settings.append(f"autocast to {provenance.autocast}")
    if provenance.tf32 is not None and "products" in provenance.tf32:
        settings.append(f"{provenance.tf32} in tf32")
    if provenance.compiled:
        settings.append("compiled")
    lines = [", ".join(map(sanitize, settings))] if settings else []
    lines += [*_spread(profile), *_clocks(profile)]
    if provenance.calibrated_by:
        lines.append(f"calibrated by {', '.join(map(sanitize, provenance.calibrated_by))}")
    return [*lines, f"id {profile.content_id()}"]


def _spread(profile: Profile) -> list[str]:
    timings = [timing for entry in profile.layers for timing in (entry.forward, entry.backward)]
    relative = [timing.spread_s / timing.median_s for timing in timings if timing.median_s]
    if not any(relative):
        return []
    repeats = sorted(timing.repeats for timing in timings)
    times = f"{repeats[0]}" if repeats[0] == repeats[-1] else f"{repeats[0]} to {repeats[-1]}"
    return [
        f"{times} repeats per layer; interquartile range {median(relative):.1%} of the median, at "
        f"most {max(relative):.1%}"
    ]


def _clocks(profile: Profile) -> list[str]:
    clocks = profile.provenance.clocks
    if clocks is None:
        return []
    line = f"clock {clocks.before_mhz} MHz before, {clocks.after_mhz} MHz after"
    if clocks.throttled_by:
        line += f"; THROTTLED by {', '.join(map(sanitize, clocks.throttled_by))}"
    return [line]
