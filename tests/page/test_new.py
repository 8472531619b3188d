"""The form of a new plan: what it asks for, what it says of it, and where it does not fit."""

from __future__ import annotations

import re
from typing import get_args

from playwright.sync_api import expect
from pydantic import TypeAdapter

from stagewright.core.cluster.accelerators import CATALOGUE, find_by_memory
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.models.families import ModelSpec
from stagewright.core.requests.default_samples import default_sample
from stagewright.core.requests.model_input import read_model
from stagewright.core.requests.presets import PRESETS

SPECS = [kind(family=get_args(kind.model_fields["family"].annotation)[0])
         for kind in get_args(get_args(ModelSpec)[0])]  # fmt: skip
SMALLER = {
    "vocab_size": 77, "n_positions": 64, "image_size": 32, "num_channels": 1, "in_channels": 2,
    "input_size": 5, "output_size": 6, "num_labels": 7, "num_classes": 8,
}  # fmt: skip


def opened(signed_in, query=""):
    signed_in.page.goto(f"{signed_in.url}/new{query}")
    signed_in.page.wait_for_selector("body[data-ready]")
    return signed_in.page


def asked(page):
    """The body of the request, as the page shows it."""
    text = page.locator("#python").text_content()
    names = {}
    exec(text.partition("request = ")[0], names)
    return names["body"]


def test_a_sample_of_any_size_is_the_one_the_service_makes(signed_in):
    page = opened(signed_in)
    cases = []
    for spec in SPECS:
        small = {key: value for key, value in SMALLER.items() if hasattr(spec.config, key)}
        other = spec.model_copy(update={"config": spec.config.model_copy(update=small)})
        for one in (spec, other):
            length = 48 if "input_ids" in default_sample(one).inputs else None
            wanted = default_sample(one, 4, length).model_dump(mode="json")
            usual = default_sample(spec).model_dump(mode="json")
            cases.append((usual, one.config.model_dump(mode="json"), length, wanted))
    script = """async (cases) => {
        const { sampleOf } = await import("/static/sample.js");
        return cases.map(([usual, config, length]) => sampleOf(usual, config, 4, length));
    }"""
    found = page.evaluate(script, [case[:3] for case in cases])
    assert found == [case[3] for case in cases]


def test_a_published_model_of_many_settings_is_asked_for_whole(signed_in):
    page = opened(signed_in)
    for name in ("gpt-oss-20b", "deepseek-v2-lite", "qwen3-0.6b"):
        page.get_by_label("Find a published model").fill(name)
        expect(page.locator("#preset")).to_have_value(name)
        model = TypeAdapter(ModelSpec).validate_python(asked(page)["model"])
        assert model == read_model(name) == PRESETS[name].spec
    page.locator("#preset").select_option("")
    page.locator("details summary", has_text="Configuration").click()
    page.get_by_role("textbox", name="settings").fill('{"head_dim": 32}')
    page.locator('[name="model_type"]').select_option('"gemma2"')
    assert asked(page)["model"] == {
        "family": "causal_lm",
        "config": {"model_type": "gemma2", "settings": {"head_dim": 32}},
    }


def test_the_sizes_of_a_sample_and_the_device_are_asked_for_and_kept(signed_in):
    page = opened(signed_in, "?family=gpt2&devices=2x24GB")
    assert asked(page)["estimate"] == {}
    assert "sample" not in asked(page)
    page.locator("#size").fill("4")
    page.locator("#length").fill("256")
    page.locator("#as").select_option("L4")
    body = asked(page)
    assert body["sample"]["inputs"]["input_ids"]["shape"] == [4, 256]
    assert body["sample"]["target"]["shape"] == [4, 256]
    assert body["estimate"] == {"device": "L4"}
    page.wait_for_url(re.compile("length=256.*as=L4|as=L4.*length=256"))
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert asked(page) == body
    page.locator("#family").select_option("mlp")
    assert not page.locator("#of-length").is_visible()
    assert asked(page)["sample"]["inputs"]["input"]["shape"][0] == 4


def test_a_robust_plan_is_asked_for_and_reproduced(signed_in):
    page = opened(signed_in, "?family=mlp&devices=2x24GB")
    box = page.get_by_label("Robust")
    expect(box).not_to_be_checked()
    assert "robust" not in asked(page)["options"]
    box.check()
    page.locator("#regular").select_option("grid")
    body = asked(page)
    assert body["options"]["robust"] is True
    page.wait_for_url(re.compile("(?=.*robust=true).*regular=grid"))
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert asked(page) == body
    page.get_by_role("button", name="Plan", exact=True).click()
    page.wait_for_url("**/plans/plan_*")
    expect(page.get_by_role("region", name="Command line")).to_contain_text("--robust")
    expect(page.locator("main")).to_contain_text("robust: ")


