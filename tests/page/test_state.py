"""What a view shows stands in its address, and sliders stop where there is an answer."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import pytest
from playwright.sync_api import expect

from stagewright.core.plan.plan import Plan
from stagewright.core.units import format_time
from stagewright.view.build_plan_view import build_plan_view
from stagewright.view.html import plan_page as write
from tests.page.blocks import blocks

pytestmark = pytest.mark.timeout(120)
PROFILE = blocks(16, uncut=(2,))
TWO_FRAMES = """() => new Promise((done) =>
    requestAnimationFrame(() => requestAnimationFrame(done)))"""
STOPPED = "Search stopped. No plan was stored unless the search had just finished."
NO_ANSWER = "The numbers shown are unchanged."


@pytest.fixture(scope="module")
def stored(signed_in, served):
    """Sixteen layers in four stages of seven micro-batches, as the service keeps them."""
    body = {
        "profile": PROFILE.model_dump(mode="json"),
        "cluster": "4x24GB",
        "options": {"num_stages": 4, "num_microbatches": 7},
    }
    made = served.client().post("/v1/plans", json=body).json()
    assert made["plan"]["balance"][0] != 3
    return made


@pytest.fixture
def opened(signed_in, stored):
    """Opens the plan's page with a query, and waits until it is priced."""

    def go(query=""):
        page = signed_in.page
        page.goto(f"{signed_in.url}/plans/{stored['id']}{query}")
        page.wait_for_selector(".cut")
        page.wait_for_selector("body:not([aria-busy])")
        return page

    return go


def query_of(page):
    """The parameters of the address, once it has been written."""
    page.wait_for_timeout(150)
    return dict(parse_qsl(urlsplit(page.url).query))


def drawn(page):
    """The lanes as they are painted."""
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    return page.evaluate("document.querySelector('#gantt canvas').toDataURL()")


def sorting(page):
    heads = page.locator("#layers thead th")
    states = [one.get_attribute("aria-sort") for one in heads.all()]
    return states, page.locator("#layers tbody tr").first.text_content()


def test_zoom_and_sorting_survive_a_reload_and_going_back(opened, signed_in):
    page = opened("?m=9")
    whole = drawn(page)
    page.locator("#gantt canvas").focus()
    for key in ("+", "+", "ArrowRight"):
        page.keyboard.press(key)
    for _ in range(2):
        page.locator("#layers thead button", has_text="forward").click()
    assert page.evaluate("document.activeElement.textContent") == "forward"
    page.get_by_text("Devices as a table").click()
    box = page.locator("#graph [aria-expanded]").first
    box.locator(".head").first.click()
    is_open = box.get_attribute("aria-expanded")
    seen, order = drawn(page), sorting(page)
    assert seen != whole
    assert order[0].count("descending") == 1
    query = query_of(page)
    assert query["open"] == "lanes-details"
    assert "boxes" in query
    assert query["sort"] == "-forward"
    assert query["m"] == "9"
    assert 0 < float(query["from"]) < float(query["to"])
    page.reload()
    page.wait_for_selector("body[data-priced]:not([aria-busy])")
    assert (drawn(page), sorting(page)) == (seen, order)
    page.goto(f"{signed_in.url}/jobs")
    page.go_back()
    page.wait_for_selector("body[data-priced]:not([aria-busy])")
    assert (drawn(page), sorting(page), query_of(page)) == (seen, order, query)
    assert page.locator("#lanes").is_visible()
    assert box.get_attribute("aria-expanded") == is_open
    page.get_by_role("button", name="Show the whole step").click()
    assert drawn(page) == whole
    page.get_by_text("Devices as a table").click()
    box.locator(".head").first.click()
    assert query_of(page) == {"sort": "-forward", "m": "9"}


