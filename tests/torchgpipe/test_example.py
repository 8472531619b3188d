"""The example prints what it prints with torchgpipe."""

import runpy
import sys

import pytest


def test_the_example_prints_what_it_prints_with_torchgpipe(repository, monkeypatch, capsys):
    script = str(repository / "examples" / "torchgpipe_skips.py")
    printed = []
    for arguments in ([], ["--original"]):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines())
    assert len(printed[0]) == 6
    for ours, theirs in zip(*printed, strict=True):
        (name, loss), (wanted_name, wanted) = ours.split(": "), theirs.split(": ")
        assert name == wanted_name
        assert float(loss) == pytest.approx(float(wanted), abs=1e-5)
