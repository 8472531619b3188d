"""Every document reads back what it wrote and refuses what it does not know."""

import importlib.util
import json
import math

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput, StagewrightError
from stagewright.core.graph.graph import Edge, Graph
from stagewright.core.plan.schedule import Schedule
from stagewright.core.profile.profile import Profile, SplitLayer
from stagewright.planner.plan import plan
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.schedules.make_schedule import make_schedule
from tests.builders import random_profile, two_level_cluster

PROFILE = random_profile(7, 6)
PLAN = plan(PROFILE, two_level_cluster(3))
GRAPH = Graph(
    model="Random",
    mode="export",
    inputs=PROFILE.inputs,
    outputs=(),
    layers=tuple(entry.layer for entry in PROFILE.layers),
    edges=(Edge(source=-1, target=0, tensor=PROFILE.inputs[0]),),
    boundaries=PROFILE.boundaries,
    parameters=PROFILE.parameters,
)
DOCUMENTS = [
    GRAPH,
    PROFILE,
    two_level_cluster(3, memory_bytes=2**30),
    PLAN,
    make_schedule("1f1b", 3, 4),
    plan_timeline(PLAN),
]
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[type(document).__name__ for document in DOCUMENTS]
)


@each_document
def test_reads_back_what_it_wrote(document, tmp_path):
    text = document.to_json()
    again = type(document).from_json(text)
    assert again == document
    assert again.to_json() == text
    assert again.content_id() == document.content_id()
    document.write(tmp_path / "document.json")
    assert type(document).read(tmp_path / "document.json") == document


@each_document
def test_another_version_is_refused_by_name(document):
    data = json.loads(document.to_json())
    data["schema_version"] = document.SCHEMA.replace("/", "/9")
    with pytest.raises(InvalidInput, match=r"/9\d+'.*reads " + repr(document.SCHEMA)):
        type(document).from_json(json.dumps(data))


def test_a_file_of_another_kind_or_cut_short_is_named(tmp_path):
    """It was told to be written again with this release, and no file was named."""
    path = tmp_path / "given.json"
    PLAN.write(path)
    with pytest.raises(
        InvalidInput, match=r"(?s)given\.json is not .*expected a cluster, found a plan"
    ):
        Cluster.read(path)
    path.write_text(path.read_text()[:200])
    with pytest.raises(InvalidInput, match=r"given\.json is not a valid stagewright\.plan/\d"):
        type(PLAN).read(path)


@each_document
def test_unknown_fields_and_text_that_is_not_json_are_refused(document):
    data = json.loads(document.to_json())
    with pytest.raises(InvalidInput, match="/surprise"):
        type(document).from_json(json.dumps({**data, "surprise": 1}))
    with pytest.raises(InvalidInput, match="not a valid"):
        type(document).from_json("{")


@each_document
def test_is_frozen(document):
    with pytest.raises(ValueError, match="frozen"):
        document.schema_version = "x"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1.0"])
def test_times_that_are_no_times_are_refused(number):
    text = PROFILE.to_json()
    first = json.dumps(json.loads(text)["layers"][0]["forward"]["median_s"])
    with pytest.raises(InvalidInput, match="/layers/0/forward/median_s"):
        Profile.from_json(text.replace(first, number, 1))


def test_an_error_names_every_field_at_fault_in_the_first_item_that_is_wrong():
    """Cause: errors for each of 300,000 items took a server 20 s and a gigabyte."""
    data = json.loads(PROFILE.to_json())
    data["layers"][0]["workspace_bytes"] = -1
    data["layers"][0]["forward"]["median_s"] = "fast"
    data["layers"][2]["workspace_bytes"] = -1
    with pytest.raises(InvalidInput) as caught:
        Profile.from_json(json.dumps(data))
    assert "/layers/0/workspace_bytes" in str(caught.value)
    assert "/layers/0/forward/median_s" in str(caught.value)
    assert "/layers/2" not in str(caught.value)
    assert "at least 1 item" not in str(caught.value)
    assert caught.value.field in ("/layers/0/workspace_bytes", "/layers/0/forward/median_s")


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(InvalidInput, match="cannot read"):
        Profile.read(tmp_path / "nothing.json")


