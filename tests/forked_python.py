"""A stand-in for ``python -m MODULE`` that forks a process which has imported torch already.

A process of its own takes one to four seconds to import what it needs, and one more for the first
model it traces; a fork, some hundredths. One server forks for all of pytest's workers.
`run_server` makes an executable to take the place of ``sys.executable``. It passes
its arguments, environment, working folder and standard streams on to a server, which forks, and it
ends as the fork ends. A signal goes on to the fork; a fork whose caller was killed is killed too.

Not for tests of how a process starts, of its limits, or of the tree of processes.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing.spawn  # noqa: F401 (takes down the real executable, whose pipes it needs)
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
asked = {{"arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(link, [b"."], [0, 1, 2])
link.sendall(json.dumps(asked).encode() + b"\\n")
answers = link.makefile()
fork = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(fork, number))
code = int(answers.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
PRELOADED = (
    "networkx", "torch.distributed.run", "torch._dynamo", "torch.export", "torch.onnx",
    "stagewright.api.server", "stagewright.capture.capture", "stagewright.cli.main",
    "stagewright.planner.plan", "stagewright.profiler.estimates.worker",
    "stagewright.profiler.measure_worker", "stagewright.runtime.distributed",
    "stagewright.runtime.rpc", "stagewright.view.notebook", "tests.torch_models",
)  # fmt: skip


@contextmanager
def run_server(folder: Path) -> Iterator[Path]:
    """Start a server; yield the executable to run in place of Python's, which waits for it."""
    address = folder / "socket"
    executable = folder / "python"
    executable.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    executable.chmod(0o755)
    command = [sys.executable, "-m", "tests.forked_python", str(address), str(executable)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listens\n"
            yield executable
        finally:
            server.terminate()


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for every caller; return what it asked for in the fork, None in the server."""
    stopped, stop = socket.socketpair()
    signal.signal(signal.SIGTERM, lambda *_: stop.send(b"."))
    with listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(stopped, selectors.EVENT_READ)
        forks: dict[int, tuple[int, socket.socket]] = {}
        while True:
            for key, _ in selector.select():
                if key.fileobj is stopped:
                    for process, _ in forks.values():
                        with suppress(ProcessLookupError):
                            os.killpg(process, signal.SIGKILL)
                    return None
                if key.fileobj is listener:
                    link, _ = listener.accept()
                    try:
                        asked = _fork(link)
                    except (OSError, ValueError):  # the caller was killed before it had asked
                        link.close()
                        continue
                    if isinstance(asked, dict):
                        return asked
                    watch = os.pidfd_open(asked)
                    forks[watch] = (asked, link)
                    selector.register(watch, selectors.EVENT_READ)
                    selector.register(link, selectors.EVENT_READ, asked)
                elif isinstance(key.fileobj, socket.socket):  # its caller is gone
                    selector.unregister(key.fileobj)
                    with suppress(ProcessLookupError):
                        os.killpg(key.data, signal.SIGKILL)
                else:
                    process, link = forks.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with suppress(KeyError):
                        selector.unregister(link)
                    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                    with suppress(OSError), link:
                        link.sendall(f"{code}\n".encode())


def _fork(link: socket.socket) -> dict[str, Any] | int:
    """Return what the caller asked for in the fork, the fork's number in the server."""
    _, streams, *_ = socket.recv_fds(link, 1, 3)
    with link.makefile("rb") as request:
        asked: dict[str, Any] = json.loads(request.readline())
    if process := os.fork():
        with suppress(OSError):  # the fork does it too; whoever comes second may be too late
            os.setpgid(process, process)
        with suppress(OSError):  # a caller that is gone meanwhile is noticed by the selector
            link.sendall(f"{process}\n".encode())
        for stream in streams:
            os.close(stream)
        return process
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return asked


def _run(asked: dict[str, Any]) -> None:
    """Do what Python does with these arguments."""
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path[:0] = [asked["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    arguments = asked["arguments"][1:]
    while arguments[0] in ("-u", "-P", "-I", "-S"):
        del arguments[0]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        with _manners():
            runpy.run_path(arguments[0], run_name="__main__")


def _manners() -> AbstractContextManager[None]:
    """Run a rank of torchrun as on NCCL if the environment asks for it."""
    if not {"NCCL_MANNERS", "RANK"} <= os.environ.keys():
        return nullcontext()
    from tests.nccl.process_group import emulated  # imports torch

    return emulated(Path(os.environ["NCCL_MANNERS"]))


def _prepare() -> None:
    """Do once what forks would each do for themselves, and start no thread."""
    with suppress(ImportError):  # a progress bar of transformers' starts one
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    for name in PRELOADED:
        importlib.import_module(name)
    models = importlib.import_module("tests.torch_models")
    for name in models.SPECS:
        with suppress(pytest.skip.Exception):  # without transformers
            models.traced_profile(models.make_case(name))
    gc.freeze()


def _main() -> None:
    sys.executable = sys.argv[2]  # some modules take it down as they are imported
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(100)
    os.write(1, b"listens\n")  # who connects from here on waits
    _prepare()
    asked = _serve(listener)
    if asked is None:
        return
    code: Any = 0
    try:
        _run(asked)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 (as Python itself does)
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    # Taking all that was imported to pieces would take longer than most of what is run.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(code, str) else code or 0)


if __name__ == "__main__":
    _main()
