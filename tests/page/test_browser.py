"""What somebody does in a browser, start to end, and that every number is the API's."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Route, expect

from stagewright.api.http.examples import example_profile
from stagewright.api.page import plan_views as drawings
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan
from stagewright.core.plan.schedule import Work
from stagewright.core.plan.timeline import Timeline
from stagewright.core.profile.diff import diff
from stagewright.core.profile.profile import Profile
from stagewright.core.units import format_bytes, format_rate, format_time
from stagewright.runtime.compare import compare
from stagewright.view.html import percent
from tests.page.conftest import TOKEN

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def plan_id(signed_in, served):
    """A plan of a published model, made with the form."""
    page = signed_in.page
    page.goto(f"{signed_in.url}/plans")
    if served.client().get("/v1/plans").json()["plans"]:  # that of another test
        page.get_by_role("link", name="New plan").first.click()
    else:
        expect(page.get_by_role("heading", name="No plans yet")).to_be_visible()
        page.get_by_role("link", name="Make the first plan").click()
    page.wait_for_selector("body[data-ready]")
    page.locator("#family").select_option("mlp")
    page.locator("#cluster").fill("2x24GB")
    page.locator("summary", has_text="Configuration").click()
    page.locator("#config [name=num_blocks], #config [name=depth], #config input").first.wait_for()
    assert '"family":"mlp"' in page.locator("#curl").text_content()
    page.get_by_role("button", name="Plan", exact=True).click()
    page.wait_for_url("**/plans/plan_*")
    return page.url.rpartition("/")[2]


@pytest.fixture
def plan_page(signed_in, plan_id):
    page = signed_in.page
    page.goto(f"{signed_in.url}/plans/{plan_id}")
    page.wait_for_selector(".cut")
    return page


def shown(page, path):
    return page.locator(f'[data-value="{path}"]').first.text_content()


def assert_equals_api(page, plan):
    """The header and the table of stages against a plan's JSON."""
    assert shown(page, "header.step_time_s") == format_time(plan["step_time_s"])
    assert shown(page, "header.bubble_fraction") == percent(plan["bubble_fraction"])
    for index, stage in enumerate(plan["stages"]):
        total = sum(stage["memory"].values())
        assert shown(page, f"stages.{index}.memory_bytes") == format_bytes(total)
        assert shown(page, f"stages.{index}.num_layers") == str(stage["num_layers"])
        forward = format_time(stage["forward_time_s"])
        assert shown(page, f"stages.{index}.forward_time_s") == forward
        first = shown(page, f"stages.{index}.first_name")
        assert first == stage["layer_names"][0]


def after_pricing(page, act):
    """Does something and waits until it is priced."""
    before = page.locator("body").get_attribute("data-priced")
    act()
    known = f'[data-priced="{before}"]' if before else ":not([data-priced])"
    page.wait_for_selector(f"body:not({known}):not([aria-busy])")


def test_the_stored_plan_is_shown_with_the_apis_numbers(plan_page, plan_id, served):
    stored = served.client().get(f"/v1/plans/{plan_id}").json()
    assert_equals_api(plan_page, stored["plan"])


def test_a_cut_is_dragged_and_priced_as_the_api_does(plan_page, plan_id, served, signed_in):
    page, client = plan_page, served.client()
    stored = client.get(f"/v1/plans/{plan_id}").json()
    balance = stored["plan"]["balance"]
    page.locator("#bars").scroll_into_view_if_needed()
    cut, bars = (
        page.locator(".cut").first.bounding_box(),
        page.locator("#bars canvas").bounding_box(),
    )
    each = bars["width"] / sum(balance)
    x, y = cut["x"] + cut["width"] / 2, bars["y"] + 20
    page.mouse.move(x, y)

    def drag():
        page.mouse.down()
        page.mouse.move(x - each / 2, y)
        page.mouse.move(x - each, y)
        page.mouse.up()

    after_pricing(page, drag)
    (query,) = parse_qs(urlsplit(page.url).query)["balance"]
    moved = [int(count) for count in query.split(",")]
    assert moved == [balance[0] - 1, balance[1] + 1, *balance[2:]]
    priced = client.post("/v1/simulations", json={"plan_id": plan_id, "balance": moved}).json()
    assert_equals_api(page, priced["plan"])
    was = page.locator('[data-ghost="header.step_time_s"]').first.text_content()
    assert was == f"was {format_time(stored['plan']['step_time_s'])}"
    page.reload()  # the address holds the state
    page.wait_for_selector("body[data-priced]:not([aria-busy])")
    assert_equals_api(page, priced["plan"])


