"""The offline file, the terminal's lanes and the notebook's picture."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest
from rich.console import Console

from stagewright import plan
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.view.build_plan_view import build_plan_view
from stagewright.view.html import MODULES, STATIC, plan_page, program, stylesheet
from stagewright.view.terminal import gantt_text
from tests.builders import chain_profile

EVIL = "</script><img src=x onerror=alert(1)>&'\""


@pytest.fixture(scope="module")
def made():
    profile = chain_profile([0.001, 0.002, 0.001, 0.002], forward_bytes=100, saved_bytes=100)
    return plan(profile, Cluster.parse("2x24GB"), PlanOptions(num_microbatches=4))


@pytest.fixture(scope="module")
def page(made):
    return plan_page(build_plan_view(made.model_copy(update={"model": EVIL})))


def test_the_file_has_one_script_and_one_style_named_by_their_hashes(page):
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[1]
    for kind, text in (("script-src", program()), ("style-src", stylesheet())):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} &#39;sha256-{digest}&#39;" in policy
        assert page.count(text) == 1
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="view">', '<script type="module">'
    ]  # fmt: skip


def test_the_file_loads_nothing_and_takes_names_as_text(page):
    markup = page.split("<script")[0]
    assert not re.search(r"https?://|<link|<i(?!nput)|url\((?!#arrow)", markup)
    assert not re.search(r"<\w[^>]*\s(src|href|on\w+|style)=", markup)
    assert "<img" not in page
    view = re.search(r'id="view">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(view)["header"]["model"] == EVIL


def test_names_of_several_lines_and_directions_are_written_as_escapes(made):
    """In the markup; the data has them as the API does."""
    name = "a\u202eb\u2028c\x07d\ne"
    first = made.stages[0]
    names = (name, *first.layer_names[1:])
    stages = (first.model_copy(update={"layer_names": names}), *made.stages[1:])
    page = plan_page(build_plan_view(made.model_copy(update={"model": name, "stages": stages})))
    assert not re.search("[\u202e\u2028\x07]", page.split("<script")[0])
    assert "\u2028" not in page
    escaped = r"a\u202eb\u2028c\x07d\ne"
    assert f'<h1 id="title">{escaped}</h1>' in page
    assert f'title="{escaped}"' in page
    view = json.loads(re.search(r'id="view">(.*?)</script>', page, re.DOTALL)[1])
    assert view["layers"]["names"][0] == name


def test_each_module_imports_from_those_before_it_alone():
    """So that they work one behind the other, in one scope."""
    assert set(MODULES) == {path.name for path in STATIC.glob("*.js")}
    names: list[str] = []
    for place, module in enumerate(MODULES):
        text = (STATIC / module).read_text()
        imported = re.findall(r'from "\./([\w.]+)";', text)
        assert set(imported) <= set(MODULES[:place]), module
        names += re.findall(r"^(?:export )?(?:const|let|function\*?|class) (\w+)", text, re.M)
    assert len(names) == len(set(names))
    assert not re.search(r"^(import|export) ", program(), re.MULTILINE)


def test_no_line_of_the_program_evaluates_or_asks_for_markup():
    for module in MODULES:
        text = (STATIC / module).read_text()
        assert not re.search(r"\beval\(|innerHTML|outerHTML|new Function|document\.write", text)


def test_lanes_in_a_terminal(made):
    """Two stages of 9 ms a micro-batch: forward a third of it, the second starts 3 ms later."""
    view = build_plan_view(made)
    console = Console(width=60, record=True, color_system=None)
    with console.capture() as captured:
        console.print(gantt_text(view, 60))
    first, second, axis = captured.get().splitlines()
    assert first.startswith("0 24GB:0 F")
    assert second.startswith("1 24GB:1 .")
    assert first.count("B") == pytest.approx(2 * first.count("F"), abs=4)
    assert axis.endswith("ms")
    assert all(len(line) <= 60 for line in (first, second, axis))


def test_a_notebook_shows_the_step_and_the_table(made):
    html = made.model_copy(update={"model": EVIL})._repr_html_()
    assert "<img src=x" not in html
    assert "<script" not in html
    image = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', html)[1]
    assert base64.b64decode(image).startswith(b"<svg")
    assert html.count("<tr>") == 1 + made.num_stages
