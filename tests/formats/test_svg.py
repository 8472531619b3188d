"""The picture is well-formed, its widths are true, and names cannot break it."""

import xml.etree.ElementTree as ElementTree

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Parameter
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.plan.schedule import Work
from stagewright.core.plan.timeline import Timeline
from stagewright.formats.svg import CHART_WIDTH, LABEL_WIDTH, MARGIN, timeline_svg
from stagewright.planner.plan import plan
from stagewright.planner.simulator.plan_timeline import plan_timeline
from tests.builders import chain_profile, random_profile

SVG = "{http://www.w3.org/2000/svg}"


def picture(made):
    timeline = plan_timeline(made)
    text = timeline_svg(made, timeline)
    assert text == timeline_svg(made, timeline)
    return timeline, ElementTree.fromstring(text), text


def boxes(root, kind):
    return [(float(rect.get("x")), float(rect.get("width"))) for rect in root.iter(f"{SVG}rect")
            if rect.get("class") == kind and rect.get("height") == "26"]  # fmt: skip


def test_one_box_an_action_with_its_true_place_and_width():
    timeline, root, _ = picture(plan(random_profile(2, 9), Cluster.uniform(3)))
    for kind, work in (("forward", Work.FORWARD), ("backward", Work.BACKWARD)):
        events = [event for event in timeline.events if event.kind is work]
        found = boxes(root, kind)
        assert len(found) == len(events)
        for (x, width), event in zip(found, events, strict=True):
            scale = CHART_WIDTH / timeline.step_time_s
            assert x == pytest.approx(MARGIN + LABEL_WIDTH + event.start_s * scale, abs=0.006)
            assert width == pytest.approx((event.end_s - event.start_s) * scale, abs=0.006)


def test_says_what_it_shows():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2), num_microbatches=2)
    _, root, text = picture(made)
    words = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    for said in ("Chain: 2 stages, 1f1b, 2 micro-batches", "step 9 s", "bubble 33.3%", "MEASURED",
                 "device:1, 1 layer", "forward", "backward", "idle", "2 s"):  # fmt: skip
        assert said in words
    assert "prefers-color-scheme: dark" in text
    assert root.find(f"{SVG}title") is not None


def test_the_sum_over_tied_weights_is_drawn():
    profile = chain_profile([1, 1])
    tied = Parameter(names=("head", "embedding"), size_bytes=8, numel=2, layers=(0, 1))
    profile = type(profile).model_validate({**dict(profile), "parameters": (tied,)})
    made = plan(profile, Cluster.uniform(2, latency_s=1e-3))
    assert made.tied_sync_time_s > 0
    _, root, _ = picture(made)
    assert len(boxes(root, "reduce")) == made.num_stages


def test_names_from_a_model_are_text_and_nothing_else():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2))
    hostile = made.model_copy(update={"model": "<script>alert(1)</script>&"})
    _, root, text = picture(hostile)
    assert "<script>" not in text
    assert root.find(f".//{SVG}script") is None


def test_characters_that_no_picture_may_have_are_written_as_escapes():
    """Cause: a control character in a model's name made a file that no program opens."""
    made = plan(chain_profile([1.0, 1.0]), Cluster.parse("2x24GB"))
    made = made.model_copy(update={"model": "a\x07\u202eb"})
    root = ElementTree.fromstring(timeline_svg(made, plan_timeline(made)))
    assert root[0].text is not None
    assert root[0].text.startswith(r"a\x07\u202eb: ")


def test_a_step_of_no_length_is_drawn_empty():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2))
    nothing = Timeline(source="simulated", num_ranks=2, step_time_s=0, bubble_fraction=0)
    assert boxes(ElementTree.fromstring(timeline_svg(made, nothing)), "forward") == []


def group_devices(root):
    return [text for text in (element.text for element in root.iter(f"{SVG}text"))
            if text and "device:" in text]  # fmt: skip


def test_every_replica_has_a_row_and_its_sum_a_strip():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2), num_microbatches=4)
    first, last = (dict(stage) for stage in made.stages)
    first |= {"replicas": 2, "devices": ("device:0", "device:2"), "sync_time_s": 3.0}
    changed = {**dict(made), "stages": [first, last]}
    timeline, root, text = picture(type(made).model_validate(changed))
    assert group_devices(root) == [
        "0  device:0, 1 layer",
        "0  device:2, 1 layer",
        "1  device:1, 1 layer",
    ]
    assert "2 stages on 3 devices" in text
    strips = [rect for rect in root.iter(f"{SVG}rect")
              if rect.get("class") == "sync" and rect.get("height") == "6"]  # fmt: skip
    assert len(strips) == 2
    assert len(boxes(root, "forward")) == 8 == len(timeline.events) // 2 - 1


def test_several_stages_on_a_row_and_split_backwards():
    made = plan(chain_profile([1, 1, 1, 1]), Cluster.uniform(4), num_microbatches=4)
    stages = [dict(stage) | {"devices": (f"device:{min(index, 3 - index)}",)}
              for index, stage in enumerate(made.stages)]  # fmt: skip
    changed = {**dict(made), "stages": stages, "schedule": "zbv", "chunks": 2}
    _, root, text = picture(type(made).model_validate(changed))
    assert group_devices(root) == ["0+3  device:0, 2 layers", "1+2  device:1, 2 layers"]
    for kind in ("forward", "inputs", "weights"):
        assert len(boxes(root, kind)) == len(boxes(root, f"{kind} odd")) == 8
    assert ">inputs</text>" in text
    assert ">backward</text>" not in text


def test_the_measured_step_is_drawn_below_on_the_same_axis():
    made = plan(chain_profile([1.0, 2.0]), Cluster.uniform(2), num_microbatches=2)
    predicted = plan_timeline(made)
    slower = predicted.model_copy(
        update={"source": "measured", "step_time_s": 2 * predicted.step_time_s}
    )
    alone, both = (
        ElementTree.fromstring(timeline_svg(made, *drawn))
        for drawn in ((predicted,), (predicted, slower))
    )
    single, double = boxes(alone, "forward"), boxes(both, "forward")
    assert len(double) == 2 * len(single)
    assert double[0][1] == pytest.approx(single[0][1] / 2, rel=1e-2)  # the longer one's axis
    assert float(both.get("height")) > float(alone.get("height")) + 50  # two more rows
    said = [element.text for element in both.iter() if element.tag.endswith("text")]
    assert said.count("planned") == said.count("measured") == 1  # above the rows of each
    assert said.index("planned") < said.index("measured")


def test_recomputation_has_boxes_of_its_own():
    made = plan(chain_profile([1, 1]), Cluster.uniform(2), num_microbatches=2)
    again = dict(made.stages[0]) | {"recompute": "always", "backward_time_s": 3.0}
    timeline, root, text = picture(
        type(made).model_validate({**dict(made), "stages": [again, made.stages[1]]})
    )
    found, scale = boxes(root, "recompute"), CHART_WIDTH / timeline.step_time_s
    assert [width for _, width in found] == pytest.approx([scale, scale], abs=0.006)
    assert ">recompute</text>" in text
    assert len(boxes(root, "backward")) == 4


def test_whole_and_split_backwards_stand_side_by_side():
    made = plan(
        chain_profile([1] * 4),
        Cluster.uniform(2),
        PlanOptions(schedule="dualpipev", num_microbatches=4),
    )
    _, root, text = picture(made)
    assert group_devices(root) == ["0+3  device:0, 2 layers", "1+2  device:1, 2 layers"]
    for name in ("forward", "backward", "inputs", "weights"):
        assert f">{name}</text>" in text
        assert boxes(root, name)