def test_the_models_boxes_have_the_apis_numbers(plan_page, plan_id, served):
    layers = served.client().get(f"/v1/plans/{plan_id}/view").json()["layers"]
    costs = zip(layers["forward_s"], layers["backward_s"], layers["parameter_bytes"], strict=True)
    expected = [
        f"{name}, {format_time(forward_s + backward_s)}"
        + (f", {format_bytes(size)}" if size else "")
        for name, (forward_s, backward_s, size) in zip(layers["names"], costs, strict=True)
    ]
    boxes = plan_page.locator("#graph .box").all()
    assert [box.get_attribute("aria-label") for box in boxes] == expected


def test_a_large_step_comes_after_its_numbers(plan_page, plan_id, served, monkeypatch):
    page, asked = plan_page, []
    monkeypatch.setattr(drawings, "LARGE_STEP", 1)
    page.on("request", lambda one: asked.append(one) if one.url.endswith("/view") else None)
    page.on("request", lambda one: asked.append(one) if one.url.endswith("/views") else None)
    page.reload()
    page.wait_for_selector(".cut")
    page.wait_for_selector("body[data-whole]")
    view = served.client().get(f"/v1/plans/{plan_id}/view").json()
    for rank, lane in enumerate(view["lanes"]):
        assert shown(page, f"lanes.{rank}.busy_s") == format_time(lane["busy_s"])
    assert page.locator("#gantt canvas").bounding_box()["height"] > 40
    page.locator("#m").focus()
    after_pricing(page, lambda: page.keyboard.press("ArrowRight"))
    body = {**asked[-1].post_data_json}
    assert [one.post_data_json and one.post_data_json["step"] for one in asked] == [
        None, False, True
    ]  # fmt: skip
    del body["step"], body["layers"]
    assert_equals_api(page, served.client().post("/v1/simulations", json=body).json()["plan"])


def test_a_cut_is_moved_and_a_slider_too_by_keyboard_alone(plan_page, plan_id, served):
    page, client = plan_page, served.client()
    balance = client.get(f"/v1/plans/{plan_id}").json()["plan"]["balance"]
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('cut')"):
            break
    else:
        raise AssertionError("no cut was reached by Tab")
    after_pricing(page, lambda: page.keyboard.press("ArrowLeft"))
    moved = [balance[0] - 1, balance[1] + 1, *balance[2:]]
    priced = client.post("/v1/simulations", json={"plan_id": plan_id, "balance": moved}).json()
    assert_equals_api(page, priced["plan"])
    page.locator("#m").focus()
    count = int(page.locator("#m").input_value())
    after_pricing(page, lambda: page.keyboard.press("ArrowRight"))
    options = {**priced["plan"]["options"], "num_microbatches": count + 1}
    body = {"plan_id": plan_id, "balance": moved, "options": options}
    assert_equals_api(page, client.post("/v1/simulations", json=body).json()["plan"])
    size = page.locator('[data-form="samples"], [data-form="micro-batches"]')
    words = [text.replace("was ", "") for text in size.all_text_contents()]
    now, before = (int(text.split()[0]) for text in words)
    assert now * count == before * (count + 1)  # a longer step is of more, and says so
    page.get_by_role("button", name="Back to the stored plan").click()
    page.wait_for_url(lambda url: "?" not in url)  # written at most every 100 ms
    assert page.locator('[data-ghost="header.step_time_s"]').first.text_content() == ""


