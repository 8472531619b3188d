"""Python objects named on the command line, as ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ...core.errors import InvalidInput


def load_target(target: str) -> Any:
    """Import what ``package.module:name`` names; the current directory is searched first.

    Raises:
        InvalidInput: The text has another form, or the import fails.
    """
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise InvalidInput(f"cannot read {target!r}; write package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"importing {module_name} failed: {_describe(error)}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise InvalidInput(f"{module_name} has no {attribute!r}")
        found = getattr(found, name)
    return found


def call_target(target: str) -> Any:
    """Call what ``package.module:name`` names, without arguments, and return its answer.

    Raises:
        InvalidInput: It cannot be imported, is not callable, or raises.
    """
    factory = load_target(target)
    if not callable(factory):
        raise InvalidInput(f"{target} is a {type(factory).__name__}, not a function to call")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"calling {target} failed: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
