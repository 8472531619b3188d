"""Every page: no serious finding of axe, nothing wider than the screen, light and dark."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

from stagewright.api.examples import example_profile

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
    return {
        "plans": "/plans",
        "plan": f"/plans/{first}?m=12",
        "infeasible": f"/plans/{nothing}",
        "compare": f"/compare?id={first}&id={second}",
        "choose": "/compare",
        "profiles": "/profiles",
        "profile": f"/profiles/{made[0]['profile_id']}",
        "new": "/new",
        "jobs": "/jobs",
        "missing": "/plans/plan_missing",
    }


NAMES = (
    "plans", "plan", "infeasible", "compare", "choose", "profiles", "profile", "new", "jobs",
    "missing",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_accessible_and_fits_any_screen(signed_in, paths, name):
    page = signed_in.page
    page.goto(signed_in.url + paths[name])
    page.wait_for_load_state("networkidle")
    for scheme, width in (("light", 1280), ("dark", 390)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        found = Axe().run(page).response["violations"]
        serious = [
            f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


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
