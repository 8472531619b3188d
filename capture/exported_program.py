"""Exported programs (``.pt2`` files) as modules, which are captured like any other."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, UnflattenedModule

from ..core.errors import CaptureError, InvalidInput

EXPORT = "torch.export.save(torch.export.export(model, sample), 'model.pt2')"


def load_exported(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module of an exported program, and the sample that it was exported with.

    torch unpickles parts of the file, which can run code: load only files that you trust.

    Raises:
        InvalidInput: The file cannot be read, or is not an exported program with a sample.
        CaptureError: torch cannot rebuild the modules of the program.
    """
    program = _load_program(path)
    if program.example_inputs is None:
        raise InvalidInput(f"{path} has no sample inputs; write it with {EXPORT}")
    positional, keyword = program.example_inputs
    call = program.module_call_graph[0].signature
    names = list(call.forward_arg_names or ()) if call is not None else []
    if len(names) != len(positional) + len(keyword):
        names = [*(f"args_{index}" for index in range(len(positional))), *keyword]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch copies a class it deprecates
            module = torch.export.unflatten(program)
    except Exception as error:
        raise CaptureError(
            f"torch.export.unflatten cannot rebuild the modules of {path} ({error}); capture the "
            "model where its code is"
        ) from error
    _restore_classes(program, module, names, len(positional))
    return module, dict(zip(names, (*positional, *keyword.values()), strict=True))


def _load_program(path: Path) -> ExportedProgram:
    log = logging.getLogger("torch.export")
    was_disabled, log.disabled = log.disabled, True  # it logs what the exceptions below say
    try:
        with path.open("rb") as file:
            return torch.export.load(file)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # of many classes: zip, pickle and schema errors among them
        raise InvalidInput(
            f"torch {torch.__version__} cannot load {path} as an exported program; write it with "
            f"{EXPORT}, and a torch that is no newer"
        ) from error
    finally:
        log.disabled = was_disabled


def _restore_classes(
    program: ExportedProgram, module: UnflattenedModule, names: list[str], num_positional: int
) -> None:
    """Give modules what capture reads from classes: the model's name, inputs and containers."""

    def forward(self: UnflattenedModule, **inputs: Any) -> Any:
        given = [inputs[name] for name in names]
        keyword = zip(names[num_positional:], given[num_positional:], strict=True)
        return UnflattenedModule.forward(self, *given[:num_positional], **dict(keyword))

    stacks = (node.meta.get("nn_module_stack") for node in program.graph.nodes)
    classes = {path: kind for stack in stacks for path, kind in (stack or {}).values()}
    for path, inner in list(module.named_modules()):
        kind = type(inner)
        if issubclass(kind, fx.GraphModule):  # what a context such as no_grad encloses
            continue
        # Only paths are left of containers: their children are numbered.
        is_container = inner._modules and all(child.isdecimal() for child in inner._modules)
        bases = (() if kind is nn.Module else (kind,)) + ((nn.ModuleList,) if is_container else ())
        name = classes.get(path, kind.__name__).rpartition(".")[2]
        inner.__class__ = type(name, bases or (kind,), {} if path else {"forward": forward})
