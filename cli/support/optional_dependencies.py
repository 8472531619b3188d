"""The package's extras and their missing dependencies."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

CLIENT = ("httpx2", "pydantic")

CLUSTER = ("cryptography", "distributed", "numba", "pydantic_settings", "structlog")

SERVER = (
    *CLIENT,
    *CLUSTER,
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
"""Import names of each extra's packages in pyproject.toml (a test compares the two)."""


@dataclass(frozen=True)
class MissingExtra:
    """Extra that is needed but not installed."""

    name: str
    missing: str

    @property
    def install(self) -> str:
        return f"pip install -e '.[{self.name}]' (in the checkout)"


def missing_packages(extra: str) -> tuple[str, ...]:
    """Return the packages of an extra that are not installed, without importing any."""
    return tuple(name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None)


def find_missing_extra(error: BaseException) -> MissingExtra | None:
    """Return the extra to install if the error is a failed import of one of its packages."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    package = error.name.partition(".")[0]
    # EXTRAS lists small extras before those that include them, so the smallest one is suggested.
    for extra, packages in EXTRAS.items():
        if package in packages:
            return MissingExtra(extra, package)
    return None
