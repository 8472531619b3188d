"""benchmarks/defaults.py: the command's choices against the fixed ones."""

import importlib

import pytest

pytest.importorskip("transformers")


def test_choices_take_less_time_for_a_sample_and_leave_memory(request, monkeypatch):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
    script = importlib.import_module("defaults")
    assert len(script.CASES) == 8
    old, new = script.compare("gpt2-small", "4x24GB")
    assert new.sample_s < old.sample_s
    assert new.bubble < old.bubble
    assert new.free >= script.LEAST_FREE
