"""Stages as blocks of devices, and the collectives inside them in the drawing of a step."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.view.build_plan_view import build_plan_view
from stagewright.view.html import plan_page
from tests.builders import chain_profile, split_profile
from tests.page.test_charts import COLUMN, share_of

pytestmark = pytest.mark.timeout(120)

CLUSTER = Cluster.uniform(8, latency_s=1e-4, bandwidth_bytes_per_s=2e9)
SCREENS = ((1440, "light"), (1024, "dark"), (390, "light"), (390, "dark"))


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """The file and the view of a plan of two stages, each of 2 replicas times 2 devices."""
    profile = split_profile()
    options = PlanOptions(
        tensor=2, num_stages=2, max_replicas=2, num_microbatches=4,
        strategies=("fully_shard",),
    )  # fmt: skip
    view = build_plan_view(plan(profile, CLUSTER, options), profile, CLUSTER)
    path = tmp_path_factory.mktemp("meshes") / "plan.html"
    path.write_text(plan_page(view), encoding="utf-8")
    return path, view


def opened(chromium, path, width=1280, scheme="light"):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(path.as_uri())
    page.wait_for_selector("[role=tree]")
    return page


def box_of(view, kind):
    return view.boxes.kinds.index(kind)


def share_at(view, index, place=0.5):
    """Return how far along the step a place of a box is."""
    start_s, end_s = view.boxes.start_s[index], view.boxes.end_s[index]
    return (start_s + place * (end_s - start_s)) / view.header.step_time_s


def words_at(page, view, index):
    canvas = page.locator("#gantt canvas").bounding_box()
    x = canvas["x"] + 150 + share_at(view, index) * (canvas["width"] - 158)
    page.mouse.move(x, canvas["y"] + view.boxes.ranks[index] * 34 + 15)
    return page.locator(".hover").inner_text()


def test_rows_are_replicas_and_columns_split_layers(chromium, split):
    path, view = split
    for width, scheme in SCREENS:
        page = opened(chromium, path, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        blocks = page.locator("#meshes li")
        assert blocks.locator(".small").all_inner_texts() == ["2 replicas × 2, fully_shard"] * 2
        for index, stage in enumerate(view.stages):
            cells = blocks.nth(index).locator(".cell")
            assert cells.all_inner_texts() == list(stage.devices)
            tops = [cells.nth(at).bounding_box()["y"] for at in range(4)]
            assert tops[0] == tops[1] < tops[2] == tops[3]
            assert cells.nth(3).get_attribute("title") == (
                f"{stage.devices[3]}, replica 1, part 1 of 2"
            )
        page.close()


def test_collectives_have_their_share_of_a_box_their_legend_and_words(chromium, split):
    path, view = split
    page = opened(chromium, path)
    legend = page.locator("#gantt .legend li").all_inner_texts()
    assert "collectives: split layers, gradients, shards" in legend
    for kind, colour in (("F", "forward"), ("B", "backward")):
        index = box_of(view, kind)
        stage = view.stages[view.boxes.stages[index]]
        seconds = stage.collective_forward_s if kind == "F" else stage.collective_backward_s
        part = seconds / (view.boxes.end_s[index] - view.boxes.start_s[index])
        assert part > 0.2
        top = view.boxes.ranks[index] * 34 + 2
        # Beside the number of the micro-batch.
        pixels = page.evaluate(COLUMN, ["gantt", share_at(view, index, 0.2), top, top + 30])
        assert share_of(page, "reduce", pixels) == pytest.approx(part, abs=0.06)
        assert share_of(page, colour, pixels) == pytest.approx(1 - part, abs=0.06)
        assert "exchange of layers split over 2" in words_at(page, view, index)
    words = words_at(page, view, box_of(view, "sync"))
    assert "gradient all-reduce of replicas" in words
    assert "scattered, and weights gathered" in words
    assert "micro-batch" not in words
    page.close()


def test_whole_layers_on_single_devices_have_no_blocks_and_no_collectives(chromium, tmp_path):
    profile = chain_profile([0.001, 0.001], parameter_bytes=2**20, saved_bytes=2**16)
    cluster = Cluster.parse("2x24GB")
    made = plan_from_balance(profile, cluster, PlanOptions(num_microbatches=3), (1, 1))
    path = tmp_path / "plain.html"
    path.write_text(plan_page(build_plan_view(made, profile, cluster)), encoding="utf-8")
    page = opened(chromium, path)
    assert page.locator("#meshes").is_hidden()
    assert not any("collectives" in text for text in page.locator(".legend li").all_inner_texts())
    pixels = page.evaluate(COLUMN, ["gantt", 0.4, 2, 32])
    assert share_of(page, "reduce", pixels) == 0
    page.close()


def test_large_meshes_are_shortened(chromium, tmp_path, split):
    _, view = split
    devices = tuple(f"gpu:{index}" for index in range(32 * 16))
    stage = view.stages[0].model_copy(
        update={"replicas": 32, "tensor": 16, "devices": devices, "mesh": "32 replicas × 16, zero1"}
    )
    wide = view.model_copy(update={"stages": (stage, *view.stages[1:])})
    path = tmp_path / "wide.html"
    path.write_text(plan_page(wide), encoding="utf-8")
    page = opened(chromium, path)
    cells = page.locator("#meshes li").first.locator(".cell").all_inner_texts()
    assert len(cells) == 64
    assert cells[:8] == [*(f"gpu:{shard}" for shard in range(6)), "…", "gpu:15"]
    assert cells[-1] == "gpu:511"
    page.close()
