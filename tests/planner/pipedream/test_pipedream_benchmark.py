"""benchmarks/pipedream.py: every objective on a graph made by hand, and how copies are priced."""

import importlib
import itertools
import json
import tracemalloc
from pathlib import Path

import pytest

from stagewright.core.plan.plan import PlanOptions
from stagewright.formats.pipedream_graph import parse_pipedream_graph, to_profile
from stagewright.planner.pipedream.objective import PipeDreamStage
from stagewright.planner.price_split import plan_from_balance

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("STAGEWRIGHT_NUMBA", "0")  # nothing here is worth compiling


def graph(times_ms=(30, 10, 20, 40), parameter_bytes=(1000, 0, 4000, 9000), sent_bytes=5000):
    """A chain; the forward is a third of each time."""
    nodes = [
        f"node{number} -- Linear -- forward_compute_time={time_ms / 3}, "
        f"backward_compute_time={time_ms * 2 / 3}, activation_size={sent_bytes}, "
        f"parameter_size={size}"
        for number, (time_ms, size) in enumerate(zip(times_ms, parameter_bytes, strict=True))
    ]
    edges = [f"\tnode{number} -- node{number + 1}" for number in range(len(nodes) - 1)]
    return "\n".join([*nodes, *edges])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hand.txt").write_text(graph(), encoding="utf-8")
    return tmp_path


