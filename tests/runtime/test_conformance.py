"""benchmarks/conformance.py: cells are equal, and whatever is not is called what it is."""

import importlib
import json
from pathlib import Path

import pytest

from tests.runtime.forked import run_python

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def printed(forking_executable, script, *words):
    done = run_python(forking_executable, str(script), "--json", *words, timeout_s=220)
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def test_hard_cells_are_equal(forking_executable):
    names = ("GPT tied", "dropout", "unregistered tie", "stateful opaque layer", "attribute losses")
    models = ",".join(f"model={name}" for name in names)
    only = f"{models},schedule=1f1b,schedule=zbv,ranks=2"
    done, rows = printed(
        forking_executable, "benchmarks/conformance.py", "--only", only, "--time-limit", "60"
    )
    assert {row["ours"] for row in rows} == {"equal"}, rows
    assert (len(rows), done.returncode) == (10, 0), done.stderr[-3000:]
    assert {(row["schedule"], row["stages"]) for row in rows} == {("1f1b", 2), ("zbv", 4)}
    torch = {row["model"]: row["torch"] for row in rows if row["schedule"] == "1f1b"}
    wrong = {torch["GPT tied"], torch["attribute losses"]}
    assert (wrong, torch["dropout"]) == ({"wrong"}, "equal"), rows


def test_nested_inputs_and_checkpointed_blocks_are_equal(forking_executable):
    only = "model=dict inputs,model=gradient checkpointing,schedule=1f1b,schedule=zbv,ranks=2"
    words = ["--as-on-nccl", "--only", only, "--time-limit", "60"]
    done, rows = printed(forking_executable, "benchmarks/conformance.py", *words)
    assert [row["ours"] for row in rows] == ["equal"] * 4, rows
    assert done.returncode == 0, done.stderr[-3000:]


PLANTED = """
import os, sys, time
sys.path.insert(0, "benchmarks")
import conformance, torch.distributed
from conformance_suite import group, ours, reference
from stagewright.core.errors import PlanMismatch

run, prepare = ours.OurTrial.run, ours.OurTrial.prepare

def planted_prepare(self):
    if self._cell.schedule == "gpipe":
        raise PlanMismatch("not this one")
    if self._cell.schedule == "looped_bfs" and torch.distributed.get_rank() == 1:
        raise PlanMismatch("only one rank says so")
    prepare(self)

def planted_run(self):
    schedule, rank = self._cell.schedule, torch.distributed.get_rank()
    if rank == 1 and schedule == "zero_bubble":
        os._exit(3)
    if rank == 1 and schedule == "zbv":
        raise KeyError("planted")
    if rank == 1 and schedule == "dualpipev":
        time.sleep(600)
    run(self)
    if rank == 1 and schedule == "interleaved_1f1b":
        name, gradient = self.states[1].gradients[0]
        gradient *= 1 + 1e-6
    if rank == 1 and schedule == "interleaved_zero_bubble":
        self.states[0].gradients.pop()
        self.states[1].gradients.pop()
    if schedule == "forward_only":
        self.states[0].loss = None

group.REFUSAL_GRACE_S = 3.0
ours.OurTrial.run = planted_run
ours.OurTrial.prepare = planted_prepare
torch.set_num_threads(1)
ours._profile(reference.BY_NAME["MLP"])  # once, and not by every rank
sys.exit(conformance.main())
"""


def test_what_is_planted_is_found(forking_executable, tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    words = ["--ours-only", "--only", "model=MLP,ranks=2", "--time-limit", "10"]
    done, rows = printed(forking_executable, script, *words)
    found = {row["schedule"]: (row["ours"], row["ours_detail"]) for row in rows}
    assert done.returncode == 1
    assert len(found) == 9, done.stderr[-3000:]
    assert found["1f1b"] == ("equal", "")
    assert found["gpipe"] == ("refused: not this one", "")
    assert found["looped_bfs"] == ("error", "PlanMismatch: only one rank says so")
    assert found["zero_bubble"][0] == "error"
    assert found["zbv"] == ("error", "KeyError: 'planted'")
    assert found["dualpipev"] == ("hang", "ranks 0, 1 did not end in the run phase")
    verdict, detail = found["interleaved_1f1b"]
    assert verdict == "wrong"
    assert detail.startswith("the gradient of blocks.2.0.weight in step 1 is off by 1e-06")
    assert found["interleaved_zero_bubble"][0] == "wrong"
    assert found["interleaved_zero_bubble"][1] == "blocks.7.0.bias is held by no stage"
    assert found["forward_only"] == ("wrong", "no rank knows the loss")


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("conformance_suite.page")


def row(schedule, ours, torch="error", detail=""):
    parts = importlib.import_module("conformance_suite.cell")
    cell = parts.Cell("MLP", schedule, 2)
    return parts.Row(cell, parts.Outcome(ours, detail), parts.Outcome(torch))


def test_promises_are_held_to(page):
    many = [row("zbv", "equal")] * 20
    assert page.faults(many) == []
    assert page.faults([*many, row("zbv", "refused: too hard")]) == []
    assert "torch is equal" in page.faults([*many, row("zbv", "refused: no", "equal")])[0]
    assert "1f1b refuses nothing" in page.faults([*many, row("1f1b", "refused: no")])[0]
    assert "wrong: by far" in page.faults([*many, row("1f1b", "wrong", detail="by far")])[0]
    assert "a tenth" in page.faults([*many, *[row("zbv", "refused: no")] * 3])[0]


def test_the_page_gives_reasons_once(page):
    rows = [row("gpipe", "equal"), row("zbv", "refused: a | b"), row("dualpipev", "refused: a | b")]
    text = page.page(rows)
    assert "| MLP | equal / **error** | refused / **error** | refused / **error** |" in text
    assert text.count("refused: a \\| b") == 1
    assert "MLP: zbv on 2, dualpipev on 2" in text
    assert text.startswith("ours: 3 cells, 1 equal, 2 refused")