def test_another_schedule_is_priced_and_planned_again(plan_page, plan_id, served):
    page = plan_page
    stored = served.client().get(f"/v1/plans/{plan_id}").json()
    notes = page.locator("[data-of-stored]")
    assert not any(note.is_visible() for note in notes.all())
    after_pricing(page, lambda: page.locator("#schedule").select_option("zbv"))
    assert shown(page, "header.schedule") == "zbv"
    options = {**stored["plan"]["options"], "schedule": "zbv"}
    body = {"plan_id": plan_id, "options": options}
    view = served.client().post("/v1/views", json=body).json()["view"]
    rows = page.locator("#lanes tbody tr")
    assert rows.count() == len(view["lanes"]) < len(view["stages"])
    for row, lane in zip(rows.all(), view["lanes"], strict=True):
        words = [cell.text_content() for cell in row.locator("td").all()]
        stages = ", ".join(map(str, lane["stages"]))
        held = [lane["memory_bytes"], lane["memory_limit_bytes"]]
        busy = format_time(lane["busy_s"])
        assert words == [lane["device"], stages, *map(format_bytes, held), busy]
    for index, stage in enumerate(view["stages"]):
        assert page.locator(f'[data-devices="{index}"]').text_content() == stage["devices"][0]
    assert shown(page, "header.num_devices") == str(view["header"]["num_devices"])
    assert notes.count()
    assert all(note.is_visible() for note in notes.all())
    page.get_by_role("button", name="Find the best cuts for this").click()
    page.wait_for_url(lambda url: plan_id not in url)
    again = page.url.rpartition("/")[2]
    plan = served.client().get(f"/v1/plans/{again}").json()["plan"]
    assert plan["schedule"] == "zbv"
    assert_equals_api(page, plan)


def test_what_cannot_be_used_says_why_and_what_would_help(signed_in, plan_id, served):
    client, page = served.client(), signed_in.page
    stored = client.get(f"/v1/plans/{plan_id}").json()
    most = max(sum(stage["memory"].values()) for stage in stored["plan"]["stages"])
    devices = [{"name": f"small:{index}", "memory_bytes": int(1.1 * most)} for index in range(2)]
    cluster = {"devices": devices, "levels": [{"group_size": 2}]}
    body = {"profile_id": stored["profile_id"], "cluster": cluster, "options": {"reserves": {}}}
    page.goto(f"{signed_in.url}/plans/{client.post('/v1/plans', json=body).json()['id']}")
    after_pricing(page, lambda: page.locator("#share").fill("50"))
    expect(page.locator("#message.bad")).to_contain_text("needs")
    held: list[Route] = []
    page.route("**/infeasible.js", lambda route: held.append(route))
    page.get_by_role("button", name="Find the best cuts for this").click()
    page.get_by_role("heading", name="Nothing fits").wait_for()
    expect(page.locator("[data-way]").first).to_be_disabled()  # until its script listens
    held[0].continue_()
    page.unroute("**/infeasible.js")
    answer = client.get(f"/v1/plans/{page.url.rpartition('/')[2]}").json()["infeasible"]
    assert page.locator(".notice.bad").text_content() == answer["message"]
    assert page.locator("[data-way]").count() == len(answer["ways_out"]) > 0
    page.locator("[data-way]").first.click()
    page.wait_for_selector(".cut")


def test_a_measurement_is_watched_until_its_plan_can_be_opened(signed_in, served):
    page = signed_in.page
    page.goto(f"{signed_in.url}/new")
    page.wait_for_selector("body[data-ready]")
    page.locator("#costs").select_option("measure")
    page.locator("#cluster").fill("2xcpu")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.wait_for_url("**/jobs/job_*")
    events = page.locator("#events th")
    expect(events.last).to_have_text("succeeded", timeout=60_000)
    assert events.all_text_contents()[:2] == ["queued", "started"]
    assert "progress" in events.all_text_contents()
    family = page.get_by_role("heading", level=1).text_content().split()[1]
    assert family in [
        one["family"] for one in served.client().get("/v1/capabilities").json()["model_families"]
    ]
    told = page.locator("#events").inner_text()
    assert "measuring" in told
    assert not re.search(r"\.\d{6}|\+00:00|attempt|\bstep\b|\bdone\b|\btotal\b", told)
    page.get_by_role("link", name="Open the plan").click()
    page.wait_for_selector(".cut")
    stored = served.client().get(f"/v1/plans/{page.url.rpartition('/')[2]}").json()
    assert stored["plan"]["model"] == "Example"
    page.goto(f"{signed_in.url}/jobs")
    expect(page.locator("#jobs tbody tr").first).to_contain_text("succeeded")