def test_what_devices_are_taken_for_is_said_or_asked(signed_in):
    page = opened(signed_in, "?devices=2x24GB")
    first, *others = find_by_memory(Cluster.parse("2x24GB").devices[0].memory_bytes or 0)
    taken = page.locator("#taken")
    expect(taken).to_contain_text(f"24GB: estimated as {first.name}, but could also be ")
    named = taken.inner_text().partition(" be ")[2].removesuffix(".").split(" or ")
    assert sorted(named) == sorted(one.name for one in others)
    page.locator("#cluster").fill("4x0GB")
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator("#message.bad")).to_contain_text("Devices: with 0 bytes they hold")
    expect(page.locator("#cluster")).to_be_focused()
    page.locator("#cluster").fill("2x5GB")
    page.get_by_role("button", name="Plan", exact=True).click()
    field = page.locator("#as")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    described = page.locator(f"#{field.get_attribute('aria-describedby')}")
    expect(described).to_contain_text("5GB")
    expect(page.locator("#message.bad")).to_contain_text("Estimated as: The catalogue")
    field.select_option(CATALOGUE[0].name)
    expect(field).not_to_have_attribute("aria-invalid", "true")
    expect(page.locator("#taken")).to_have_text("")


def test_a_field_that_does_not_fit_is_marked_in_the_words_of_the_form(signed_in):
    page = opened(signed_in, "?devices=4xfoo")
    signed_in.wrong.clear()
    page.get_by_role("button", name="Plan", exact=True).click()
    field = page.locator("#cluster")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    message = page.locator("#message.bad")
    expect(message).to_contain_text("Devices: unknown device 'foo'")
    expect(message).not_to_contain_text("/cluster")
    field.fill("4xH100")
    expect(field).not_to_have_attribute("aria-invalid", "true")
    assert page.locator(".field-error").count() == 0
    signed_in.wrong[:] = [one for one in signed_in.wrong if "422" not in one]


def test_planning_shows_its_time_and_can_be_stopped(signed_in):
    page = opened(signed_in)
    page.route("**/v1/plans", lambda route: None)  # no answer comes
    page.get_by_role("button", name="Plan", exact=True).click()
    expect(page.locator("#timer")).to_have_text("0 s")
    expect(page.locator("#submit")).to_be_disabled()
    page.get_by_role("button", name="Stop planning").click()
    expect(page.locator("#message")).to_contain_text("Search stopped")
    expect(page.locator("#submit")).to_be_enabled()
    page.unroute_all()


def test_a_page_that_waits_says_what_the_service_is_doing(signed_in):
    page = opened(signed_in)
    held, ids = [], []
    page.route("**/v1/plans", lambda route: held.append(route))

    def answer(route):
        ids.append(route.request.url.rpartition("=")[2])
        route.fulfill(json={"text": f"Searching: {len(ids)} s so far …"})

    page.route("**/plans/progress?*", answer)
    page.locator("#submit").click()
    expect(page.locator("#message")).to_have_text("Searching: 2 s so far …")
    assert {held[0].request.headers["x-request-id"]} == set(ids)
    page.locator("#stop").click()
    expect(page.locator("#message")).to_contain_text("Search stopped")
    page.unroute_all()
    found = page.request.get(f"{signed_in.url}/plans/progress?request_id=unknown")
    assert found.json() == {"text": ""}


def test_what_is_chosen_before_the_program_comes_is_in_the_address(signed_in):
    page = signed_in.page
    held = []
    page.route("**/v1/capabilities", lambda route: held.append(route))
    page.goto(f"{signed_in.url}/new")
    page.locator("#source").select_option("file")
    while not held:
        page.wait_for_timeout(20)
    held[0].continue_()
    page.wait_for_selector("body[data-ready]")
    page.wait_for_url("**/new?source=file")
    page.unroute_all()


def test_the_program_stands_beside_the_form_where_there_is_room(signed_in):
    page = opened(signed_in)
    page.set_viewport_size({"width": 1440, "height": 900})
    form, program = (page.locator(name).bounding_box() for name in ("#new", ".beside > section"))
    assert program["x"] >= form["x"] + form["width"]
    assert program["x"] + program["width"] <= 1440
    page.set_viewport_size({"width": 1280, "height": 900})


def test_nothing_went_wrong(signed_in):
    """Stands last."""
    signed_in.check()
