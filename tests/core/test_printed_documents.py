"""Documents print as the tables the command line shows, not as their fields."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Graph, Layer, NotRebuildable
from tests.core.affine import affine_profile

GRAPH = Graph(
    model="Routed",
    mode="export",
    inputs=(),
    outputs=(),
    layers=(Layer(name="router", module_type="Router", opaque="branches on data"),),
    not_rebuildable=(
        NotRebuildable(operation="router", layer="router", reason="a module of type Router"),
        NotRebuildable(reason="another"),
    ),
)


@pytest.mark.parametrize(
    ("document", "lines"),
    [
        (affine_profile(2), ["body", "MEASURED Affine on Fast CPU, one micro-batch of 2x16"]),
        (Cluster.parse("2x1GiB"), ["1GiB:0..1GiB:1      2  1GiB", "link      2"]),
        (
            GRAPH,
            [
                "router  Router",
                "cannot be measured without the model's code: a module of type Router, in router "
                "(and 1 more reason)",
            ],
        ),
    ],
)
def test_documents_print_as_tables(document, lines):
    """Cause: `print(profile)` filled screens with field names."""
    printed = str(document).splitlines()
    assert all(any(line.startswith(start) for line in printed) for start in lines)
    assert not any("schema_version" in line for line in printed)


def test_a_graph_that_can_be_rebuilt_says_nothing_of_it():
    assert "without the model's code" not in str(
        GRAPH.model_copy(update={"rebuildable": True, "not_rebuildable": ()})
    )
