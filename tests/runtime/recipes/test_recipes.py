"""The recipes of ``examples/recipes`` on 2 and 4 ranks, equal to the unsplit model."""

from __future__ import annotations

import json
import re
import runpy

import pytest

from tests.runtime.forked import run_worker
from tests.runtime.recipes.worker import FOLDER, MESH

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]

TOLERANCE = 1e-12
HELD = {
    "data_parallel": ("whole", 4),
    "parameter_parallel": ("sharded", 4),
    "class_parallel": ("divided", 5),
    MESH: ("divided", 5),
    "grouped_convolution": ("divided", 5),
    "recomputation": ("whole", 16),
    "stages_in_order": None,
}
"""How ranks hold weights, and of how many."""


@pytest.mark.parametrize("name", HELD)
def test_a_recipe_equals_the_unsplit_model(name, forked_python):
    printed = run_worker(
        forked_python, "tests.runtime.recipes.worker", json.dumps([name]), timeout_s=260
    )
    found = [json.loads(line) for line in printed.splitlines()]
    reported = [entry for entry in found if "rank" in entry]
    assert [entry["ranks"] for entry in reported].count(2) == 2
    assert [entry["ranks"] for entry in reported].count(4) == 4
    for entry in reported:
        for what in ("loss", "gradient", "output"):
            assert entry.get(what, 0.0) <= TOLERANCE, entry
    check_held(name, reported)
    (script,) = [entry for entry in found if "apart" in entry]
    assert script["apart"] <= TOLERANCE
    assert script["printed"] == {"data_parallel": 12, "stages_in_order": 2}.get(name, 3)


def check_held(name, reported):
    """Each weight is held as the recipe says, by ranks together where stages differ."""
    if HELD[name] is None:
        assert all("output" in entry for entry in reported)
        return
    kind, count = HELD[name]
    for ranks in (2, 4):
        held = [entry for entry in reported if entry["ranks"] == ranks]
        if name == MESH and ranks == 2:  # one rank a replica
            assert all(entry["whole"] == 6 for entry in held)
        elif name == "recomputation":
            assert sum(entry[kind] for entry in held) == count
        else:
            assert all(entry[kind] == count for entry in held), held


def test_one_process_equals_the_unsplit_model(capsys):
    runpy.run_path(str(FOLDER / "one_process.py"), run_name="__main__")
    apart = re.findall(r"(\S+) apart$", capsys.readouterr().out, re.MULTILINE)
    assert len(apart) == 3
    assert max(map(float, apart)) <= TOLERANCE


def test_recipes_are_short():
    scripts = sorted(FOLDER.glob("*.py"))
    assert len(scripts) >= 7
    for script in scripts:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 40, script.name
