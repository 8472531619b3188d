"""Cause: in a terminal of 60 columns a plan's table and sentences broke in the middle."""

import re

import pytest
from rich.cells import cell_len

from stagewright import plan
from stagewright.cli.main import main
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.plan.table import build_plan_columns
from stagewright.view.terminal import fit_plan_table
from tests.builders import chain_profile

LONG = "transformer." + "inner." * 40 + "end"


@pytest.fixture(scope="module")
def made():
    profile = chain_profile([0.001] * 6, forward_bytes=1000, parameter_bytes=4000, saved_bytes=50)
    first = profile.layers[0]
    named = first.model_copy(update={"layer": first.layer.model_copy(update={"name": LONG})})
    wide = profile.layers[3]
    wide = wide.model_copy(update={"layer": wide.layer.model_copy(update={"name": "层" * 90})})
    layers = (named, *profile.layers[1:3], wide, *profile.layers[4:])
    profile = profile.model_copy(update={"layers": layers, "notes": ("a note " * 30,)})
    options = PlanOptions(num_microbatches=4, recompute="always")
    return plan(profile, Cluster.parse("2x24GB"), options)


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_line_is_wider_than_the_terminal(made, width, tmp_path, monkeypatch, capsys):
    made.write(tmp_path / "plan.json")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["show", str(tmp_path / "plan.json"), "--gantt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= width
    heading, rule, first, second = lines[:4]
    assert heading.split()[:2] == ["stage", *["device" if "device" in heading else "layers"]]
    assert set(rule) == {"-", " "}
    assert (first.split()[0], second.split()[0]) == ("0", "1")
    for always in ("layers", "forward", "memory"):
        assert always in heading
    assert lines[4] == ""
    note = next(index for index, line in enumerate(lines) if line.startswith("note: a note"))
    assert lines[note + 1].startswith("  a note") or lines[note + 1].startswith("  note")
    said = " ".join(line.strip() for line in lines[5:])
    assert "step time" in said
    assert " ".join(["a note"] * 30) in said


def test_the_least_important_columns_go_first(made):
    first_lines = {width: fit_plan_table(made, width).splitlines()[0] for width in (60, 80, 160)}
    headings = {
        width: set(re.split(r"\s{2,}", line.strip())) for width, line in first_lines.items()
    }
    assert headings[60] < headings[80] < headings[160]
    assert len(headings[160]) == len(build_plan_columns(made))
    assert "to" not in headings[60]


def test_names_keep_their_ends(made):
    row = fit_plan_table(made, 140).splitlines()[2]
    assert row.split()[-2].startswith("…")
    assert row.split()[-2].endswith("inner.end")


def test_where_there_is_room_it_is_as_print_shows_it():
    made = plan(chain_profile([0.001] * 6, forward_bytes=1000), Cluster.parse("2x24GB"))
    assert fit_plan_table(made, 2000) == str(made)


def test_what_is_no_terminal_gets_it_whole(made, tmp_path, monkeypatch, capsys):
    made.write(tmp_path / "plan.json")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    assert LONG in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["show", str(tmp_path / "plan.json"), "--json"]) == 0
    assert LONG in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 60, 140])
def test_a_profile_fits_the_terminal_too(width, tmp_path, monkeypatch, capsys):
    profile = chain_profile([0.001] * 6, parameter_bytes=4000, saved_bytes=50)
    first = profile.layers[0]
    marked = {"name": LONG, "opaque": "it draws random numbers of its own " * 4}
    first = first.model_copy(update={"layer": first.layer.model_copy(update=marked)})
    update = {"layers": (first, *profile.layers[1:]), "notes": ("a note " * 30,)}
    profile.model_copy(update=update).write(tmp_path / "profile.json")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["show", str(tmp_path / "profile.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert lines[0].split()[:3] == ["layer", "forward", "backward"]
    assert lines[2].split()[0].endswith("end")
    assert ("OPAQUE" in lines[2]) is (width > 40)
