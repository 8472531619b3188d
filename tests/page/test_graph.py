"""The folded model in a browser, in the offline file, which has the program of the live page."""

from __future__ import annotations

import json

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.units import format_bytes, format_time
from stagewright.planner.price_split import plan_from_balance
from stagewright.view.build_plan_view import build_plan_view
from stagewright.view.html import plan_page
from stagewright.view.module_parts import MAX_PARTS
from tests.builders import chain_profile

pytestmark = pytest.mark.timeout(120)

HOSTILE = ("a\u202eevil", "b\nline\u2028end", "c\x1b[31m", "</script><img src=x>", "w" * 240)
NUM_STAGES = 8


def with_names(profile, names, classes):
    layers = tuple(
        entry.model_copy(
            update={"layer": entry.layer.model_copy(update={"name": name, "cost_class": kind})}
        )
        for entry, name, kind in zip(profile.layers, names, classes, strict=True)
    )
    return profile.model_copy(update={"layers": layers})


def written(folder, names, classes, stages):
    """A page of a model with these layers, and what it is to show."""
    profile = chain_profile([0.001] * len(names), forward_bytes=1000, parameter_bytes=2**20)
    profile = with_names(profile, names, classes)
    size = len(names) // stages
    balance = (*(size for _ in range(stages - 1)), len(names) - size * (stages - 1))
    cluster = Cluster.parse(f"{stages}x24GB")
    plan = plan_from_balance(profile, cluster, PlanOptions(num_microbatches=stages), balance)
    view = build_plan_view(plan, profile, cluster)
    (folder / "plan.html").write_text(plan_page(view), encoding="utf-8")
    return (folder / "plan.html").as_uri(), view


@pytest.fixture(scope="module")
def loaded(chromium, tmp_path_factory):
    """A page of eight stages of six equal blocks each, hostile names at the end."""
    names = [
        f"model.h.{block}.{part}" for block in range(48) for part in ("attn.q", "attn.k", "mlp")
    ]
    names += HOSTILE
    classes = ["q", "k", "m"] * 48 + [""] * len(HOSTILE)
    path, view = written(tmp_path_factory.mktemp("page"), names, classes, NUM_STAGES)
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page, path, view
    context.close()
    assert wrong == []


@pytest.fixture
def opened(loaded):
    """The page as it opens, whatever an earlier test did to it."""
    page, path, view = loaded
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto("about:blank")  # or another fragment of the same page would not load it again
    page.goto(path)
    page.wait_for_selector("[role=tree]")
    return page, view


def item(page, name):
    return page.get_by_role("treeitem", name=name, exact=True)


def facts(view, row):
    count = view.graph.num_layers[row]
    time = format_time(view.graph.time_s[row])
    return f"{count} layers, {time}, {format_bytes(view.graph.parameter_bytes[row])}"


def test_a_module_opens_and_closes_by_click(opened):
    page, view = opened
    row = view.graph.names.index("model.h.0..5")
    stack = item(page, f"model.h.0..5, {facts(view, row)}")
    assert stack.get_attribute("aria-expanded") == "false"
    stack.locator(".head").first.click()
    assert stack.get_attribute("aria-expanded") == "true"
    inside = stack.locator("> .parts > [role=treeitem]")
    assert inside.count() == 6
    block = inside.nth(2)
    row = view.graph.names.index("model.h.2")
    assert block.get_attribute("aria-label") == f"model.h.2, {facts(view, row)}"
    block.locator(".head").first.click()
    assert block.locator("> .parts > .box > .head .name").all_inner_texts() == ["attn", "mlp"]
    stack.locator("> .head").click()
    assert stack.get_attribute("aria-expanded") == "false"
    assert stack.locator("[role=treeitem]").count() == 0


def test_a_module_opens_and_closes_by_keyboard(opened):
    page, _ = opened
    page.locator("#graph-title").click()
    page.keyboard.press("Tab")
    focus = "document.activeElement"
    assert page.evaluate(f"{focus}.getAttribute('role')") == "treeitem"
    page.keyboard.press("Home")
    assert page.evaluate(f"{focus}.getAttribute('aria-label')") == "stage 0, 18 layers"

    def press(key):
        page.keyboard.press(key)
        return page.evaluate(f"{focus}.getAttribute('aria-expanded')")

    assert press("ArrowDown") == "false"
    assert press("Enter") == "true"
    assert press(" ") == "false"
    assert press("ArrowRight") == "true"
    assert press("ArrowRight") == "false"  # the first block in it
    assert page.evaluate(f"{focus}.getAttribute('aria-label')").startswith("model.h.0,")
    assert press("ArrowLeft") == "true"  # back at the stack
    assert press("ArrowLeft") == "false"
    assert page.locator("[role=treeitem][tabindex='0']").count() == 1


