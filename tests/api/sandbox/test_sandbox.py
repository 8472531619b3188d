"""A child that misbehaves costs only itself: memory, time, answers, talk, what it starts."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from stagewright.api.sandbox.bubblewrap import Sandbox, find_sandbox
from stagewright.api.sandbox.child import run_confined, run_confined_async
from stagewright.api.sandbox.limits import ChildLimits, default_memory_bytes
from stagewright.api.server import serve
from stagewright.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    OutOfMemory,
    Refused,
)

MEBIBYTE = 2**20
SOON = ChildLimits(memory_bytes=100 * MEBIBYTE, deadline_s=20.0)


def run(program: str, request: bytes = b"", limits: ChildLimits = SOON, **options) -> bytes:
    return run_confined([sys.executable, "-I", "-S", "-c", program], request, limits, **options)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def written(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


def test_what_it_is_given_comes_back():
    request = os.urandom(3 * MEBIBYTE)
    program = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    assert run(program, request) == request[::-1]


@pytest.mark.parametrize(
    "eats",
    [
        "kept = [bytearray(2**20) for _ in range(4000)]",
        "import mmap; m = mmap.mmap(-1, 2**32); [m.write(b'x' * 2**20) for _ in range(4000)]",
        "import os\nif os.fork() == 0:\n    kept = [bytearray(2**20) for _ in range(4000)]\n"
        "os.wait(); import time; time.sleep(60)",
        # Its parent is gone, and it is in a session of its own.
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        kept = [bytearray(2**20) for _ in range(300)]; time.sleep(60)\n    os._exit(0)\n"
        "time.sleep(60)",
    ],
    ids=["itself", "shared memory", "its child", "its orphan"],
)
def test_too_much_memory_ends_it(eats):
    program = (
        'import sys; sys.stderr.write(\'{"done": 1, "total": 3, "layer": "blocks.1"}\\n\');'
        "sys.stderr.flush()\n" + eats
    )
    with pytest.raises(OutOfMemory, match=r"100\.0 MiB; measure a smaller model") as caught:
        run(program)
    assert caught.value.layer == "blocks.1"
    assert caught.value.available_bytes == SOON.memory_bytes < caught.value.required_bytes


def test_what_is_within_the_limit_is_left_alone():
    assert run("kept = bytearray(50 * 2**20); import time; time.sleep(0.3); print(1)") == b"1\n"


def leaves_behind(file: Path) -> str:
    """A child, its child, and one that hid in a session of its own; then it sleeps."""
    sleeper = "import time; time.sleep(600)"
    return (
        "import os, subprocess, sys, time\n"
        f"sleep = [sys.executable, '-I', '-S', '-c', {sleeper!r}]\n"
        "a = subprocess.Popen(sleep); b = subprocess.Popen(sleep, start_new_session=True)\n"
        f"open({str(file) + '.part'!r}, 'w').write(f'{{os.getpid()}} {{a.pid}} {{b.pid}}')\n"
        f"os.rename({str(file) + '.part'!r}, {str(file)!r})\n"
        "time.sleep(float(sys.stdin.read() or 600))\n"
    )


def test_after_the_deadline_nothing_of_it_runs(tmp_path):
    with pytest.raises(DeadlineExceeded, match=r"within 0\.8 s"):
        run(leaves_behind(tmp_path / "pids"), limits=ChildLimits(100 * MEBIBYTE, 0.8))
    assert wait_for(lambda: not any(map(is_running, written(tmp_path / "pids"))))


def test_stopping_it_ends_all_of_it_at_once(tmp_path):
    stopped = threading.Event()

    def stop() -> None:
        wait_for((tmp_path / "pids").exists)
        stopped.set()

    threading.Thread(target=stop).start()
    with pytest.raises(Cancelled):
        run(leaves_behind(tmp_path / "pids"), stopped=stopped)
    assert wait_for(lambda: not any(map(is_running, written(tmp_path / "pids"))))


def test_cancelling_the_coroutine_ends_it_before_it_returns(tmp_path):
    async def cancelled() -> None:
        command = [sys.executable, "-I", "-S", "-c", leaves_behind(tmp_path / "pids")]
        task = asyncio.create_task(run_confined_async(command, b"", SOON))
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_running(written(tmp_path / "pids")[0])

    asyncio.run(cancelled())


def test_a_task_that_is_cancelled_twice_logs_nothing(tmp_path):
    """Cause: a client that left an estimate put a traceback of asyncio into the log."""
    complaints = []

    async def cancelled() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        command = [sys.executable, "-I", "-S", "-c", leaves_behind(tmp_path / "pids")]
        task = asyncio.create_task(run_confined_async(command, b"", SOON))
        while not (tmp_path / "pids").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # while it waits for the child's end, as task groups do
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        while any(map(is_running, written(tmp_path / "pids"))):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)

    asyncio.run(cancelled())
    gc.collect()
    assert complaints == []


def test_it_ends_with_its_parent(tmp_path):
    """Cause: a server that was killed left its measurements running."""
    program = leaves_behind(tmp_path / "pids")
    parent = (
        "import sys\n"
        "from stagewright.api.sandbox.child import ChildLimits, run_confined\n"
        f"command = [sys.executable, '-I', '-S', '-c', {program!r}]\n"
        "run_confined(command, b'', ChildLimits(2**30, 60.0))"
    )
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", parent])
    try:
        assert wait_for((tmp_path / "pids").exists, 20.0)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    child, *below = written(tmp_path / "pids")
    assert wait_for(lambda: not is_running(child))
    for left in below:  # without a sandbox only the child itself is tied to the server
        os.kill(left, 9)


def test_an_endless_answer_ends_it():
    with pytest.raises(MeasurementError, match=r"more than 1\.0 MiB"):
        run("while True: print('x' * 10000)", limits=ChildLimits(100 * MEBIBYTE, 20.0, MEBIBYTE))


def test_endless_talk_is_not_kept():
    """Its end is what says why; a line without an end is no line."""
    program = (
        "import sys\nfor _ in range(100): sys.stderr.write('x' * 10**6)\n"
        'sys.stderr.write(\'\\n{"kinds": ["InvalidInput"], "message": "no"}\\n\'); sys.exit(1)'
    )
    with pytest.raises(InvalidInput, match="no"):
        run(program)


def test_progress_is_told_and_nonsense_is_not():
    told = []
    lines = [
        {"done": 1, "total": 2, "layer": "a" * 1000},
        {"done": -1, "total": 2, "layer": "b"},
        {"done": True, "total": 2, "layer": "b"},
        {"done": 10**30, "total": 2, "layer": "b"},
        {"done": 1, "total": 2, "layer": {}},
        {"done": 2, "total": 2, "layer": "c"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    run(f"import sys; sys.stderr.write({text + '[' * 9999!r})", on_progress=told.append)
    assert [entry["layer"] for entry in told] == ["a" * 200, "c"]


def test_what_a_child_announces_is_cut():
    announced = {"kinds": ["InvalidInput"], "message": "m" * 10**4}
    announced["details"] = {"field": "/" * 10**4}
    program = f"import sys; sys.stderr.write({json.dumps(announced)!r}); sys.exit(1)"
    with pytest.raises(InvalidInput) as caught:
        run(program)
    assert len(str(caught.value)) == 2000
    assert len(caught.value.field) == 200


def test_halves_of_characters_are_replaced():
    """Cause: a layer named so made every list of the project's jobs an internal error."""
    told = []
    lines = '{"done": 1, "total": 1, "layer": "a\\ud800"}\n'
    lines += '{"kinds": ["InvalidInput"], "message": "b\\udfff", "details": {"field": "/\\ud800"}}'
    with pytest.raises(InvalidInput) as caught:
        run(f"import sys; sys.stderr.write({lines!r}); sys.exit(1)", on_progress=told.append)
    assert (told[0]["layer"], str(caught.value), caught.value.field) == ("a?", "b?", "/?")


