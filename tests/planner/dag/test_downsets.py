"""Predecessor-closed sets equal those found by trying all sets of nodes."""

import random

import numpy as np
import pytest

from benchmarks.pipedream_study.graphs import enumerate_grown_downsets
from stagewright.core.errors import InvalidInput
from stagewright.planner.dag import downsets
from stagewright.planner.dag.downsets import (
    Dag,
    as_rows,
    as_set,
    contract,
    contract_chains,
    contract_parallel,
    contract_series_parallel,
    enumerate_downsets,
    membership,
    nodes_of,
)

DIAMOND = Dag(4, ((0, 1), (0, 2), (1, 3), (2, 3)))


def random_dag(draw, num_nodes, density=0.35):
    names = list(range(num_nodes))
    draw.shuffle(names)
    return Dag(
        num_nodes,
        tuple(
            (names[source], names[target])
            for target in range(num_nodes)
            for source in range(target)
            if draw.random() < density
        ),
    )


def is_closed(dag, members):
    return all(not dag.predecessors[node] & ~members for node in nodes_of(members))


def sets_of(rows):
    return [as_set(row) for row in rows]


def grown_by_hand(dag, start):
    """PipeDream's definition, set by set."""
    found, waiting = set(), [dag.closures[start]]
    while waiting:
        state = waiting.pop()
        if state in found:
            continue
        found.add(state)
        for node in nodes_of(state):
            waiting += [state | dag.closures[target] for target in nodes_of(dag.successors[node])]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_all_downsets_are_found_once_in_order_of_size(seed):
    draw = random.Random(seed)
    dag = random_dag(draw, draw.randint(1, 8))
    found = sets_of(enumerate_downsets(dag, 256))
    assert sorted(found) == [
        members for members in range(2**dag.num_nodes) if is_closed(dag, members)
    ]
    assert [members.bit_count() for members in found] == sorted(map(int.bit_count, found))
    assert (found[0], found[-1]) == (0, 2**dag.num_nodes - 1)


@pytest.mark.parametrize("seed", range(60))
def test_grown_downsets_are_those_of_the_definition(seed):
    draw = random.Random(seed)
    dag = random_dag(draw, draw.randint(1, 9), density=0.25)
    for start in dag.sources:
        found = sets_of(enumerate_grown_downsets(dag, start, 512))
        assert sorted(found) == sorted(grown_by_hand(dag, start))


def test_from_a_single_source_they_are_all_but_the_empty_one():
    assert (
        sets_of(enumerate_grown_downsets(DIAMOND, 0, 99))
        == sets_of(enumerate_downsets(DIAMOND, 99))[1:]
    )


def test_a_source_is_not_taken_before_it_is_needed():
    dag = Dag(3, ((0, 2), (1, 2)))
    assert sets_of(enumerate_grown_downsets(dag, 0, 9)) == [0b001, 0b111]


def test_the_limit_is_the_number_allowed():
    assert len(enumerate_downsets(DIAMOND, 6)) == 6
    assert enumerate_downsets(DIAMOND, 5) is None
    assert enumerate_downsets(Dag(200, ()), 1000) is None


def test_wide_graphs_need_several_words():
    chain = Dag(150, tuple((node, node + 1) for node in range(149)))
    rows = enumerate_downsets(chain, 151)
    assert rows.shape == (151, 3)
    np.testing.assert_array_equal(membership(rows, 150).sum(axis=1), np.arange(151))
    sets = [0, 1, 1 << 64, (1 << 150) - 1]
    assert sets_of(as_rows(sets, 150)) == sets


def test_equal_hashes_of_different_sets_do_no_harm(monkeypatch):
    monkeypatch.setattr(downsets, "_hashes", lambda rows: np.zeros(len(rows), dtype=np.uint64))
    assert sets_of(downsets.drop_repeats(as_rows([5, 3, 5, 9, 3, 1], 4))) == [1, 3, 5, 9]


def test_the_order_takes_the_smallest_node_first():
    assert Dag(5, ((4, 0), (3, 1))).order == (2, 3, 1, 4, 0)


@pytest.mark.parametrize(
    ("num_nodes", "edges", "said"),
    [
        (2, ((0, 2),), "from node 0 to 2; nodes are 0 to 1"),
        (2, ((-1, 0),), "from node -1"),
        (3, ((0, 1), (1, 2), (2, 1)), r"cycle among the nodes \[1, 2\]"),
        (1, ((0, 0),), "cycle"),
    ],
)
def test_what_is_no_acyclic_graph_is_refused(num_nodes, edges, said):
    with pytest.raises(InvalidInput, match=said):
        Dag(num_nodes, edges)


def test_chains_become_one_node():
    dag = Dag(6, ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)))
    merged = contract_chains(dag)
    assert merged.members == (0b11, 0b100, 0b1000, 0b110000)
    assert merged.dag.edges == ((0, 1), (0, 2), (1, 3), (2, 3))


def test_parallel_nodes_become_one_node():
    assert contract_parallel(DIAMOND).members == (0b1, 0b110, 0b1000)


def test_a_series_parallel_graph_becomes_one_node_if_need_be():
    dag = Dag(7, ((0, 1), (1, 2), (0, 3), (2, 4), (3, 4), (4, 5), (5, 6)))
    assert contract_series_parallel(dag, 2).members == (0b1111111,)
    assert contract_series_parallel(dag, 99).dag == dag


def test_what_cannot_be_merged_is_left():
    bipartite = Dag(4, ((0, 2), (0, 3), (1, 3)))
    assert contract_series_parallel(bipartite, 1).dag == bipartite


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("step", [contract_chains, contract_parallel])
def test_downsets_of_a_merged_graph_are_downsets(seed, step):
    dag = random_dag(random.Random(seed), 7)
    merged = step(dag)
    found = [merged.expand(members) for members in sets_of(enumerate_downsets(merged.dag, 256))]
    assert len(set(found)) == len(found)
    assert all(is_closed(dag, members) for members in found)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[0], [1], [2]], "each once"),
        ([[0, 1], [1, 2, 3]], "node 1 is in two"),
        ([[0, 3], [1], [2]], "cycle"),
    ],
)
def test_groups_that_are_no_partition_or_leave_a_cycle_are_refused(groups, said):
    with pytest.raises(InvalidInput, match=said):
        contract(DIAMOND, groups)