def test_stages_out_of_sight_are_announced_and_reached(opened):
    page, _ = opened
    graph = page.locator("#graph")
    told = page.locator("#graph + .told")
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        graph.evaluate("element => element.scrollTo(0, 0)")
        expect(graph).to_have_class("scroll more-right")
        assert told.inner_text().startswith(("Stage 0 ", "Stages 0 to "))
        assert told.inner_text().endswith("of 8 in view; scroll sideways for the others.")
        page.locator("[role=treeitem][tabindex='0']").focus()
        page.keyboard.press("End")
        expect(graph).to_have_class("scroll more-left")
        assert "to 7 of 8" in told.inner_text()
        # Charts follow a new width a moment later.
        page.wait_for_function(f"document.documentElement.scrollWidth <= {width}")
    page.set_viewport_size({"width": 1280, "height": 900})


def test_lines_go_from_stage_to_stage_with_their_bytes(opened):
    page, view = opened
    assert page.locator("#graph .edge.cut").count() == NUM_STAGES - 1
    sent = page.locator("#graph .sent").all_text_contents()
    assert sent == [format_bytes(size) for size in view.graph.cut_bytes]


def test_names_are_shown_as_they_are_and_within_their_boxes(opened):
    page, view = opened
    data = json.loads(page.locator("#view").text_content())
    assert data["layers"]["names"] == list(view.layers.names)
    escaped = [r"a\u202eevil", r"b\nline\u2028end", r"c\x1b[31m", HOSTILE[3], HOSTILE[4]]
    for place in ("#layers td.name", "#graph .head .name"):
        texts = page.locator(place).all_text_contents()
        assert texts[-len(escaped) :] == escaped
    page.locator("#layers").scroll_into_view_if_needed()
    for place in ("#layers td.name", "#graph .head"):
        last = page.locator(place).last
        assert last.get_attribute("title") == HOSTILE[4]
        assert last.bounding_box()["width"] < 400
    style = "element => getComputedStyle(element).unicodeBidi"
    assert page.locator("#layers td.name").last.evaluate(style) == "isolate"
    assert page.locator("#graph .name").last.evaluate(style) == "isolate"
    body = page.locator("body").inner_text()
    assert not any(character in body for character in "\u202e\u2028\x1b")


def test_the_tree_is_accessible(opened):
    page, _ = opened
    page.locator("#graph .box[aria-expanded=false] > .head").first.click()
    found = Axe().run(page, context="#graph").response["violations"]
    assert [one["id"] for one in found] == []


def test_of_many_layers_only_what_is_opened_is_laid_out(chromium, tmp_path):
    names = [f"h.{index // 4}.{'abcd'[index % 4]}{index % 7}" for index in range(1600)]
    path, _ = written(tmp_path, names, [""] * len(names), 8)
    page = chromium.new_page()
    page.goto(path)
    page.wait_for_selector("[role=tree]")
    boxes = page.locator("#graph .box")
    assert boxes.count() <= 8 * 2 * 14
    made = page.evaluate("""() => {
        const graph = document.getElementById("graph");
        const seen = new MutationObserver(() => {});
        seen.observe(graph, { childList: true, subtree: true });
        const closed = [...graph.querySelectorAll(".box[aria-expanded=false] > .head")];
        return closed.slice(0, 20).map((head) => {
            const before = graph.querySelectorAll(".box").length;
            head.click();
            const more = graph.querySelectorAll(".box").length - before;
            const records = seen.takeRecords();
            const isLines = ({ target }) => target.classList.contains("edges");
            const added = records.flatMap((one) => (isLines(one) ? [] : [...one.addedNodes]));
            const boxes = added.flatMap((one) => [...one.querySelectorAll(".box")]);
            return [boxes.length, more, records.filter(isLines).length];
        });
    }""")
    assert len(made) == 20
    assert all(1 < boxes == more <= MAX_PARTS for boxes, more, _ in made)  # what was there stays
    assert {drawings for *_, drawings in made} == {1}
    page.close()
