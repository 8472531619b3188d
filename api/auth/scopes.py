"""Scopes: the five rights of a key; none includes another."""

from __future__ import annotations

from typing import Literal, get_args

Scope = Literal["read", "plan", "measure", "admin", "metrics"]

SCOPES: tuple[Scope, ...] = get_args(Scope)

MEANING: dict[Scope, str] = {
    "read": "see what the project stores, and what this service can do",
    "plan": "store, label and delete profiles, graphs and plans; plan, simulate, compare",
    "measure": "run a model on the server's devices or its workers', cancel jobs",
    "admin": "make, list and revoke the project's keys; read its audit log",
    "metrics": "read the server's metrics, which count all projects together",
}
