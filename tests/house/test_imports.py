"""What importing costs: torch (seconds) only where something is measured or run."""

import os
import subprocess
import sys

TORCHLESS = ("core", "planner", "formats", "view", "client", "api", "cli")
PROGRAMS = ("stagewright.cli.support.train_worker", "stagewright.cli.support.verify_worker")
"""Started in processes of their own, and imported only where torch is used."""


def loaded_by(code: str) -> set[str]:
    """Top-level packages in memory after running code in a new process."""
    listing = "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code + listing], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy():
    heavy = {"torch", "transformers", "numpy", "pydantic", "rich", "typer", "fastapi"}
    assert not loaded_by("import stagewright; dir(stagewright)") & heavy


def test_importing_every_module_of_these_folders_imports_no_torch():
    """In one process, which names the first module that does."""
    code = f"""
import importlib, pkgutil, sys
for folder in {TORCHLESS}:
    package = importlib.import_module("stagewright." + folder)
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__") and found.name not in {PROGRAMS}:
            importlib.import_module(found.name)
            assert not {{"torch", "transformers"}} & set(sys.modules), found.name
"""
    assert "stagewright" in loaded_by(code)


def test_help_imports_neither_torch_nor_what_is_slow():
    code = "from stagewright.cli.main import main; main(['--help'])"
    assert not loaded_by(code) & {"torch", "transformers", "numpy", "pydantic", "rich", "fastapi"}


def test_help_answers_in_half_a_second():
    """Of a processor; one of several, since the machine may be busy."""
    for _ in range(5):
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "stagewright.cli", "--help"], check=True, capture_output=True
        )
        after = os.times()
        took_s = (
            after.children_user + after.children_system
            - before.children_user - before.children_system
        )  # fmt: skip
        if took_s < 0.5:
            break
    assert took_s < 0.5
