"""The example prints what it prints with torchgpipe."""

import runpy
import sys


def test_the_example_prints_what_it_prints_with_torchgpipe(repository, monkeypatch, capsys):
    script = str(repository / "examples" / "torchgpipe_skips.py")
    printed = []
    for arguments in ([], ["--original"]):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines())
    assert len(printed[0]) == 6
    assert printed[0] == printed[1]
