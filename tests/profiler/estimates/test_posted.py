"""docs/evidence/posted.md lists every posted run, and plans print the band that it shows."""

from __future__ import annotations

import importlib
import re

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.assumptions import PIPELINES
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from tests.builders import chain_profile

HEADS = ("tensor x replicas x stages", "took times as long", "printed band", "inside")


@pytest.fixture
def script(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
    return importlib.import_module("posted")


def read_tables(path):
    """The page's tables, each a list of rows by heading."""
    tables = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "run":
            heads = cells
            tables.append([])
        elif not cells[0].startswith("--"):
            tables[-1].append(dict(zip(heads, cells, strict=True)))
    return tables


def test_the_page_lists_every_posted_run(script):
    steps, memory = read_tables(script.PAGE)
    posted = script.read_rows("posted_steps.csv")
    assert [row["measured, s"] for row in steps] == [row["measured_s"] for row in posted]
    assert [row["remark"] for row in steps] == [row["remark"] for row in posted]
    runs = script.read_rows("posted_memory.csv")
    assert [row["run"] for row in memory] == [row["run"] for row in runs]
    for row, run in zip(memory, runs, strict=True):
        assert bool(row["planned, GiB"]) != ("cannot be expressed" in run["remark"])


def test_the_printed_band_is_that_of_the_posted_pipelines(script):
    """Cause: pipelines printed the band of unsplit steps, which 8 of 14 posted steps leave."""
    steps, _ = read_tables(script.PAGE)
    ratios = {True: [], False: []}
    for row in steps:
        predicted_s, measured_s = float(row["predicted, s"]), float(row["measured, s"])
        ratio = float(row["took times as long"])
        assert ratio == pytest.approx(measured_s / predicted_s, rel=0.01)
        is_pipeline = not row["tensor x replicas x stages"].endswith("x 1")
        ratios[is_pipeline].append((ratio, row["printed band"], row["inside"]))
    several = [ratio for ratio, *_ in ratios[True]]
    assert len(several) == PIPELINES.number
    assert PIPELINES.least <= min(several) < PIPELINES.least + 0.02
    assert PIPELINES.most - 0.1 <= max(several) <= PIPELINES.most
    assert {band for _, band, _ in ratios[True]} == {f"x {PIPELINES.least} to {PIPELINES.most}"}
    for ratio, band, inside in ratios[False]:
        width = int(re.fullmatch(r"&plusmn;(\d+)%", band)[1]) / 100
        error = abs(1 / ratio - 1)
        assert abs(error - width) < 0.01 or inside == ("yes" if error < width else "no")
    counted = sum(inside == "yes" for *_, inside in ratios[False])
    said = f"Inside the printed band: {counted} of {len(ratios[False])} steps of one stage"
    assert said in script.PAGE.read_text(encoding="utf-8")


def test_a_prediction_of_the_page_is_todays(script):
    row = next(row for row in script.read_rows("posted_steps.csv") if row["precision"] == "fp32")
    steps, _ = read_tables(script.PAGE)
    (shown,) = [each for each in steps if each["precision"] == "fp32"]
    assert float(shown["predicted, s"]) == pytest.approx(script.price(row).step_time_s, rel=0.01)


def estimated(band):
    profile = chain_profile([1, 1])
    provenance = profile.provenance.model_copy(update={"source": "estimated", "error_band": band})
    return profile.model_copy(update={"provenance": provenance})


@pytest.mark.parametrize("stages", [1, 2])
def test_only_plans_of_one_stage_print_the_band_of_unsplit_steps(stages):
    made = plan(estimated(0.14), Cluster.uniform(2), PlanOptions(num_stages=stages))
    text = str(made)
    pipelines = f"{PIPELINES.least:g} to {PIPELINES.most:g} times as long"
    assert ("ESTIMATED profile, expected error 14%" in text) == (stages == 1)
    assert (f"unsplit steps within 14%, posted pipelines took {pipelines}" in text) == (stages == 2)
    assert any(pipelines in note for note in made.notes) == (stages == 2)


@pytest.mark.parametrize("source", ["measured", "estimated"])
def test_without_a_band_nothing_is_said_of_pipelines(source):
    profile = estimated(None)
    provenance = profile.provenance.model_copy(update={"source": source})
    profile = profile.model_copy(update={"provenance": provenance})
    assert "posted" not in str(plan(profile, Cluster.uniform(2), PlanOptions(num_stages=2)))