def rows(capsys, folder, *arguments):
    pipedream = importlib.import_module("pipedream")
    assert pipedream.main([str(folder), "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("objective", ["pipedream", "step_time", "throughput"])
@pytest.mark.parametrize(
    "cluster",
    [
        ["--machines", "4", "--bandwidths", "1e6"],
        ["--machines", "2", "2", "--bandwidths", "1e7", "1e6"],
        ["--machines", "1", "2", "--bandwidths", "1e7", "1e6"],
        ["--machines", "1", "--bandwidths", "1e6"],
    ],
)
def test_every_objective_answers_with_a_bound(capsys, folder, objective, cluster):
    (row,) = rows(capsys, folder, "--objective", objective, *cluster)
    assert (row["objective"], row["profile"]) == (objective, "hand")
    assert 0 < row["lower_bound_s"] <= row["time_s"]
    assert row["gap"] <= 1e-4
    if objective == "pipedream":
        assert row["time_s"] >= 0.1 / 4
        return
    assert sum(stage["layers"] for stage in row["stages"]) == 4
    assert row["objective_lower_bound_s"] <= row["objective_s"]
    assert sum(stage["replicas"] for stage in row["pipedream_stages"]) == row["microbatches"] / 4
    assert row["gain"] == row["pipedream_time_s"] / row["time_s"] - 1
    if objective == "step_time" and len(row["machines"]) == 1:
        assert row["gain"] >= 0, "PipeDream's plan for one level competes with ours"


def test_all_columns_are_written_into_a_document(capsys, folder):
    document, expected = folder / "document.md", folder / "expected.json"
    marks = "before\n<!-- written by benchmarks/pipedream.py -->\n<!-- end -->\nafter\n"
    document.write_text(marks, encoding="utf-8")
    wanted = rows(capsys, folder, "--all-columns")
    wanted[0]["time_s"] *= 2
    expected.write_text(json.dumps(wanted), encoding="utf-8")
    arguments = ["--all-columns", "--expected", str(expected), "--write", str(document)]
    pipedream = importlib.import_module("pipedream")
    assert pipedream.main([str(folder), *arguments]) == 1, "one value is not the expected one"
    written = document.read_text(encoding="utf-8")
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert written.count("| hand |") == 12
    assert "3 of 4 expected values equal to 1e-9" in written
    assert "**no**" in written


def test_what_does_not_fit_is_said(capsys, folder):
    pipedream = importlib.import_module("pipedream")
    cluster = ["--machines", "2", "--bandwidths", "1e6", "--objective", "step_time"]
    assert pipedream.main([str(folder), *cluster, "--memory-gb", "1e-6"]) == 2
    assert "1000 bytes" in capsys.readouterr().err


def copies(profile, bandwidths):
    """Two machines of three, each with the first two layers on two devices, the rest on one."""
    price = importlib.import_module("pipedream_study.price")
    results = importlib.import_module("pipedream_study.results")
    inner = (PipeDreamStage(("0", "1"), 2), PipeDreamStage(("2", "3"), 1))
    stage = PipeDreamStage(("0", "1", "2", "3"), 2, inner)
    assert price.how_placed([stage]) == "copies"
    assert price.how_placed([stage, stage]) == "moved"
    assert price.how_placed([PipeDreamStage(stage.node_ids, 1, inner)]) == "as planned"
    assert price.flat_stages([stage]) == ([2, 2], [4, 2])
    options = PlanOptions(num_microbatches=24, max_replicas=None)
    column, settings = results.Column("", (3, 2), bandwidths), results.Settings()
    return price.copies_step_s(profile, options, column, settings, stage), options


def test_copies_of_a_pipeline_are_a_pipeline_of_replicas():
    """Where all links are alike and nothing is summed, it does not matter who is on which."""
    profile = to_profile(parse_pipedream_graph(graph(parameter_bytes=(0, 0, 0, 0))))
    step_s, options = copies(profile, (1e6, 1e6))
    results = importlib.import_module("pipedream_study.results")
    cluster = results.Column("", (6,), (1e6,)).cluster(0.0, None)
    flat = plan_from_balance(profile, cluster, options, [2, 2], replicas=[4, 2])
    assert step_s == pytest.approx(flat.step_time_s, rel=1e-12)


def test_copies_sum_gradients_inside_machines_and_between_them():
    """By hand: the last stage's 13 kB over two machines at 1 kB/s outlast everything else."""
    free = to_profile(parse_pipedream_graph(graph(parameter_bytes=(0, 0, 0, 0))))
    profile = to_profile(parse_pipedream_graph(graph()))
    work_s, _ = copies(free, (1e9, 1e3))
    step_s, _ = copies(profile, (1e9, 1e3))
    # The last stage is done once its gradients have left it: one backward of the first stage
    # (26.7 ms) and a message before the step ends.
    back_s = (30 + 10) * 2 / 3 / 1000 + 5000 / 1e9
    assert step_s == pytest.approx(work_s - back_s + 13.0, rel=1e-9)


def wide_graph(branches, length):
    """Branches side by side, of which any lengths may be done: (length + 1) ^ branches states."""
    fields = "forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=8"
    nodes = [f"in -- Linear -- {fields}", f"out -- Linear -- {fields}"]
    edges = []
    for branch in range(branches):
        names = ["in", *(f"n{branch}x{step}" for step in range(length)), "out"]
        nodes += [f"{name} -- Linear -- {fields}" for name in names[1:-1]]
        edges += [f"\t{one} -- {other}" for one, other in itertools.pairwise(names)]
    return "\n".join([*nodes, *edges])


def test_what_is_refused_is_named_and_the_others_are_printed(capsys, folder, monkeypatch):
    """Cause: one profile with too many states took a gigabyte and everything solved with it."""
    pipedream = importlib.import_module("pipedream")
    monkeypatch.setattr(importlib.import_module("pipedream_study.graphs"), "MAX_BYTES", 10**7)
    (folder / "broken.txt").write_text("node1 -- Linear", encoding="utf-8")
    (folder / "wide.txt").write_text(wide_graph(12, 9), encoding="utf-8")  # 10^12 states
    tracemalloc.start()
    code = pipedream.main([str(folder), "--json", "--machines", "2", "--bandwidths", "1e6"])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    said = capsys.readouterr()
    assert code == 3
    assert [json.loads(line)["profile"] for line in said.out.splitlines()] == ["hand"]
    refused = said.err.splitlines()
    assert any(line.startswith("refused: broken: ") for line in refused)
    assert any(
        line.startswith("refused: wide, pipedream: ") and "states" in line for line in refused
    )
    assert peak_bytes < 10**8


def test_states_are_counted_as_they_are_listed():
    graphs = importlib.import_module("pipedream_study.graphs")
    for branches, length in ((1, 5), (2, 3), (3, 4)):
        made = graphs.to_cost_graph(parse_pipedream_graph(wide_graph(branches, length).encode()))
        start = made.dag.sources[0]
        listed = graphs.enumerate_grown_downsets(made.dag, start, 10**6)
        assert len(listed) == (length + 1) ** branches + 1
        assert graphs.count_grown_downsets(made.dag, start, 10**6) == len(listed)
        assert graphs.count_grown_downsets(made.dag, start, len(listed) - 1) is None