def test_equal_contents_share_an_id_and_others_do_not():
    same = Profile.from_json(PROFILE.to_json(indent=2))
    assert same.content_id() == PROFILE.content_id()
    assert PROFILE.content_id().startswith("profile_")
    assert random_profile(8, 6).content_id() != PROFILE.content_id()


def test_layers_and_boundaries_must_agree():
    with pytest.raises(ValueError, match="6 layers have 5 boundaries"):
        Profile.model_validate({**dict(PROFILE), "boundaries": PROFILE.boundaries[1:]})
    layers = (PROFILE.layers[0], *PROFILE.layers[:5])
    with pytest.raises(ValueError, match=r"two layers are named 'block\.0'"):
        Profile.model_validate({**dict(PROFILE), "layers": layers})


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((("1F0",), ("1F0",)), "does not hold"),
        ((("0F1",), ("1F0",)), "micro-batch 1 of 1"),
        ((("0F0", "0F0"), ("1F0",)), "performed twice"),
        ((("0F0",), ()), "1 forwards for 2 stages"),
        ((("0X0",), ("1F0",)), "cannot read action"),
    ],
)
def test_impossible_schedules_are_refused(ranks, said):
    with pytest.raises(ValueError, match=said):
        Schedule(name="1f1b", num_microbatches=1, stage_ranks=((0,), (1,)), ranks=ranks)


def test_every_error_is_one_of_ours():
    with pytest.raises(StagewrightError):
        Cluster.from_json("[]")
    with pytest.raises(ValueError, match="not a valid"):
        Cluster.from_json("[]")


def test_a_gap_is_relative_and_safe_for_zero():
    assert PLAN.proof.gap >= 0
    assert math.isclose(PLAN.proof.model_copy(update={"value": 2.0, "lower_bound": 1.0}).gap, 0.5)
    assert PLAN.proof.model_copy(update={"value": 0.0, "lower_bound": 0.0}).gap == 0


def test_the_committed_schemas_are_current(repository):
    """Run ``python scripts/write_schemas.py`` after changing a document."""
    path = repository / "scripts" / "write_schemas.py"
    spec = importlib.util.spec_from_file_location("write_schemas", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = repository / "docs" / "schemas"
    assert {path.stem for path in folder.glob("*.json")} == set(script.DOCUMENTS)
    for name, document in script.DOCUMENTS.items():
        committed = (folder / f"{name}.json").read_text(encoding="utf-8")
        assert committed == script.schema_text(document), f"docs/schemas/{name}.json is stale"


def test_a_plan_without_sharing_or_split_layers_leaves_their_fields_out():
    written = json.loads(PLAN.to_json())
    assert not {"tensor", "strategies"} & set(written["options"])
    assert not any("tensor" in stage for stage in written["stages"])
    assert "splits" not in json.loads(PROFILE.to_json())


def test_a_stage_has_a_device_for_every_shard_of_every_replica():
    stage = PLAN.stages[0].model_copy(update={"devices": ("a", "b", "c", "d")})
    fields = {**stage.model_dump(), "replicas": 2, "tensor": 2}
    assert type(stage).model_validate(fields).tensor == 2
    with pytest.raises(ValueError, match="2 replicas of 3 devices each but 4 devices"):
        type(stage).model_validate({**fields, "tensor": 3})


def test_splits_have_an_entry_for_every_layer_and_ascend():
    layers = (SplitLayer(),) * len(PROFILE.layers)
    fields = PROFILE.model_dump()
    fields["splits"] = [{"degree": 2, "layers": layers}, {"degree": 4, "layers": layers}]
    assert [split.degree for split in Profile.model_validate(fields).splits] == [2, 4]
    with pytest.raises(ValueError, match="must ascend"):
        Profile.model_validate({**fields, "splits": fields["splits"][::-1]})
    fields["splits"] = [{"degree": 2, "layers": layers[1:]}]
    with pytest.raises(ValueError, match="has 5 layers, the profile 6"):
        Profile.model_validate(fields)