def test_a_measured_step_is_put_beside_the_planned_one(plan_page, plan_id, served, tmp_path):
    client = served.client()
    plan = Plan.model_validate(client.get(f"/v1/plans/{plan_id}").json()["plan"])
    planned = Timeline.model_validate(client.get(f"/v1/plans/{plan_id}?format=timeline").json())
    late = [
        event.model_copy(update={"end_s": event.end_s + 0.3 * (event.end_s - event.start_s)})
        if (event.stage, event.kind) == (1, "B")
        else event
        for event in planned.events
        if isinstance(event.kind, Work)
    ]
    update = {"events": tuple(late), "source": "measured", "step_time_s": 1.05 * plan.step_time_s}
    measured = planned.model_copy(update=update)
    measured.write(tmp_path / "step.json")
    plan_page.set_input_files("#measured-file", tmp_path / "step.json")
    rows = plan_page.locator("#off tbody tr")
    expect(rows).to_have_count(1 + 2 * plan.num_stages)
    expected = compare(plan, measured)
    for index, entry in enumerate((expected.step, *expected.stages)):
        words = rows.nth(index).inner_text().split("\t")
        assert words[:3] == [
            entry.what, format_time(entry.predicted_s), format_time(entry.measured_s)
        ]  # fmt: skip
    expect(plan_page.locator("#off tr.off")).to_have_count(1)
    expect(plan_page.locator("#off tr.off")).to_contain_text("+30.0 % slower")
    assert plan_page.locator("#measured canvas").bounding_box()["height"] > 40
    plan.write(tmp_path / "plan.json")
    plan_page.set_input_files("#measured-file", tmp_path / "plan.json")
    expect(plan_page.locator("#measured .bad")).to_contain_text("stagewright.record")


@pytest.fixture
def edit_cluster(signed_in, plan_id, served):
    """Open the fields of a cluster; then plan with what they say, and return the cluster."""
    page, client = signed_in.page, served.client()

    def open_fields(devices):
        profile_id = client.get(f"/v1/plans/{plan_id}").json()["profile_id"]
        page.goto(f"{signed_in.url}/new?profile_id={profile_id}")
        page.wait_for_selector("body[data-ready]")
        page.locator("#cluster").fill(devices)
        page.get_by_text("Links, memory and speed").click()
        return page

    def make_plan():
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url("**/plans/plan_*")
        return client.get(f"/v1/plans/{page.url.rpartition('/')[2]}").json()["cluster"]

    return open_fields, make_plan


def test_links_and_memory_of_the_cluster_are_edited(edit_cluster):
    open_fields, make_plan = edit_cluster
    page = open_fields("2x24GB")
    page.get_by_label("memory, GiB").fill("2")
    page.get_by_label("bandwidth, GB/s each way").fill("1.5")
    cluster = make_plan()
    assert [device["memory_bytes"] for device in cluster["devices"]] == [2 * 2**30] * 2
    assert cluster["levels"][0]["bandwidth_bytes_per_s"] == 1.5e9


def test_an_edited_bandwidth_holds_for_sums_too(edit_cluster):
    open_fields, make_plan = edit_cluster
    page = open_fields("4xH100")
    given = Cluster.parse("4xH100").levels[0]
    page.get_by_label("bandwidth, GB/s each way").fill("1")
    page.get_by_label("bandwidth, GB/s each way").fill(f"{given.bandwidth_bytes_per_s / 2e9}")
    page.get_by_label("latency of messages").fill("7")
    (level,) = make_plan()["levels"]
    assert level["bandwidth_bytes_per_s"] == given.bandwidth_bytes_per_s / 2
    assert level["latency_s"] == 7e-6
    assert level["all_reduce"]["start_s"] == given.all_reduce.start_s
    assert level["all_reduce"]["bandwidth"] == [
        [count, pytest.approx(rate / 2)] for count, rate in given.all_reduce.bandwidth
    ]


