"""Layers folded by module."""

from stagewright.core.graph.module_tree import OWN, module_tree


def drawn(nodes, level=0):
    """A tree as lines: indented names, repeats, layers."""
    for node in nodes:
        times = f" x{node.repeats}" if node.repeats > 1 else ""
        yield f"{'  ' * level}{node.name}{times} {list(node.layers)}"
        yield from drawn(node.children, level + 1)


def test_modules_hold_their_layers():
    names = ["embed", "body.0.attn", "body.0.mlp", "body.1", "head.norm.weight"]
    assert list(drawn(module_tree(names))) == [
        "embed [0]",
        "body [1, 2, 3]",
        "  0 [1, 2]",
        "    attn [1]",
        "    mlp [2]",
        "  1 [3]",
        "head.norm.weight [4]",
    ]


def test_a_module_with_one_part_is_one_line():
    names = ["model.layers.0", "model.layers.1", "lm_head"]
    assert list(drawn(module_tree(names))) == [
        "model.layers [0, 1]",
        "  0 [0]",
        "  1 [1]",
        "lm_head [2]",
    ]


def test_what_a_module_runs_itself_stands_beside_its_parts():
    assert list(drawn(module_tree(["block", "block.fc", "block@1"]))) == [
        "block [0, 1]",
        f"  {OWN} [0]",
        "  fc [1]",
        "block@1 [2]",
    ]


def test_equal_neighbours_are_one():
    names = ["wte", *[f"h.{index}" for index in range(4)], "ln"]
    assert list(drawn(module_tree(names, ["e", "b", "b", "b", "c", "n"]))) == [
        "wte [0]",
        "h [1, 2, 3, 4]",
        "  0..2 x3 [1, 2, 3]",
        "  3 [4]",
        "ln [5]",
    ]


def test_equal_neighbours_with_parts_keep_them():
    names = [f"h.{index}.{part}" for index in range(3) for part in ("attn", "mlp")]
    assert list(drawn(module_tree(names, ["a", "m"] * 3))) == [
        "h.0..2 x3 [0, 1, 2, 3, 4, 5]",
        "  attn [0, 2, 4]",
        "  mlp [1, 3, 5]",
    ]


def test_unknown_classes_are_never_equal():
    names = ["h.0", "h.1"]
    assert len(module_tree(names)[0].children) == 2
    assert len(module_tree(names, ["", ""])[0].children) == 2


def test_neighbours_of_other_parts_are_not_equal_for_equal_costs():
    names = ["h.0.a", "h.0.b", "h.1.a", "h.1.c"]
    tree = module_tree(names, ["x", "y"] * 2)
    assert [node.name for node in tree[0].children] == ["0", "1"]


def test_every_layer_is_in_the_tree_once():
    names = ["a.b.c", "a.b.d", "a.e", "f", "a.b.c@1", "g.0", "g.1"]
    leaves = []

    def walk(nodes):
        for node in nodes:
            if node.children:
                below = [index for child in node.children for index in child.layers]
                assert sorted(below) == sorted(node.layers)
                walk(node.children)
            else:
                leaves.extend(node.layers)

    walk(module_tree(names, list("xyzwxkk")))
    assert sorted(leaves) == list(range(len(names)))


def test_modules_a_thousand_deep_are_folded_as_deep_as_people_nest_them():
    """Cause: printing such a profile ended in a `RecursionError`."""
    names = [".".join("a" * depth) for depth in range(1, 1500)]
    (outer,) = module_tree(names)
    assert sorted(outer.layers) == list(range(len(names)))
