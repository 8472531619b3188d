"""Layers as a tree of boxes, in the order they run."""

from __future__ import annotations

import random

import pytest

from stagewright.view.module_parts import MAX_PARTS, ModuleParts, choose_open_parts


def shown(parts, depth=0):
    """An outline: name, layers, repeats."""
    lines = []
    for part in parts:
        times = f" x{part.repeats}" if part.repeats > 1 else ""
        lines.append("  " * depth + f"{part.name} {part.count}{times}")
        lines += shown(part.parts, depth + 1)
    return lines


def tree(names, classes=()):
    return ModuleParts(names, classes).between(0, len(names))


def test_modules_open_into_their_parts():
    names = ["wte", "h.0.attn.q", "h.0.attn.k", "h.0.mlp", "ln"]
    assert shown(tree(names)) == [
        "wte 1",
        "h.0 3",
        "  h.0.attn 2",
        "    h.0.attn.q 1",
        "    h.0.attn.k 1",
        "  h.0.mlp 1",
        "ln 1",
    ]


def test_equal_neighbours_are_one_box_that_opens_into_each():
    names = [f"h.{block}.{part}" for block in range(3) for part in ("attn", "mlp")]
    assert shown(tree(names, ["a", "m"] * 3)) == [
        "h.0..2 6 x3",
        *(
            line
            for block in range(3)
            for line in (f"  h.{block} 2", f"    h.{block}.attn 1", f"    h.{block}.mlp 1")
        ),
    ]
    assert [part.repeats for part in tree(names, ["a", "m", "a", "other", "a", "m"])] == [1]
    assert "x" not in "".join(shown(tree(names)))  # what is not known is not equal


def test_a_module_that_runs_in_two_pieces_has_two_boxes():
    names = ["enc.0", "enc.1", "dec.0", "enc.2", "enc.3"]
    assert [part.name for part in tree(names)] == ["enc", "dec.0", "enc"]


def test_many_neighbours_are_put_together():
    parts = tree([f"layer{index}" for index in range(1000)])
    assert len(parts) <= MAX_PARTS
    assert parts[0].name == "layer0 … layer71"
    assert len(parts[0].parts) <= MAX_PARTS


@pytest.mark.parametrize("seed", range(6))
def test_every_box_opens_into_just_its_own_layers(seed):
    draw = random.Random(seed)
    count = draw.choice([1, 7, 300])
    names = [".".join(draw.choice("ab") for _ in range(draw.randint(1, 5))) for _ in range(count)]
    classes = [draw.choice(["", "x", "y"]) for _ in range(count)]

    def check(parts, first, last):
        assert 1 <= len(parts) <= MAX_PARTS
        for part in parts:
            assert part.first == first
            first += part.count
            if part.parts:
                assert len(part.parts) > 1
                check(part.parts, part.first, first)
            else:
                assert part.count == 1
                assert part.name == names[part.first]
        assert first == last

    check(tree(names, classes), 0, count)


def test_modules_a_thousand_deep_are_opened_as_deep_as_people_do():
    names = [".".join("a" * depth) for depth in range(1, 1200)]
    (outer,) = tree(names)
    assert outer.count == len(names)


def test_what_is_open_at_first_fits_a_column():
    names = [f"m{module}.{part}" for module in range(4) for part in range(6)]
    parts = tree(names)
    assert [part.name for part in parts if part in choose_open_parts(parts, 14)] == ["m0", "m1"]
    assert choose_open_parts(parts, 4) == set()
    equal = tree([f"h.{block}.{part}" for block in range(2) for part in "ab"], ["a", "b"] * 2)
    assert equal[0].parts
    assert choose_open_parts(equal, 14) == set()