def test_of_the_environment_it_sees_what_changes_torch(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("STAGEWRIGHT_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "HOME", "LD_PRELOAD"):
        monkeypatch.setenv(name, "/secret")
    seen = run("import os; print(*os.environ)").decode().split()
    assert "OMP_NUM_THREADS" in seen
    assert not {"STAGEWRIGHT_TOKEN", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "HOME"} & {*seen}


def test_the_default_leaves_the_server_some_memory():
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**28 < default_memory_bytes() < 0.8 * installed


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return find_sandbox()
    except Refused as error:
        pytest.skip(f"no sandbox can be had here: {error}")


def make_environment(folder: Path) -> Path:
    """A virtual environment below a temporary folder, its Python a link to a link elsewhere."""
    (folder / "bin").mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir()
    base = Path(os.path.realpath(sys.executable))
    (folder.parent / "elsewhere" / "python").symlink_to(base)
    (folder / "bin" / "python3").symlink_to("../../elsewhere/python")
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.parent.mkdir(parents=True)
    packages.symlink_to(sysconfig.get_path("purelib"))
    return folder / "bin" / "python3"


def test_a_python_below_a_temporary_folder_is_seen_in_the_sandbox(sandbox, tmp_path, monkeypatch):
    """Cause: /tmp was mounted over it, and a checkout there was measured without a sandbox."""
    python = make_environment(tmp_path / "venv")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "secret").write_text("nobody's")
    found = find_sandbox.__wrapped__()
    program = (
        "import os, sys, pydantic\n"
        f"os.makedirs({str(tmp_path)!r}, exist_ok=True)\n"
        f"print(sorted(os.listdir({str(tmp_path)!r})))\n"
        "try:\n    open(sys.prefix + '/written', 'w')\n"
        "except OSError as error:\n    print(error.strerror)\n"
    )
    said = run_confined([str(python), "-P", "-c", program], b"", SOON, sandbox=found)
    assert said.decode().splitlines() == ["['elsewhere', 'venv']", "Read-only file system"]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("sys.exit('bwrap: execvp /x/python3: No such file or directory')", "cannot be run inside"),
        ("sys.exit('bwrap: Unknown option --disable-userns')", "older than 0.8"),
        ("sys.exit('bwrap: Creating new namespace failed: Operation not permitted')", "namespaces"),
        (
            "sys.exit('numpy, torch')",
            "does not find packages inside a sandbox: numpy, torch;",
        ),
    ],
)
def test_why_there_is_no_sandbox_is_said_as_it_is(tmp_path, monkeypatch, program, words):
    wrapper = tmp_path / "bwrap"
    wrapper.write_text(f"#!{sys.executable} -IS\nimport sys\n{program}\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match=words) as refused:
        find_sandbox.__wrapped__()
    assert ("user namespaces" in str(refused.value)) == ("Creating" in program)


def test_a_server_that_requires_a_sandbox_does_not_start_without(monkeypatch, tmp_path):
    find_sandbox.cache_clear()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match="install your system's 'bubblewrap'"):
        serve(port=0, sandbox="required")
    assert not list(tmp_path.iterdir())


