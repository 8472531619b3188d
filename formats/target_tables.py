"""Tables of the targets; help texts read them without pydantic."""

import tomllib
from pathlib import Path
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """Return a table of ``formats/tables`` by its name."""
    path = Path(__file__).with_name("tables") / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


TARGET_NAMES = tuple(read_table("targets"))
