"""Python objects named on the command line as ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ...core.errors import InvalidInput


def load_object(target: str) -> Any:
    """Import the object named ``package.module:name``; the current directory is searched first."""
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise InvalidInput(f"cannot read {target!r}; write package.module:name")
    # An installed command, unlike `python -m`, does not have the user's directory on its path.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise InvalidInput(f"{module_name} is a file; name its module: {dotted}:{attribute}")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidInput(
                f"{module_name} imports {error.name}, which is not installed here"
            ) from error
        raise InvalidInput(
            f"there is no module {error.name!r} in {os.getcwd()} or among the installed packages; "
            "for a function build in my_model.py write my_model:build, in its folder"
        ) from error
    except (Exception, SystemExit) as error:  # a script without a main guard may call exit()
        raise InvalidInput(f"importing {module_name} failed: {_describe(error)}") from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise InvalidInput(f"{module_name} has no {attribute!r}")
        found = getattr(found, name)
    return found


def call_object(target: str) -> Any:
    """Call the function named ``package.module:name`` without arguments and return its result."""
    factory = load_object(target)
    if not callable(factory):
        raise InvalidInput(f"{target} is a {type(factory).__name__}, not a function")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise InvalidInput(f"calling {target} failed: {_describe(error)}") from error


def load_model(model: str | None, sample: str | None) -> tuple[Any, Any]:
    """Return the user's module and sample; ``model`` may name a module or its factory."""
    if model is None or sample is None:
        raise InvalidInput(
            "name a model and its sample (MODEL --sample package.module:function), "
            "a --family, or a JSON file"
        )
    module = load_object(model)
    # A module class has the methods of a module, too, but is a factory.
    if isinstance(module, type) or not hasattr(module, "named_parameters"):
        module = call_object(model)
    if not hasattr(module, "named_parameters"):
        raise InvalidInput(f"{model} returned a {type(module).__name__}, not a torch.nn.Module")
    return module, call_object(sample)


def refuse_options(what: str, options: dict[str, Any]) -> None:
    """Raise `InvalidInput` if any of these options was given: it would be ignored."""
    for name, value in options.items():
        if value not in (None, [], ()):
            raise InvalidInput(f"{name} cannot be combined with {what}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
