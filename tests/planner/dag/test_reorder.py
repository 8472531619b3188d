"""A profile in another order of its layers, worked out from its edges."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.graph.graph import MODEL_INPUT, Boundary, Edge, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import SavedStorage
from stagewright.planner.dag.reorder import reorder_profile
from stagewright.planner.validation.reference_cost import ReferenceSplit
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile
from tests.planner.written import written


def tensor(name, size_bytes):
    return TensorSpec(name=name, shape=(size_bytes,), dtype="uint8", requires_grad=True)


X, A, B, C, D = tensor("x", 1), tensor("a", 2), tensor("b", 4), tensor("c", 8), tensor("d", 16)


def fork(*, illegal=()):
    """Layer 0 is read by 1 and by 2; 3 reads both. What layer 1 makes is handed out as well."""
    edges = (
        Edge(source=MODEL_INPUT, target=0, tensor=X),
        Edge(source=0, target=1, tensor=A),
        Edge(source=0, target=2, tensor=A),
        Edge(source=1, target=3, tensor=B),
        Edge(source=2, target=3, tensor=C),
        Edge(source=3, target=4, tensor=D),
    )
    crossing = ((A,), (A, B), (B, C), (B, D))
    chain = chain_profile([1, 2, 3, 4, 5])
    fields = {
        "edges": edges,
        "boundaries": tuple(
            Boundary(after=after, tensors=tensors, legal=after not in illegal, reason="why not")
            for after, tensors in enumerate(crossing)
        ),
        "parameters": (
            Parameter(names=("shared",), size_bytes=4, numel=1, layers=(1, 3)),
            Parameter(names=("own",), size_bytes=4, numel=1, layers=(2,)),
        ),
        "storages": (SavedStorage(size_bytes=3, layers=(0, 2)),),
    }
    return type(chain).model_validate({**dict(chain), **fields})


def crossing(profile):
    return [sorted(entry.name for entry in gap.tensors) for gap in profile.boundaries]


def test_the_own_order_changes_nothing():
    profile = fork()
    assert crossing(reorder_profile(profile, range(5))) == crossing(profile)


def test_branches_swap_places():
    profile = fork()
    other = reorder_profile(profile, (0, 2, 1, 3, 4))
    assert [entry.forward.median_s for entry in other.layers] == [1, 3, 2, 4, 5]
    assert crossing(other) == [["a"], ["a", "c"], ["b", "c"], ["b", "d"]]
    assert [entry.layers for entry in other.parameters] == [(2, 3), (1,)]
    assert other.storages[0].layers == (0, 1)


def test_a_layer_never_comes_before_what_it_reads():
    with pytest.raises(InvalidInput, match=r"'layer.3' comes before 'layer.2', from which"):
        reorder_profile(fork(), (0, 1, 3, 2, 4))


def test_layers_with_no_legal_cut_between_them_stay_neighbours():
    with pytest.raises(InvalidInput, match="layers 1 and 2 are taken apart"):
        reorder_profile(fork(illegal=(1,)), (0, 2, 1, 3, 4))


def test_edges_have_to_account_for_the_boundaries():
    profile = fork()
    fewer = type(profile).model_validate({**dict(profile), "edges": profile.edges[:-1]})
    assert crossing(reorder_profile(fewer, range(5))) == crossing(
        profile
    )  # as if d were handed out
    wrong = (*profile.edges, Edge(source=0, target=4, tensor=tensor("a", 2)))
    more = type(profile).model_validate({**dict(profile), "edges": wrong})
    with pytest.raises(InvalidInput, match="do not account for what crosses"):
        reorder_profile(more, range(5))


def test_a_reordered_plan_holds_where_it_was_asked_for():
    profile, order = fork(), (0, 2, 1, 3, 4)
    options = PlanOptions(layer_order="any")
    cluster = Cluster.uniform(2)
    split = ReferenceSplit((2, 3), ((0,), (1,)), reorder_profile(profile, order), cluster, options)
    fields = {"layer_order": order, "profile_id": profile.content_id()}
    made = Plan.model_validate({**dict(written(split)), **fields})
    validate(made, profile, cluster)
    for changes, named in (
        ({"options": PlanOptions()}, "its layers are reordered despite layer_order='given'"),
        ({"layer_order": ()}, "its layers are not the profile's"),
        ({"layer_order": (0, 1, 2, 3, 4)}, "its layers are not the profile's"),
        ({"layer_order": (0, 2, 3, 1, 4)}, "comes before"),
    ):
        with pytest.raises(PlanMismatch, match=named):
            validate(Plan.model_validate({**dict(made), **changes}), profile, cluster)
