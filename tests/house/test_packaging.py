"""The package list, the folders and the links agree, and what is built from them installs."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results")


def modules(repository: Path, folders: dict[str, str]) -> set[str]:
    """Every module's path as an installed package has it."""
    found = {path.relative_to(repository).as_posix() for path in own_files(repository, "*.py")}
    for package, folder in folders.items():
        root = repository / folder
        for path in root.rglob("*.py"):
            found.add(f"{package.replace('.', '/')}/{path.relative_to(root).as_posix()}")
    return found


def own_files(repository: Path, pattern: str) -> list[Path]:
    """Files below ``stagewright/`` itself, not those behind its links."""
    root = repository / "stagewright"
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    return [*root.glob(pattern), *(path for folder in folders for path in folder.rglob(pattern))]


def test_every_package_is_listed(repository, pyproject, folders):
    holding_code = {
        "stagewright." + path.parent.relative_to(repository).as_posix().replace("/", ".")
        for folder in folders.values()
        for path in (repository / folder).rglob("__init__.py")
    }
    inside = {
        path.parent.relative_to(repository).as_posix().replace("/", ".")
        for path in own_files(repository, "__init__.py")
    }
    listed = set(pyproject["tool"]["setuptools"]["packages"])
    assert listed == holding_code | inside
    assert set(folders) <= listed


def test_every_top_level_folder_of_code_is_a_package(repository, folders):
    found = {path.parent.name for path in repository.glob("*/__init__.py")}
    assert found == {"stagewright", *(folder for folder in folders.values() if "/" not in folder)}


def test_every_folder_has_its_link(repository, folders):
    links = {
        path.name: os.readlink(path)
        for path in (repository / "stagewright").iterdir()
        if path.is_symlink()
    }
    top_level = [folder for folder in folders.values() if "/" not in folder]
    assert links == {folder: f"../{folder}" for folder in top_level}


def test_linters_read_every_file_once(pyproject, folders):
    """Through its folder, not also through its link."""
    links = {f"stagewright/{folder}" for folder in folders.values() if "/" not in folder}
    assert set(pyproject["tool"]["ruff"]["extend-exclude"]) == links


def test_every_folder_refuses_to_be_imported_by_its_own_name(repository, folders):
    """``import planner`` from the root would make a second ``Plan`` class."""
    code = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert f"import stagewright.{name}" in str(error), error
    else:
        raise SystemExit(f"import {name} succeeded")
"""
    names = [folder for folder in folders.values() if "/" not in folder]
    subprocess.run([sys.executable, "-c", code, *names], cwd=repository, check=True)


@pytest.fixture(scope="module")
def built(repository, tmp_path_factory) -> Path:
    """A folder with the source distribution, and the wheel built out of it."""
    source = tmp_path_factory.mktemp("source") / "stagewright"
    shutil.copytree(repository, source, symlinks=True, ignore=NOT_SOURCE)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "out"), "."],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "out"


def test_source_distribution_holds_every_module(built, repository, folders):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {f"{folder}/__init__.py" for folder in folders.values()}
    assert wanted | {"stagewright/py.typed", "LICENSE", "pyproject.toml"} <= names


def test_wheel_holds_every_module(built, repository, folders):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    for package in ("view", "api/page"):
        for kind in ("static", "templates"):
            files = {path.name for path in (repository / package / kind).iterdir()}
            assert {f"stagewright/{package}/{kind}/{name}" for name in files} <= names
    assert {name for name in names if name.endswith(".py")} == modules(repository, folders)
    assert "stagewright/py.typed" in names


def test_wheel_imports_from_where_it_is_unpacked(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import stagewright.core.plan.plan, stagewright.cli.main
for module in (stagewright, stagewright.core.plan.plan, stagewright.cli.main):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
raise SystemExit(stagewright.cli.main.main(["--version"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stagewright ")
