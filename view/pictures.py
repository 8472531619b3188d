"""Pictures laid out here and drawn as SVG: the model graph, a column a stage."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..core.units import count, format_bytes, format_time
from .plan_view import GraphNode, GraphView, PlanView

COLUMN, GAP, BOX_HEIGHT, BOX_GAP = 190, 70, 44, 16
TOP, MARGIN = 34, 12
MAX_CHARACTERS = 24
NUM_HUES = 8


def graph_svg(view: PlanView) -> str:
    """The folded graph; colours come from the style sheet's ``hue-0`` to ``hue-7``."""
    graph = view.graph
    places = _places(graph)
    width = MARGIN * 2 + len(view.stages) * (COLUMN + GAP) - GAP
    height = max(y for _, y in places) + BOX_HEIGHT + MARGIN
    lines = [
        f'<svg class="graph" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="The model folded by module, one column a stage">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
        *_columns(view, height),
        *_edges(graph, places),
        *(
            line
            for node, place in zip(graph.nodes, places, strict=True)
            for line in _box(node, *place)
        ),
        "</svg>",
    ]
    return "\n".join(lines)


def _places(graph: GraphView) -> list[tuple[int, int]]:
    """The upper left corner of each box."""
    rows: dict[int, int] = {}
    places = []
    for node in graph.nodes:
        row = rows.get(node.stage, 0)
        rows[node.stage] = row + 1
        places.append((MARGIN + node.stage * (COLUMN + GAP), TOP + row * (BOX_HEIGHT + BOX_GAP)))
    return places


def _columns(view: PlanView, height: int) -> Iterator[str]:
    for number, stage in enumerate(view.stages):
        x = MARGIN + number * (COLUMN + GAP)
        yield (
            f'<rect class="column" x="{x - 8}" y="4" width="{COLUMN + 16}" '
            f'height="{height - 8}" rx="8"/>'
        )
        title = f"stage {number}, {count(stage.num_layers, 'layer')}"
        yield f'<text class="heading" x="{x + COLUMN / 2}" y="22">{title}</text>'


def _box(node: GraphNode, x: int, y: int) -> Iterator[str]:
    facts = [count(node.num_layers, "layer")]
    if node.time_s is not None:
        facts.append(format_time(node.time_s))
    if node.parameter_bytes:
        facts.append(format_bytes(node.parameter_bytes))
    name = escape(_short(node.name))
    yield f'<g class="hue-{node.stage % NUM_HUES}"><title>{escape(node.name)}</title>'
    if node.repeats > 1:
        yield (
            f'<rect class="behind" x="{x + 4}" y="{y - 4}" width="{COLUMN}" '
            f'height="{BOX_HEIGHT}" rx="6"/>'
        )
    yield f'<rect class="box" x="{x}" y="{y}" width="{COLUMN}" height="{BOX_HEIGHT}" rx="6"/>'
    yield f'<text class="name" x="{x + 10}" y="{y + 18}">{name}</text>'
    yield f'<text class="facts" x="{x + 10}" y="{y + 35}">{escape(", ".join(facts))}</text></g>'


def _edges(graph: GraphView, places: list[tuple[int, int]]) -> Iterator[str]:
    for edge in graph.edges:
        (x1, y1), (x2, y2) = places[edge.source], places[edge.target]
        middle, half = BOX_HEIGHT / 2, COLUMN / 2
        if x1 == x2 and edge.target == edge.source + 1:
            yield _line(f"M{x1 + half} {y1 + BOX_HEIGHT} V{y2 - 1}", "")
        elif x1 == x2:
            out = x1 + COLUMN + 14
            yield _line(
                f"M{x1 + COLUMN} {y1 + middle} C{out} {y1 + middle} {out} {y2 + middle} "
                f"{x2 + COLUMN + 1} {y2 + middle}",
                "far",
            )
        else:
            near = x2 - x1 == COLUMN + GAP
            bend = GAP / 2
            yield _line(
                f"M{x1 + COLUMN} {y1 + middle} C{x1 + COLUMN + bend} {y1 + middle} "
                f"{x2 - bend} {y2 + middle} {x2 - 1} {y2 + middle}",
                "cut" if near and edge.target == edge.source + 1 else "far",
            )
            if near and edge.target == edge.source + 1 and edge.size_bytes:
                label = format_bytes(edge.size_bytes)
                yield f'<text class="sent" x="{x2 - bend}" y="{y2 + 6}">{label}</text>'


def _line(path: str, kind: str) -> str:
    return f'<path class="edge {kind}" d="{path}" marker-end="url(#arrow)"/>'


def _short(name: str) -> str:
    """The end of a long name, which tells more than its beginning."""
    return name if len(name) <= MAX_CHARACTERS else "…" + name[1 - MAX_CHARACTERS :]
