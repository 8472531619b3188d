"""Charts of a step under the pointer and the keys; labels, dropped files, the form's search."""

import json
import re
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from stagewright.api.http.examples import example_profile

pytestmark = pytest.mark.timeout(180)

ZOOMED = re.compile("[?&]from=")


@pytest.fixture(scope="module")
def plan_ids(served):
    """Two plans of one profile, the second with every forward computed twice."""
    client = served.client()
    asked = {"profile": example_profile(), "options": {"num_microbatches": 4}}
    asked["cluster"] = "4x24GB"
    longer = {
        **asked,
        "options": {"num_microbatches": 4, "schedule": "gpipe", "recompute": "always"},
    }
    return [client.post("/v1/plans", json=body).json()["id"] for body in (asked, longer)]


@pytest.fixture
def page(signed_in, plan_ids):
    page = signed_in.page
    page.goto(f"{signed_in.url}/plans/{plan_ids[0]}")
    page.wait_for_selector(".cut")
    page.locator("#gantt canvas").scroll_into_view_if_needed()
    return page


def view(page):
    return page.evaluate("JSON.parse(document.getElementById('view').textContent)")


def at_box(page, wanted):
    """Where the first box that is wanted is drawn, in the window."""
    shown = view(page)
    boxes, step_s = shown["boxes"], shown["header"]["step_time_s"]
    index = next(
        place
        for place, (kind, batch) in enumerate(
            zip(boxes["kinds"], boxes["microbatches"], strict=True)
        )
        if (kind, batch) == wanted
    )
    canvas = page.locator("#gantt canvas").bounding_box()
    middle_s = (boxes["start_s"][index] + boxes["end_s"][index]) / 2
    width = canvas["width"] - 150 - 8
    x = canvas["x"] + 150 + middle_s / step_s * width
    return x, canvas["y"] + boxes["ranks"][index] * 34 + 15


def seen(page):
    """The part of the step in the address."""
    found = re.findall(r"(from|to)=([0-9.e-]+)", page.url)
    return {name: float(value) for name, value in found}


def test_words_stand_beside_the_pointer(page):
    x, y = at_box(page, ("F", 2))
    page.mouse.move(x, y)
    tip = page.locator(".hover")
    expect(tip).to_contain_text("forward, micro-batch 2")
    box = tip.bounding_box()
    assert abs(box["x"] - x) < 40
    assert abs(box["y"] - y) < 40
    page.mouse.move(5, 5)
    expect(tip).to_have_count(0)


def test_a_drag_selects_a_part_of_the_step(page):
    step_s = view(page)["header"]["step_time_s"]
    canvas = page.locator("#gantt canvas").bounding_box()
    left, width = canvas["x"] + 150, canvas["width"] - 158
    page.mouse.move(left + width / 4, canvas["y"] + 20)
    page.mouse.down()
    page.mouse.move(left + width / 2, canvas["y"] + 20, steps=3)
    expect(page.locator(".selected")).to_be_visible()
    page.mouse.up()
    expect(page.locator(".selected")).to_have_count(0)
    expect(page).to_have_url(ZOOMED)
    found = seen(page)
    assert found["from"] == pytest.approx(step_s / 4, rel=0.02)
    assert found["to"] == pytest.approx(step_s / 2, rel=0.02)
    page.locator("#gantt").get_by_role("button", name="Show the whole step").click()
    expect(page).not_to_have_url(ZOOMED)


def test_letters_zoom_and_move_as_in_perfetto(page):
    step_s = view(page)["header"]["step_time_s"]
    page.locator("#gantt canvas").focus()
    page.keyboard.press("w")
    expect(page).to_have_url(ZOOMED)
    nearer = seen(page)
    assert nearer["to"] - nearer["from"] == pytest.approx(0.8 * step_s)
    page.keyboard.press("d")
    expect(page).not_to_have_url(re.compile(rf"from={nearer['from']}(&|$)"))
    assert seen(page)["from"] == pytest.approx(nearer["from"] + 0.08 * step_s)
    page.keyboard.press("a")
    page.keyboard.press("s")
    expect(page).not_to_have_url(ZOOMED)


def test_a_click_follows_a_micro_batch_and_escape_leaves_it(page):
    page.mouse.click(*at_box(page, ("F", 1)))
    told = page.locator("#gantt .told")
    expect(told).to_contain_text("Micro-batch 1: ")
    page.locator("#gantt canvas").focus()
    page.keyboard.press("Escape")
    expect(told).not_to_contain_text("Micro-batch")


