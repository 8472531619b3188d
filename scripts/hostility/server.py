"""The service under attack, as a process, and what is watched of it.

Run as ``python -m scripts.hostility.server DATABASE``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.limits import Watched, watched
from stagewright.api.server import run
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.store import Store

from .attack import Target

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "token-under-attack"
CHILD_BYTES = 2**30
"""Given to each child; watched 20 times a second, so more for a moment."""

OUTSIDE = ("/tmp/stagewright-outside", "/outside", "/tmp/outside", "/tmp/ran", "/ran")
"""Where names in the corpus lead."""


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
        try:
            assert process.stdout is not None
            with process.stdout:
                announced = json.loads(process.stdout.readline() or "{}")
            if "url" not in announced:
                raise SystemExit(
                    f"the server did not start:\n{(folder / 'data/server.log').read_text()}"
                )
            port = int(announced["url"].rpartition(":")[2])
            target = Target("127.0.0.1", port, TOKEN, other.secret, folder / "markers")
            with watched(process.pid) as seen:
                yield Scene(target, folder, seen, process)
        finally:
            process.terminate()
            process.wait(timeout=30)


if __name__ == "__main__":
    run(
        ServerSettings(
            token=TOKEN, database=sys.argv[1], scheduler="threads", child_memory_bytes=CHILD_BYTES
        ),
        "127.0.0.1",
        0,
    )