def test_a_kept_profile_is_chosen_and_its_plan_is_found(signed_in, served):
    page, client = signed_in.page, served.client()
    profile = example_profile()
    for number in range(13):
        made = client.post("/v1/profiles", json={**profile, "model": f"Kept-{number:02}"}).json()
    page.goto(f"{signed_in.url}/new?source=profile_id")
    page.wait_for_selector("body[data-ready]")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator("#message.bad")).to_contain_text("Choose a profile")
    page.get_by_label("Search").fill("kept-12 MEASURED")
    expect(page.locator("#profile-id option")).to_have_count(2)
    page.locator("#profile-id").select_option(index=1)
    page.locator("#cluster").fill("2x24GB")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.wait_for_url("**/plans/plan_*")
    found = page.url.rpartition("/")[2].partition("?")[0]
    assert client.get(f"/v1/plans/{found}").json()["profile_id"] == made["id"]
    page.goto(f"{signed_in.url}/plans")
    page.get_by_label("Find").fill("kept-12 24gb")
    page.keyboard.press("Enter")
    page.wait_for_url("**/plans?search=kept-12+24gb")
    rows = page.locator("#plans tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("Kept-12, 4 layers, 4.19 M parameters")
    expect(rows.get_by_role("link")).to_have_attribute("href", f"/plans/{found}")


def test_the_printed_address_signs_in_where_the_form_is_open_already(chromium, served):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{served.url}/profiles")
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("Invalid token")
    page.goto(f"{served.url}/sign-in#token={TOKEN}")
    page.wait_for_url("**/profiles")  # where it was to lead
    assert TOKEN not in page.url
    context.close()


def test_an_address_signs_nobody_out_of_their_project_unasked(chromium, served):
    """Somebody else's key in a link, e.g. of a mail: what is stored next would be theirs."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{served.url}/sign-in#token={TOKEN}")
    page.wait_for_url("**/plans")
    (before,) = context.cookies()
    page.goto("data:text/html,<title>elsewhere</title>")
    page.evaluate(f"location.href = '{served.url}/sign-in#token={TOKEN}'")
    expect(page.get_by_role("alert")).to_contain_text("You are already signed in")
    stay = page.get_by_role("link", name="Keep the current session")
    expect(stay).to_be_focused()
    assert TOKEN not in page.url
    stay.click()
    page.wait_for_url("**/plans")
    assert context.cookies()[0]["value"] == before["value"]
    page.goto(f"{served.url}/sign-in#token={TOKEN}")
    page.get_by_role("alert").wait_for()
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/plans")
    assert context.cookies()[0]["value"] != before["value"]
    context.close()


def test_a_files_request_can_be_pasted(signed_in, plan_id, served, tmp_path):
    page, client = signed_in.page, served.client()
    profile_id = client.get(f"/v1/plans/{plan_id}").json()["profile_id"]
    profile = client.get(f"/v1/profiles/{profile_id}").json()["profile"]
    path = tmp_path / "it's null.json"
    path.write_text(json.dumps(profile))
    page.goto(f"{signed_in.url}/new")
    page.wait_for_selector("body[data-ready]")
    page.locator("#source").select_option("file")
    page.set_input_files("#file", path)
    expect(page.locator("#message")).to_contain_text("is taken")
    words = shlex.split(page.locator("#curl").text_content())
    assert [words[0], *words[2:4]] == ["jq", "it's null.json", "|"]
    program = page.locator("#python").text_content()
    names = {}
    with contextlib.chdir(tmp_path):
        exec(program.partition("request = ")[0], names)
    assert names["body"]["profile"] == profile
    assert names["body"]["options"]["num_microbatches"] == 8


def test_a_profile_says_what_it_is_worth_and_what_has_changed(signed_in, plan_id, served):
    page, client = signed_in.page, served.client()
    before_id = client.get(f"/v1/plans/{plan_id}").json()["profile_id"]
    before = Profile.model_validate(client.get(f"/v1/profiles/{before_id}").json()["profile"])
    first = before.layers[0]
    slow = {"median_s": 2 * first.forward.median_s, "spread_s": first.forward.median_s}
    changed = first.model_copy(update={"forward": first.forward.model_copy(update=slow)})
    after = before.model_copy(update={"layers": (changed, *before.layers[1:])})
    made = client.post("/v1/profiles", json=after.model_dump(mode="json")).json()
    page.goto(f"{signed_in.url}/profiles/{made['id']}")
    expect(page.locator("#quality")).to_contain_text(first.layer.name)
    page.locator("#bars canvas").hover(position={"x": 3, "y": 100})
    expect(page.locator(".hover")).to_contain_text("spread by")
    page.locator("select[name='with']").select_option(before_id)
    page.get_by_role("button", name="Compare").click()
    rows = page.locator("#diff tbody tr")
    found = diff(before, after)
    expect(rows).to_have_count(len(found.layers) + 1)
    for index, entry in enumerate((*found.layers, found.total)):
        words = rows.nth(index).inner_text().split("\t")
        assert words[:3] == [
            entry.name, format_time(entry.forward.before_s), format_time(entry.forward.after_s)
        ]  # fmt: skip
        relative = entry.time.relative
        assert words[5].startswith(f"+{percent(relative)}" if relative else "same")


def test_plans_are_compared_on_one_axis(signed_in, plan_id, served):
    client, page = served.client(), signed_in.page
    stored = client.get(f"/v1/plans/{plan_id}").json()
    body = {"profile_id": stored["profile_id"], "cluster": "3x24GB"}
    other = client.post("/v1/plans", json=body).json()["id"]
    page.goto(f"{signed_in.url}/compare?id={plan_id}&id={other}")
    page.wait_for_selector("body[data-drawn='2']")
    compared = client.post("/v1/comparisons", json={"plan_ids": [plan_id, other]}).json()
    rows = page.locator("#comparison tbody tr")
    for index, plan in enumerate(compared["plans"]):
        words = rows.nth(index).inner_text()
        assert format_time(plan["step_time_s"]) in words
        assert format_bytes(plan["peak_memory_bytes"]) in words


def test_the_file_shows_the_same_without_a_server(chromium, tmp_path, plan_id, served):
    from stagewright.view.build_plan_view import build_plan_view
    from stagewright.view.html import plan_page as write

    client = served.client()
    stored = client.get(f"/v1/plans/{plan_id}").json()
    profile = client.get(f"/v1/profiles/{stored['profile_id']}").json()["profile"]
    plan = Plan.model_validate(stored["plan"])
    path = tmp_path / "plan.html"
    path.write_text(write(build_plan_view(plan, Profile.model_validate(profile))))
    context = chromium.new_context(offline=True)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: wrong.append(request.url) if request.url != path.as_uri() else None,
    )
    page.goto(path.as_uri())
    page.wait_for_selector("#layers tbody tr")
    assert_equals_api(page, stored["plan"])
    assert page.locator("#gantt canvas").bounding_box()["height"] > 40
    context.close()
    assert wrong == []


def test_sizes_and_times_are_written_as_in_python(plan_page):
    values = [
        0.0,
        1e-9,
        0.000125,
        0.0122500001,
        0.125,
        0.9996,
        0.99951,
        1.005,
        12.25,
        999.5,
        1234.5,
        3e-7,
    ]
    sizes = [0, 1, 1023, 1024, 1536, 10 * 2**20 + 52429, 2**30, 5 * 2**40, 0.5 + 2**20]
    shares = [0, 0.00049, 0.0005, 0.0015, 0.125, 0.99951, 1, 12.345]
    rates = [0.00001234, 0.5, 12.345678, 999.96, 1234.5, 64_983.2, 1e5, 1.5e9]
    script = """async ([values, sizes, shares, rates]) => {
        const format = await import("/static/format.js");
        return [values.map(format.time), sizes.map(format.bytes), shares.map(format.percent),
            rates.map(format.rate)];
    }"""
    found = plan_page.evaluate(script, [values, sizes, shares, rates])
    assert found == [
        [*map(format_time, values)],
        [*map(format_bytes, sizes)],
        [*map(percent, shares)],
        [*map(format_rate, rates)],
    ]


def test_nothing_went_wrong_on_any_page(signed_in):
    """Stands last: what the console said, what broke the policy, what was asked of others."""
    signed_in.check()
