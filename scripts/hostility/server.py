"""The service under attack, as a process, and what is watched of it.

Run as ``python -m scripts.hostility.server DATABASE``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from stagewright.api.sandbox.limits import descendants, memory_bytes
from stagewright.api.server import run
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.store import Store

from .attack import Target

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "token-under-attack"
CHILD_BYTES = 2**30
"""Given to each child; watched 20 times a second, so more for a moment."""

SERVER_BYTES = 600 * 2**20
LOOKED_AT_S = 0.05
OUTSIDE = ("/tmp/stagewright-outside", "/outside", "/tmp/outside", "/tmp/ran", "/ran")
"""Where names in the corpus lead."""


@dataclass
class Watched:
    """The most that was seen.

    Attributes:
        server_bytes: Of the server itself, files included.
        children_bytes: Of all it started together.
    """

    server_bytes: int = 0
    children_bytes: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def watch(self, pid: int) -> None:
        while not self.stop.wait(LOOKED_AT_S):
            self.server_bytes = max(self.server_bytes, _peak(pid))
            self.children_bytes = max(self.children_bytes, memory_bytes(descendants(pid)[1:]))


@dataclass(frozen=True)
class Scene:
    """A server and what lies around it.

    Attributes:
        target: What is attacked.
        folder: Has ``data`` (the server's working folder), ``home``, ``tmp`` and ``markers``.
        watched: Its memory.
        process: The server.
    """

    target: Target
    folder: Path
    watched: Watched
    process: subprocess.Popen[str]

    def found(self) -> list[str]:
        """Return what lies where nothing should: traces of code that ran and of paths taken."""
        traces = [str(path) for path in (self.folder / "markers").iterdir()]
        traces += [path for path in OUTSIDE if os.path.lexists(path)]
        traces += [str(path) for path in (self.folder / "home").rglob("*")]
        data = {path.name for path in (self.folder / "data").iterdir()}
        traces += sorted(data - {"hostile.db", "hostile.db-wal", "hostile.db-shm", "server.log"})
        return traces


@contextmanager
def attacked(folder: Path) -> Iterator[Scene]:
    """Yield a server with folders of its own in an empty one, watched to the end of the block."""
    for name in ("data", "home", "tmp", "markers"):
        (folder / name).mkdir()
    database = folder / "data" / "hostile.db"
    store = Store(database)
    other = store.keys.create(
        store.projects.create("other").id,
        name="another project's",
        scopes=("read", "plan", "measure", "admin"),
    )
    store.close()
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    with (folder / "data" / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.hostility.server", str(database)],
            stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=folder / "data",
        )  # fmt: skip
        watched = Watched()
        watcher = threading.Thread(target=watched.watch, args=(process.pid,), daemon=True)
        try:
            assert process.stdout is not None
            with process.stdout:
                announced = json.loads(process.stdout.readline() or "{}")
            if "url" not in announced:
                raise SystemExit(
                    f"the server did not start:\n{(folder / 'data/server.log').read_text()}"
                )
            watcher.start()
            port = int(announced["url"].rpartition(":")[2])
            target = Target("127.0.0.1", port, TOKEN, other.secret, folder / "markers")
            yield Scene(target, folder, watched, process)
        finally:
            watched.stop.set()
            process.terminate()
            process.wait(timeout=30)


def _peak(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    run(
        ServerSettings(
            token=TOKEN, database=sys.argv[1], scheduler="threads", child_memory_bytes=CHILD_BYTES
        ),
        "127.0.0.1",
        0,
    )
