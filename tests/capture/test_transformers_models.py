"""benchmarks/transformers_models.py: a row is equal, and mistakes in the pipeline are seen."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("transformers_models")


def test_there_are_forty_and_caches_are_untouched(script):
    published = importlib.import_module("zoo.published")
    assert len(published.MODELS) == 40
    assert not any("use_cache" in one.sizes for one in published.MODELS.values())
    assert published.MODELS["llama"].build().config.use_cache is True


def test_a_model_with_a_cache_is_equal(script):
    row = script.judge("llama")
    assert (row.verdict, row.reason, row.stages) == ("equal", "", 2)


def test_a_pipeline_that_computes_something_else_is_no_row_of_equals(script, monkeypatch):
    pipelines = importlib.import_module("stagewright.runtime.pipeline")
    forward = pipelines.Pipeline.forward

    def larger(self, *inputs, **named):
        found = forward(self, *inputs, **named)
        found["logits"] = found["logits"] * 1.001
        return found

    monkeypatch.setattr(pipelines.Pipeline, "forward", larger)
    row = script.judge("llama")
    assert row.verdict == "failed"
    assert "outputs differ" in row.reason


@pytest.mark.parametrize(
    ("verdict", "reason", "is_kept"),
    [
        ("equal", "", True),
        ("refused", "branches on data at model.py:12: if x.sum() > 0", True),
        ("refused", "cannot be captured", False),
        ("failed", "KeyError at model.py:12", False),
    ],
)
def test_refusals_without_a_line_are_not_kept(script, verdict, reason, is_kept):
    rows = [script.Row(str(index), "text", "equal") for index in range(39)]
    assert script.is_kept([*rows, script.Row("last", "text", verdict, reason=reason)]) is is_kept


def test_too_few_equals_are_not_kept(script):
    rows = [script.Row(str(index), "text", "equal") for index in range(37)]
    rest = [script.Row(name, "text", "refused", reason="at model.py:1") for name in "abc"]
    assert not script.is_kept([*rows, *rest])


def test_rows_are_kept_between_runs(tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"name": "gpt2", "kind": "text", "verdict": "equal"}
    rows.write_text(json.dumps(row) + "\n")
    done = subprocess.run(
        (sys.executable, "benchmarks/transformers_models.py", "--only", "gpt2", "--rows", rows),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "1 of 1 equal" in done.stdout
