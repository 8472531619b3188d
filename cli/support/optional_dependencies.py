"""The optional parts of the installation and what is missing from them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

CLIENT = ("httpx2", "pydantic")

CLUSTER = ("cryptography", "distributed", "pydantic_settings", "structlog")

SERVER = (
    *CLIENT,
    *CLUSTER,
    "alembic",
    "fastapi",
    "itsdangerous",
    "jsonschema",
    "prometheus_client",
    "sqlalchemy",
    "uvicorn",
    "uvloop",
)

EXTRAS: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "hf": ("torch", "transformers"),
    "fast": ("numba",),
    "cluster": CLUSTER,
    "client": CLIENT,
    "server": SERVER,
    "oidc": (*SERVER, "jwt"),
    "postgres": (*SERVER, "psycopg"),
}
"""The packages of each extra in pyproject.toml, by import name (a test compares the two)."""


@dataclass(frozen=True)
class MissingExtra:
    """An extra without which something does not work here."""

    name: str
    missing: str

    @property
    def install(self) -> str:
        return f"pip install 'stagewright[{self.name}]'"


def missing_packages(extra: str) -> tuple[str, ...]:
    """Packages of an extra that are not installed; imports none of them."""
    return tuple(name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None)


def missing_extra(error: BaseException) -> MissingExtra | None:
    """The extra to install, if the error is a failed import of one of its packages."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return MissingExtra(extra, package)
    return None
