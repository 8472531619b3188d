"""What is painted on the canvases of the offline file, pixel by pixel."""

from __future__ import annotations

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.view.build_plan_view import build_plan_view
from stagewright.view.html import plan_page
from tests.builders import chain_profile

pytestmark = pytest.mark.timeout(120)

COLUMN = """([id, share, top, bottom]) => {
    const canvas = document.querySelector(`#${id} canvas`);
    const ratio = window.devicePixelRatio;
    const x = Math.round((150 + share * (canvas.clientWidth - 158)) * ratio);
    const height = (bottom - top) * ratio;
    const { data } = canvas.getContext("2d").getImageData(x, top * ratio, 1, height);
    return Array.from({ length: height }, (_, row) => [...data.slice(4 * row, 4 * row + 3)]);
}"""
COLOUR = """(name) => {
    const probe = document.createElement("canvas").getContext("2d");
    const style = getComputedStyle(document.documentElement);
    probe.fillStyle = style.getPropertyValue(`--${name}`).trim();
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}"""


def shown(chromium, folder, cluster, num_microbatches):
    profile = chain_profile([0.001, 0.001], parameter_bytes=2**20, saved_bytes=2**16)
    options = PlanOptions(num_microbatches=num_microbatches)
    plan = plan_from_balance(profile, cluster, options, (1, 1))
    path = folder / f"{num_microbatches}.html"
    path.write_text(plan_page(build_plan_view(plan, profile, cluster)), encoding="utf-8")
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_selector("[role=tree]")
    return page


def share_of(page, name, pixels):
    """How much of a column has a colour of the style sheet."""
    wanted = page.evaluate(COLOUR, name)
    same = [max(abs(a - b) for a, b in zip(pixel, wanted, strict=True)) < 24 for pixel in pixels]
    return sum(same) / len(same)


def test_what_shares_a_pixel_has_its_share_of_it(chromium, tmp_path):
    """Cause: of 512 micro-batches forwards were hidden under the backwards behind them."""
    page = shown(chromium, tmp_path, Cluster.parse("2x24GB"), 3000)
    for share in (0.3, 0.5, 0.7):
        pixels = page.evaluate(COLUMN, ["gantt", share, 2, 32])
        assert share_of(page, "forward", pixels) == pytest.approx(1 / 3, abs=0.15)
        assert share_of(page, "backward", pixels) == pytest.approx(2 / 3, abs=0.15)
    page.close()


def test_a_limit_is_drawn_however_far_above(chromium, tmp_path):
    page = shown(chromium, tmp_path, Cluster.parse("2x24GB"), 3)
    legend = page.locator("#memory .legend li")
    assert legend.all_inner_texts()[-1] == "limit"
    for lane in range(2):
        top = page.evaluate(COLUMN, ["memory", 0.2, 64 * lane, 64 * lane + 14])
        assert share_of(page, "limit", top) == pytest.approx(2 / 14, abs=0.05)
        assert share_of(page, "fixed", top) == 0
    assert "23.6 GiB, is far above what is held" in page.locator("#memory .told").inner_text()
    page.close()


def test_a_limit_nearby_is_drawn_to_scale(chromium, tmp_path):
    cluster = Cluster.parse("2x24GB")
    near = tuple(
        device.model_copy(update={"memory_bytes": 8 * 2**20}) for device in cluster.devices
    )
    page = shown(chromium, tmp_path, cluster.model_copy(update={"devices": near}), 3)
    pixels = page.evaluate(COLUMN, ["memory", 0.2, 0, 64])
    assert share_of(page, "limit", pixels) == pytest.approx(2 / 64, abs=0.02)
    assert page.locator("#memory .told").inner_text() == ""
    page.close()


def test_without_limits_the_legend_has_none(chromium, tmp_path):
    cluster = Cluster.parse("2x24GB")
    free = tuple(device.model_copy(update={"memory_bytes": None}) for device in cluster.devices)
    page = shown(chromium, tmp_path, cluster.model_copy(update={"devices": free}), 3)
    assert "limit" not in page.locator("#memory .legend").inner_text()
    assert page.locator("#memory .told").inner_text() == "No limit is set."
    page.close()
