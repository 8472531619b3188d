import tomllib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def pyproject(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def folders(pyproject: dict[str, Any]) -> dict[str, str]:
    """The top-level folder of each package of ours, ``stagewright`` itself left out."""
    directories = pyproject["tool"]["setuptools"]["package-dir"]
    return {name: path for name, path in directories.items() if name != "stagewright"}
