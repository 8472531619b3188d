"""Every error has its exit code, and says who has to act."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from stagewright.cli import main as cli_main
from stagewright.cli.exit_codes import ExitCode, exit_code, format_error
from stagewright.core import errors
from stagewright.core.errors import (
    Cancelled,
    CaptureError,
    DeadlineExceeded,
    ForeignError,
    Infeasible,
    InvalidInput,
    MeasurementError,
    NonFinite,
    NotFound,
    OutOfMemory,
    PlanMismatch,
    RankFailed,
    Refused,
    StagewrightError,
    Unreachable,
)

CODES = {
    InvalidInput("x"): ExitCode.USAGE,
    CaptureError("x"): ExitCode.USAGE,
    MeasurementError("x"): ExitCode.USAGE,
    NonFinite("x"): ExitCode.USAGE,
    PlanMismatch("x"): ExitCode.USAGE,
    Infeasible("x", constraint="memory"): ExitCode.INFEASIBLE,
    RankFailed("x"): ExitCode.UNREACHABLE,
    Refused("x"): ExitCode.REFUSED,
    NotFound("x"): ExitCode.USAGE,
    Unreachable("x"): ExitCode.UNREACHABLE,
    OutOfMemory("x"): ExitCode.INFEASIBLE,
    Cancelled("x"): ExitCode.CANCELLED,
    ForeignError("x"): ExitCode.BUG,
    DeadlineExceeded("x"): ExitCode.CANCELLED,
}
OTHERS = {
    typer.BadParameter("x"): ExitCode.USAGE,
    typer.Abort(): ExitCode.CANCELLED,
    KeyboardInterrupt(): ExitCode.CANCELLED,
    TimeoutError("x"): ExitCode.CANCELLED,
    MemoryError(): ExitCode.INFEASIBLE,
    PermissionError("x"): ExitCode.REFUSED,
    ConnectionRefusedError("x"): ExitCode.UNREACHABLE,
    ModuleNotFoundError("x", name="torch.nn"): ExitCode.USAGE,
    ModuleNotFoundError("x", name="stagewright.nothing"): ExitCode.BUG,
    ValueError("x"): ExitCode.BUG,
}


def test_every_error_of_ours_is_listed():
    found = StagewrightError.__subclasses__()
    found += [below for error in found for below in error.__subclasses__()]
    ours = {error for error in found if error.__module__ == errors.__name__}
    assert ours == {type(error) for error in CODES}
    drawn = re.findall(r"── (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(error.__name__ for error in ours)


@pytest.mark.parametrize(
    ("error", "code"), [*CODES.items(), *OTHERS.items()], ids=lambda value: repr(value)
)
def test_code(error, code):
    assert exit_code(error) is code


def test_running_out_of_memory_counts_also_as_a_cause():
    error = InvalidInput("calling the factory failed")
    error.__cause__ = MemoryError()
    assert exit_code(error) is ExitCode.INFEASIBLE


def test_torch_running_out_of_memory_counts():
    """Cause: on Linux torch's CPU allocator says "can't allocate memory", not "not enough"."""
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    assert exit_code(RuntimeError(message)) is ExitCode.INFEASIBLE


def test_a_missing_extra_says_what_to_install():
    error = ModuleNotFoundError("No module named 'transformers'", name="transformers")
    assert format_error(error) == (
        "this command requires transformers; run: pip install -e '.[hf]' (in the checkout)"
    )


@pytest.fixture
def broken(monkeypatch):
    """A command list whose only command has a bug."""

    def command() -> None:
        raise ZeroDivisionError("division by zero")

    app = typer.Typer(rich_markup_mode=None)
    app.callback()(cli_main._show_overview)
    app.command("broken")(command)
    monkeypatch.setattr(cli_main, "build_app", lambda: app)


@pytest.mark.usefixtures("broken")
def test_a_bug_says_so_and_hides_the_traceback(run):
    ran = run("broken")
    assert ran.code == 1
    assert ran.stdout == ""
    assert "this is a bug in Stagewright: ZeroDivisionError: division by zero" in ran.stderr
    assert "report it" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.usefixtures("broken")
def test_debug_shows_the_traceback(run, monkeypatch):
    assert "Traceback" in run("--debug", "broken").stderr
    monkeypatch.setenv("STAGEWRIGHT_DEBUG", "1")
    assert "Traceback" in run("broken").stderr


def test_errors_are_json_with_json(run):
    ran = run("plan", "absent.json", "--devices", "2xcpu", "--json")
    assert (ran.code, ran.stdout) == (2, "")
    assert json.loads(ran.stderr) == {
        "error": "InvalidInput",
        "exit_code": 2,
        "detail": "cannot read absent.json: No such file or directory",
        "field": None,
    }


@pytest.mark.parametrize("words", [[], ["nothing"], ["plan"], ["plan", "--nothing"]])
def test_usage(run, words):
    ran = run(*words)
    assert (ran.code, ran.stdout) == (2, "")
    assert "Usage: stagewright" in ran.stderr
    assert ran.stderr.startswith("error: " if words else "Usage")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_no_bug(forked_python):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [forked_python, "-m", "stagewright.cli", "doctor"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert ran.returncode == ExitCode.USAGE
    assert "cannot write to stdout: No space left on device" in ran.stderr


def hear_interrupts() -> None:
    """In the child: whoever starts the tests in the background may have them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupting_a_command_cancels_it(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import threading\n"
        "def model():\n"
        "    print('started', flush=True)\n"
        "    threading.Event().wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "stagewright.cli", "profile", "slow:model", "--sample", "slow:x"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (6, "error: cancelled\n")
    assert not list(tmp_path.glob("*.json*"))


def test_a_reader_that_goes_away_is_no_error(profile_file):
    process = subprocess.Popen(
        [sys.executable, "-m", "stagewright.cli", "show", str(profile_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 0
    assert "Error" not in errors