def test_the_critical_path_is_a_chain_from_start_to_end(page, served, plan_ids):
    """Each link begins where the one before it ended, so that the step cannot be shorter."""
    page.get_by_label("Critical path").check()
    expect(page.locator("#gantt .told")).to_contain_text("Critical path: forward ")
    boxes = served.client().get(f"/v1/plans/{plan_ids[0]}/view").json()["boxes"]
    path = page.evaluate(
        "async (boxes) => (await import('/static/critical-path.js')).criticalPath(boxes)", boxes
    )
    assert boxes["start_s"][path[0]] == 0
    assert boxes["end_s"][path[-1]] == max(boxes["end_s"])
    for before, after in pairwise(path):
        assert boxes["start_s"][after] == pytest.approx(boxes["end_s"][before], rel=1e-9)
    page.get_by_label("Critical path").uncheck()


def test_figures_and_sliders_stay_in_sight(page):
    page.locator("#memory canvas").scroll_into_view_if_needed()
    page.evaluate("scrollTo(0, document.getElementById('memory').offsetTop)")
    bar = page.locator("#what-if").bounding_box()
    assert 0 <= bar["y"] < 5
    assert bar["height"] < 190
    expect(page.locator("#what-if [data-value='header.step_time_s']")).to_be_in_viewport()
    expect(page.locator("#m")).to_be_in_viewport()


def test_a_plan_is_named_found_and_deleted(signed_in, served):
    client, page = served.client(), signed_in.page
    asked = {"profile": example_profile(), "cluster": "3x24GB"}
    plan_id = client.post("/v1/plans", json=asked).json()["id"]
    page.goto(f"{signed_in.url}/plans/{plan_id}")
    expect(page.locator("h1")).to_have_text("Example, 3 × 24GB")
    page.get_by_label("Name", exact=True).fill("the third")
    page.get_by_label("Tags").fill("odd  small")
    page.get_by_label("Notes").fill("to be deleted")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#labels-said")).to_have_text("Saved.")
    expect(page.locator("h1")).to_have_text("the third")
    stored = client.get(f"/v1/plans/{plan_id}").json()
    labels = (stored["name"], stored["tags"], stored["notes"])
    assert labels == ("the third", ["odd", "small"], "to be deleted")
    page.goto(f"{signed_in.url}/plans?search=odd+third")
    expect(page.locator("#plans tbody tr")).to_have_count(1)
    page.get_by_role("link", name="the third").click()
    page.get_by_role("button", name="Delete this plan").click()
    page.get_by_role("button", name="Delete it for good").click()
    page.wait_for_url("**/plans")
    assert client.get(f"/v1/plans/{plan_id}").status_code == 404


def test_compared_plans_fit_and_say_why_one_wins(signed_in, plan_ids):
    page = signed_in.page
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{signed_in.url}/compare?id={plan_ids[0]}&id={plan_ids[1]}")
    page.wait_for_selector("body[data-drawn]")
    table = page.locator("#comparison")
    assert table.evaluate("(table) => table.scrollWidth <= table.parentElement.clientWidth")
    expect(page.locator("#reasons li")).to_have_count(1)
    expect(page.locator("#reasons")).to_contain_text("% longer per ")
    page.set_viewport_size({"width": 1280, "height": 900})


def test_a_dropped_file_is_shown_and_not_stored(signed_in, served, plan_ids):
    page, client = signed_in.page, served.client()
    text = client.get(f"/v1/plans/{plan_ids[0]}?format=plan").text
    before = client.get("/v1/plans").json()["plans"]
    page.goto(f"{signed_in.url}/plans")
    drop = """(text) => {
      const data = new DataTransfer();
      data.items.add(new File([text], "plan.json", { type: "application/json" }));
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
    }"""
    page.evaluate(drop, text)
    page.wait_for_url("**/plans/file")
    expect(page.locator(".notice").first).to_contain_text("from a file")
    assert view(page)["header"]["step_time_s"] == json.loads(text)["step_time_s"]
    expect(page.locator("#gantt canvas")).to_be_visible()
    assert client.get("/v1/plans").json()["plans"] == before
    page.goto(f"{signed_in.url}/plans")
    page.evaluate(drop, json.dumps(example_profile()))
    page.wait_for_url("**/plans/file")
    expect(page.locator("h1")).to_have_text("Example")


def test_a_published_model_is_found_by_its_name(signed_in):
    page = signed_in.page
    page.goto(f"{signed_in.url}/new")
    page.wait_for_selector("body[data-ready]")
    page.get_by_label("Find a published model").fill("gpt2-xl")
    expect(page.locator("#family")).to_have_value("gpt2")
    expect(page.locator("#preset")).to_have_value("gpt2-xl")
    expect(page.locator("#curl")).to_contain_text('"n_layer":48')
    page.get_by_label("Find a published model").fill("no such model")
    expect(page.locator("#found-model")).to_contain_text("No published model")


def test_nothing_went_wrong_on_the_pages(signed_in):
    signed_in.check()