def test_the_file_keeps_them_behind_the_hash(chromium, stored, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(write(build_plan_view(Plan.model_validate(stored["plan"]), PROFILE)))
    context = chromium.new_context(offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(path.as_uri())
    page.locator("#gantt canvas").focus()
    page.keyboard.press("+")
    page.locator("#layers thead button", has_text="backward").click()
    seen, order = drawn(page), sorting(page)
    page.wait_for_timeout(150)
    kept = dict(parse_qsl(urlsplit(page.url).fragment))
    assert set(kept) == {"from", "to", "sort"}
    page.reload()
    assert (drawn(page), sorting(page)) == (seen, order)
    page.goto(f"{path.as_uri()}#sort=height&from=3&to=x")
    page.reload()
    told = "sort=height is not possible here; the order of layer is shown. "
    told += "from=3&to=x is not possible here; the whole step is shown."
    expect(page.locator("#message")).to_have_text(told)
    context.close()
    assert wrong == []


def test_profiles_and_comparisons_keep_theirs(signed_in, served, stored):
    page, profile_id = signed_in.page, stored["profile_id"]
    body = {"profile_id": profile_id, "cluster": "2x24GB"}
    other = served.client().post("/v1/plans", json=body).json()
    page.goto(f"{signed_in.url}/compare?id={stored['id']}&id={other['id']}")
    page.wait_for_selector("body[data-drawn='2']")
    page.locator("#strips canvas").last.focus()
    page.keyboard.press("+")
    zoomed = "document.querySelector('#strips canvas').toDataURL()"
    page.evaluate(TWO_FRAMES)
    seen, query = page.evaluate(zoomed), query_of(page)
    assert set(query) == {"id", "from", "to"}
    assert page.url.count("id=") == 2
    page.reload()
    page.wait_for_selector("body[data-drawn='2']")
    page.evaluate(TWO_FRAMES)
    assert page.evaluate(zoomed) == seen
    page.goto(f"{signed_in.url}/profiles/{profile_id}")
    page.locator("#layers thead button", has_text="backward").click()
    order = sorting(page)
    assert query_of(page) == {"sort": "backward"}
    page.reload()
    assert sorting(page) == order
    assert order[0].count("ascending") == 1
    page.goto(f"{signed_in.url}/profiles/{profile_id}?sort=nonsense")
    expect(page.locator("#message")).to_have_text(
        "sort=nonsense is not possible here; the order of layer is shown."
    )
    page.goto(f"{signed_in.url}/compare?id={stored['id']}&id={other['id']}&from=9&to=2")
    expect(page.locator("#message")).to_have_text(
        "from=9&to=2 is not possible here; the whole step is shown."
    )


def test_devices_are_looked_up_when_they_are_written(signed_in):
    page, asked = signed_in.page, []
    page.goto(f"{signed_in.url}/new")
    page.wait_for_selector("body[data-ready]")
    page.get_by_text("Links, memory and speed").click()
    expect(page.get_by_label("memory, GiB")).to_be_visible()
    page.on("request", lambda one: "/v1/clusters" in one.url and asked.append(one.url))
    page.locator("#cluster").fill("2x")
    expect(page.get_by_text("Write devices as in 4x24GB.")).to_be_visible()
    page.locator("#cluster").press_sequentially("40GiB")
    expect(page.get_by_label("memory, GiB")).to_have_value("40")
    assert {url.rpartition("=")[2] for url in asked} == {"2x40GiB"}


def test_the_form_of_a_new_plan_survives_too(signed_in, served):
    page = signed_in.page
    page.goto(f"{signed_in.url}/new")
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#schedule").input_value() == "1f1b"
    page.locator("#family").select_option("mlp")
    page.locator("summary", has_text="Configuration").click()
    depth = page.locator("#config input[type=number]").first
    depth.fill("3")
    page.locator("#cluster").fill("3x24GB")
    page.locator("#microbatches").fill("12")
    page.locator("#recompute").select_option("auto")
    page.get_by_text("Links, memory and speed").click()
    page.wait_for_load_state("networkidle")  # the cluster's fields are drawn once it is read
    page.get_by_label("memory, GiB").fill("2")
    page.get_by_label("one connection for a whole group").check()
    asked = page.locator("#curl").text_content()
    assert '"memory_bytes":2147483648' in asked
    query = query_of(page)
    for leave_and_come_back in (
        page.reload,
        lambda: (page.goto(f"{signed_in.url}/jobs"), page.go_back()),
    ):
        leave_and_come_back()
        page.wait_for_selector("body[data-ready]")
        assert page.locator("#curl").text_content() == asked
        assert query_of(page) == query
    page.locator("#family").select_option("gpt2")
    left = query_of(page)
    assert left["family"] == "gpt2"
    assert not any(name.startswith("config.") for name in left)
    page.goto(f"{signed_in.url}/new?family=cobol&m=0&config.colour=red&recompute=auto")
    page.wait_for_selector("body[data-ready]")
    message = page.locator("#message")
    for told in (
        "family=cobol is not",
        "m=0 is not possible here; 8 is",
        "config.colour=red is not",
    ):
        expect(message).to_contain_text(told)
    assert page.locator("#recompute").input_value() == "auto"


def test_the_slider_stops_where_the_schedule_has_a_step(opened, stored, served, signed_in):
    page, client = opened(), served.client()
    closed = page.locator("#schedule option:disabled").all()
    assert closed == []
    page.locator("#schedule").select_option("interleaved_1f1b")
    expect(page.locator("#message")).to_contain_text("cannot run 7 micro-batches here; showing 6")
    stops = [6]
    page.locator("#m").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "PageUp", "End", "Home"):
        page.keyboard.press(key)
        stops.append(int(page.locator("#m").input_value()))
        page.wait_for_selector("body:not([aria-busy])")
        assert "cannot" not in page.locator("#message").text_content()
        options = {
            **stored["options"],
            "schedule": "interleaved_1f1b",
            "num_microbatches": stops[-1],
        }
        body = {"plan_id": stored["id"], "options": options}
        plan = client.post("/v1/simulations", json=body).json()["plan"]
        step = page.locator('[data-value="header.step_time_s"]').first
        assert step.text_content() == format_time(plan["step_time_s"])
    assert stops[:4] == [6, 8, 10, 8]
    assert stops[-1] == 1
    signed_in.check()


def test_what_the_address_cannot_mean_is_told(opened, stored):
    wrong = "m=99999&link=abc&share=8.5&balance=1,2&sort=nothing&schedule=forward"
    page = opened(f"?{wrong}&open=x&boxes=1,y&from=1&to=x&recompute=auto")
    balance = ",".join(map(str, stored["plan"]["balance"]))
    for told in (
        "m=99999 is not possible here; 64 is shown.", "link=abc is not possible here; 0 is shown.",
        "share=8.5 is not possible here; 100 is shown.", "sort=nothing is not",
        f"balance=1,2 is not possible here; {balance} is shown.",
        "schedule=forward is not possible here; 1f1b is shown.", "open=x is not",
        "boxes=1,y is not", "from=1&to=x is not possible here; the whole step is shown.",
    ):  # fmt: skip
        expect(page.locator("#message")).to_contain_text(told)
    assert query_of(page) == {"m": "64", "recompute": "auto"}
    assert page.locator('[data-value="header.num_microbatches"]').text_content() == "64"


def test_an_answer_that_says_no_is_one_sentence(opened, stored, signed_in):
    balance = [3, 13 - 2, 1, 1]
    page = opened(f"?balance={','.join(map(str, balance))}")
    message = page.locator("#message.bad")
    expect(message).to_contain_text("they share a state")
    expect(message).to_contain_text(NO_ANSWER)
    step = page.locator('[data-value="header.step_time_s"]').first
    assert step.text_content() == format_time(stored["plan"]["step_time_s"])
    signed_in.check()


def test_going_back_while_a_change_is_priced_leaves_no_ghost(opened):
    page = opened()
    with page.expect_request("**/v1/views") as asked:
        page.route("**/v1/views", lambda route: (page.wait_for_timeout(600), route.continue_()))
        page.locator("#m").focus()
        page.keyboard.press("ArrowRight")
        page.get_by_role("button", name="Back to the stored plan").click()
    asked.value.response()
    page.wait_for_selector("body:not([aria-busy])")
    page.unroute_all(behavior="wait")
    assert query_of(page) == {}
    assert page.locator('[data-ghost="header.step_time_s"]').first.text_content() == ""
    assert page.get_by_text("the stored plan", exact=True).count() == 0
    assert page.locator("#message").text_content() == ""  # "Pricing …" came 0.3 s after the key


def test_going_back_before_the_first_answer_keeps_the_zoom(opened, signed_in, stored):
    page = signed_in.page
    step_s = stored["plan"]["step_time_s"]
    page.route("**/v1/views", lambda route: (page.wait_for_timeout(200), route.continue_()))
    page.goto(f"{signed_in.url}/plans/{stored['id']}?m=9&from=0&to={step_s / 2}")
    page.get_by_role("button", name="Back to the stored plan").click()
    page.wait_for_selector("body:not([aria-busy])")
    page.unroute_all(behavior="wait")
    assert page.get_by_role("button", name="Show the whole step").is_visible()
    before = float(query_of(page)["to"])
    page.locator("#gantt canvas").focus()
    page.keyboard.press("+")
    assert float(query_of(page)["to"]) < before


def test_what_a_schedule_moved_is_said_once(opened):
    page = opened()
    message = page.locator("#message")
    page.locator("#schedule").select_option("interleaved_1f1b")
    expect(message).to_contain_text("showing 6")
    page.wait_for_selector("body:not([aria-busy])")
    page.locator("#bars .cut").last.focus()
    page.keyboard.press("ArrowLeft")
    expect(message).not_to_contain_text("showing")


def test_a_search_shows_its_time_and_can_be_stopped(opened, signed_in):
    page = opened("?m=9")
    page.route("**/v1/plans", lambda route: None)  # no answer ever
    page.get_by_role("button", name="Find the best cuts for this").click()
    expect(page.locator("#timer")).to_have_text("1 s")
    assert page.locator("#again").is_disabled()
    page.get_by_role("button", name="Stop the search").click()
    expect(page.locator("#message")).to_have_text(STOPPED)
    assert not page.locator("#stop").is_visible()
    assert page.locator("#again").is_enabled()
    page.unroute_all()
    late = {"type": "/problems/deadline-exceeded", "detail": "No plan in 20 s."}
    page.route("**/v1/plans", lambda route: route.fulfill(status=504, json=late))
    page.get_by_role("button", name="Find the best cuts for this").click()
    expect(page.locator("#message.bad")).to_contain_text("No plan in 20 s. Use fewer")
    page.unroute_all()
    signed_in.wrong[:] = [one for one in signed_in.wrong if "504" not in one]


def test_slower_than_equal_layers_is_said_so(opened, stored):
    page = opened()
    script = """async () => {
        const { shown } = await import("/static/format.js");
        return [0.2, 0, -0.029, null].map((gain) => [shown(gain, "versus"), shown(gain, "gain")]);
    }"""
    assert page.evaluate(script) == [
        ["Faster", "20.0 %"], ["Faster", "0.0 %"], ["Slower", "2.9 %"],
        ["Faster", "cannot be compared"],
    ]  # fmt: skip
    view = build_plan_view(Plan.model_validate(stored["plan"]), PROFILE)
    header = view.header.model_copy(update={"gain": -0.029})
    text = write(view.model_copy(update={"header": header}))
    assert '"versus">Slower</span> than equal layers' in text
    assert 'data-form="gain">2.9 %' in text


def test_nothing_went_wrong(signed_in):
    signed_in.check()
