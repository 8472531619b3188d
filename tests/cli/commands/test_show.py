"""`show` prints each kind of document, and draws plans."""

import json
from xml.etree import ElementTree

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.graph.graph import Boundary, Graph, Layer, Operation, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Plan
from stagewright.core.profile.profile import Profile


@pytest.fixture
def plan_file(run, profile_file, tmp_path):
    path = tmp_path / "plan.json"
    assert run("plan", profile_file, "--devices", "2x1GiB", "-o", path).code == 0
    return path


def test_profile_is_a_row_per_layer(run, profile_file):
    ran = run("show", profile_file)
    assert ran.code == 0
    lines = ran.stdout.splitlines()
    assert " ".join(lines[2].split()).startswith("rung 10 ms 20 ms 100.0% ##########")
    assert " ".join(lines[3].split()) == "0 1 ms 2 ms 10.0% # 1.0 MiB 1.0 MiB 25.0% ##"
    assert " ".join(lines[7].split()) == "4 layers 10 ms 20 ms 100.0% 4.0 MiB 4.0 MiB 100.0%"
    assert "next: stagewright plan" in ran.stderr
    flat = run("show", profile_file, "--flat").stdout.splitlines()
    assert flat[2].startswith("rung.0 ")
    assert len(run("show", profile_file, "--depth", "1").stdout.splitlines()) == len(flat) - 3


def test_folding_is_for_profiles_and_not_both_ways(run, profile_file, cluster_file):
    assert "cannot be combined" in run("show", profile_file, "--flat", "--depth", "1").stderr
    for words in (["--flat"], ["--depth", "2"]):
        ran = run("show", cluster_file, *words)
        assert (ran.code, ran.stdout) == (2, "")
        assert "--depth and --flat are for profiles" in ran.stderr


def test_cluster_lists_devices_and_links(run, cluster_file):
    ran = run("show", cluster_file)
    assert ran.code == 0
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "1GiB:0..1GiB:1 2 1GiB 1.0 GiB x 1" in lines
    assert "link 2 10 us 11.2 GiB/s as bandwidth" in lines


def test_cluster_of_many_has_a_row_for_each_run_of_equal_devices(run, tmp_path):
    devices = [Device(name=f"a:{index}", kind="a", speed=2.5) for index in range(300)]
    levels = (
        LinkLevel(group_size=100, all_reduce_bandwidth_bytes_per_s=2**30),
        LinkLevel(group_size=400, shared=True),
    )
    devices.append(Device(name="b:0", kind="b", memory_bytes=2**20))
    Cluster(devices=tuple(devices), levels=levels).write(tmp_path / "many.json")
    lines = [" ".join(line.split()) for line in run("show", "many.json").stdout.splitlines()]
    assert lines[2:4] == ["a:0..a:299 300 a none x 2.5", "b:0 1 b 1.0 MiB x 1"]
    assert lines[-2].endswith("1.0 GiB/s")
    assert lines[-1].startswith("link 400, shared")


def test_plan_prints_as_in_python(run, plan_file):
    ran = run("show", plan_file)
    assert (ran.code, ran.stdout) == (0, f"{Plan.read(plan_file)}\n")


@pytest.mark.parametrize(
    ("fixture", "kind"),
    [("profile_file", Profile), ("plan_file", Plan), ("cluster_file", Cluster)],
)
def test_json_is_the_document_itself(run, request, fixture, kind):
    path = request.getfixturevalue(fixture)
    ran = run("show", path, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert kind.from_json(ran.stdout) == kind.read(path)


def test_plan_is_drawn_and_traced(run, plan_file):
    ran = run("show", plan_file, "--svg", "plan.svg", "--trace", "trace.json")
    assert ran.code == 0, ran.stderr
    assert ElementTree.parse("plan.svg").getroot().tag.endswith("svg")
    with open("trace.json") as file:
        trace = json.load(file)
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    stages = Plan.read(plan_file).num_stages
    computed = [event for event in events if event.get("ph") == "X"]
    assert len(computed) >= stages * 8 * 2


def test_only_plans_are_drawn(run, profile_file, tmp_path):
    ran = run("show", profile_file, "--svg", "plan.svg")
    assert ran.code == 2
    assert "--svg, --trace, --html and --gantt are for plans" in ran.stderr
    assert not (tmp_path / "plan.svg").exists()


def test_other_documents_are_named(run, tmp_path):
    (tmp_path / "other.json").write_text('{"schema_version": "stagewright.schedule/1"}')
    ran = run("show", "other.json")
    assert ran.code == 2
    assert "other.json is stagewright.schedule/1; expected stagewright.profile/1" in ran.stderr


def test_graph_is_a_row_per_layer(run, tmp_path):
    hidden = TensorSpec(name="hidden", shape=(8, 64), dtype="float32", requires_grad=True)
    graph = Graph(
        model="Tied",
        mode="export",
        inputs=(),
        outputs=(),
        layers=(
            Layer(name="embed", module_type="Embedding", parameter_bytes=2**20),
            Layer(name="body", module_type="Mixture", opaque="branches on data"),
            Layer(name="head", module_type="Linear", parameter_bytes=2**20),
        ),
        boundaries=(
            Boundary(after=0, tensors=(hidden,)),
            Boundary(after=1, tensors=(hidden,), legal=False, reason="changed in place"),
        ),
        parameters=(
            Parameter(names=("embed.weight", "head.weight"), size_bytes=2**20, layers=(0, 2)),
        ),
        operations=(Operation(name="a", target="embed", kind="module", layer=0),),
        notes=("a note",),
    )
    graph.write(tmp_path / "graph.json")
    ran = run("show", "graph.json")
    assert ran.code == 0, ran.stderr
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert lines[2:5] == [
        "embed Embedding 1 1.0 MiB 2.0 KiB, 2.0 KiB back",
        "body Mixture 0 0 B no cut: changed in place OPAQUE: branches on data",
        "head Linear 0 1.0 MiB",
    ]
    assert lines[6:] == [
        "Tied, captured by export in training mode",
        "3 layers, 1 legal cut, 1.0 MiB of parameters, 1 of them tied",
        f"id {graph.content_id()}",
        "a note",
        "cannot be measured without the model's code",
    ]
    assert ran.stderr == "next: stagewright profile --help\n"
