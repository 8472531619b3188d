"""Every page with all it can unfold: nothing for axe to find, none wider than its screen."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from stagewright.api.http.examples import example_profile
from tests.page.blocks import blocks

HOSTILE = "<img src=x onerror=alert(1)>\u202e" + 200 * "W" + ".{}"
SCREENS = ((1440, "light"), (1024, "dark"), (390, "light"))
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def paths(served):
    """Every page there is, with something on it."""
    client = served.client()
    profile = example_profile()
    made = [
        client.post("/v1/plans", json={"profile": profile, "cluster": cluster}).json()
        for cluster in ("2x24GB", "4x24GB", "1x40MiB")
    ]
    first, second, nothing = (plan["id"] for plan in made)
    assert made[2]["status"] == "infeasible"
    hostile = blocks(16, name=HOSTILE).model_dump(mode="json")
    body = {"profile": hostile, "cluster": "8x24GB", "options": {"num_stages": 8}}
    wide = client.post("/v1/plans", json=body).json()
    return {
        "plans": "/plans",
        "plan": f"/plans/{first}?m=12",
        "wide plan": f"/plans/{wide['id']}?m=12",
        "infeasible": f"/plans/{nothing}",
        "compare": f"/compare?id={first}&id={second}",
        "choose": "/compare",
        "profiles": "/profiles",
        "profile": f"/profiles/{made[0]['profile_id']}?with={wide['profile_id']}",
        "new": "/new",
        "jobs": "/jobs",
        "missing": "/plans/plan_missing",
    }


NAMES = (
    "plans", "plan", "wide plan", "infeasible", "compare", "choose", "profiles", "profile", "new",
    "jobs", "missing",
)  # fmt: skip
UNFOLD = "for (const one of document.querySelectorAll('details')) one.open = true"
VIOLATIONS = {"resultTypes": ["violations"]}
LEAST = "minor"
"""The impact of findings that are not looked at."""


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_accessible_and_fits_any_screen(signed_in, paths, name):
    page = signed_in.page
    page.goto(signed_in.url + paths[name])
    page.wait_for_load_state("networkidle")
    page.evaluate(UNFOLD)
    for width, scheme in SCREENS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        found = Axe().run(page, options=VIOLATIONS).response["violations"]
        worth_mending = [
            f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}"
            for one in found
            if one["impact"] != LEAST
        ]
        assert worth_mending == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


REACHED = """() => {
    const all = "a[href], button, input, select, summary, [tabindex='0']";
    const isShown = (one) => one.checkVisibility() && !one.disabled && one.tabIndex >= 0;
    const shown = [...document.querySelectorAll(all)].filter(isShown);
    return shown.map((one) => one.dataset.stop ?? one.outerHTML.slice(0, 90));
}"""
FOCUSED = """(stop) => {
    const one = document.activeElement;
    one.dataset.stop = String(stop);
    const marked = one.matches(".hidden") ? one.parentElement : one;
    const style = getComputedStyle(marked, one.matches(".cut") ? "::after" : null);
    const isSeen = style.outlineStyle !== "none" || style.boxShadow !== "none";
    return [one.tagName, isSeen, one.outerHTML.slice(0, 90)];
}"""
"""Hidden inputs and cuts show the focus on what stands for them."""


def test_all_of_a_plan_is_reached_and_unfolded_by_tab_alone(signed_in, paths):
    page = signed_in.page
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto(signed_in.url + paths["wide plan"])
    page.wait_for_selector("body[data-priced]:not([aria-busy])")
    for stop in range(200):
        page.keyboard.press("Tab")
        tag, is_seen, words = page.evaluate(FOCUSED, stop)
        if tag == "BODY":
            break
        assert is_seen, words
        if tag == "SUMMARY":
            page.keyboard.press("Enter")
    else:
        raise AssertionError("the end of the page was not reached")
    assert page.locator("details").count() == page.locator("details[open]").count() > 2
    missed = [one for one in page.evaluate(REACHED) if not one.isdecimal()]
    assert missed == []


def test_signing_in_and_out_by_hand(signed_in, paths):
    page = signed_in.page
    page.goto(f"{signed_in.url}/plans")
    page.get_by_role("button", name="Sign out").click()
    page.goto(f"{signed_in.url}{paths['profiles']}")
    assert "/sign-in?next=" in page.url
    assert [one["id"] for one in Axe().run(page).response["violations"]] == []
    page.get_by_label("Token").fill("a-token-for-pages")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/profiles")
    signed_in.wrong[:] = [one for one in signed_in.wrong if "404" not in one]
    signed_in.check()