def test_the_log_says_where_a_child_failed_and_nothing_of_what_was_sent(
    caplog, monkeypatch, tmp_path
):
    """Cause: tracebacks and refusals of a contradictory program were logged with its names.

    A name of several lines may pretend to be frames of a traceback, or messages of the sandbox.
    """
    monkeypatch.syspath_prepend(tmp_path)
    child = tmp_path / "child.py"
    child.write_text(
        "import sys, json\n"
        "sys.stderr.write(json.dumps({'done': 1, 'total': 2, 'layer': 'SENT'}) + chr(10))\n"
        "names = {}\n"
        "names['SENT: KeyError']\n"
    )
    forged = [
        '  File "SENT',
        '  File "<SENT>", line 1, in f',
        '  File "/SENT.py", line 1, in f',
        f'  File "{child}", line 4, in SENT',
        f'  File "{child} SENT", line 4, in f',
        f'  File "{tmp_path}/SENT.py", line 4, in f',
        "bwrap: SENT",
        "SENTError: no",
    ]
    program = (
        f"import runpy, sys; sys.stderr.write({chr(10).join([*forged, ''])!r})\n"
        f"runpy.run_path({str(child)!r})"
    )
    with pytest.raises(MeasurementError), caplog.at_level("INFO"):
        run(program)
    assert f'File "{child}", line 4' in caplog.text
    assert caplog.text.rstrip().endswith("KeyError")
    assert "SENT" not in caplog.text
    with pytest.raises(MeasurementError), caplog.at_level("INFO"):
        run("import sys; sys.exit('bwrap: no namespaces')")
    assert caplog.text.rstrip().endswith("bwrap: no namespaces")
    refuses = (
        "import sys, json\n"
        "sys.stderr.write(json.dumps({'kinds': ['InvalidInput'], 'message': 'no SENT'}))\n"
        "sys.exit(1)\n"
    )
    with pytest.raises(InvalidInput, match="no SENT"), caplog.at_level("INFO"):
        run(refuses)
    assert caplog.text.rstrip().endswith("ended with 1: InvalidInput")
    assert "SENT" not in caplog.text
