"""Install the wheel of ``dist`` into an environment of its own, and try it from an empty folder.

usage: python scripts/try_wheel.py

What the wheel lacks (templates, schemas, data files) shows here and nowhere else: every other test
runs in a checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROFILE = """
import json
from stagewright.api.http.examples import example_profile

with open("profile.json", "w", encoding="utf-8") as file:
    json.dump(example_profile(), file)
"""


def main() -> None:
    """Build the environment, install, and run commands that need no torch."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        stagewright = folder / "env" / "bin" / "stagewright"
        constraints = ROOT / "constraints.txt"
        run(folder, python, "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[server]")
        run(folder, stagewright, "--help")
        run(folder, python, "-c", PROFILE)
        run(folder, stagewright, "plan", "profile.json", "-d", "2x24GB", "-o", "plan.json")
        run(folder, stagewright, "show", "plan.json", "--svg", "plan.svg", "--html", "plan.html")
        run(folder, stagewright, "explain", "plan.json", "profile.json", "-d", "2x24GB")
        run(folder, stagewright, "db", "upgrade", "--database", "plans.db")
        run(folder, stagewright, "config", "show")
    print(f"{wheel.name} installs and works")


def run(folder: Path, *words: object) -> None:
    """Run a command in the folder; what it prints is shown if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}")


if __name__ == "__main__":
    main()
