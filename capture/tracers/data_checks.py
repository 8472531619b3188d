"""Omission of data-dependent checks, such as ``assert (ids >= 0).all()``, while a model is traced.

A branch on data cannot be traced, since both ways lead on. Where one way can only raise, there is a
single way to trace: the one on which the check holds.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..observation.interception import replace_attribute

MAX_INSTRUCTIONS = 200
"""Most bytecode instructions followed to see whether a branch raises."""

_PASSED_BETWEEN = ("CACHE", "PRECALL", "TO_BOOL", "NOP", "EXTENDED_ARG", "NOT_TAKEN")


@contextmanager
def skip_data_checks() -> Iterator[list[str]]:
    """Let checks of data pass inside; yield the places of those that were met."""
    met: list[str] = []

    def answer(frame: FrameType) -> bool | None:
        value = passing_value(frame.f_code, frame.f_lasti)
        if value is not None:
            place = f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
            if place not in met:
                met.append(place)
        return value

    with ExitStack() as stack:
        stack.enter_context(_TruthMode(answer))
        stack.enter_context(_answer_symbols(answer))
        yield met


class _TruthMode(TorchFunctionMode):
    """Function mode that answers the truth of a tensor where only a check asks for it."""

    def __init__(self, answer: Callable[[FrameType], bool | None]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        asks = func is Tensor.__bool__ or (func is Tensor.item and args[0].dtype == torch.bool)
        if asks:
            value = self._answer(_asking_frame())
            if value is not None:
                return value
        return func(*args, **(kwargs or {}))


def _answer_symbols(answer: Callable[[FrameType], bool | None]) -> Any:
    # A number read from a tensor is a symbol while tracing, and so is its comparison.
    written: Any = torch.SymBool.__bool__

    def truth(symbol: torch.SymBool) -> bool:
        if symbol.node.maybe_as_bool() is None and symbol.node.hint is None:
            value = answer(sys._getframe(1))
            if value is not None:
                return value
        return bool(written(symbol))

    return replace_attribute(torch.SymBool, "__bool__", truth)


def _asking_frame() -> FrameType:
    """Return the frame whose code asked, beyond those of torch's function modes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in (
        "__torch_function__",
        "wrapper",
        "handler",
    ):
        frame = frame.f_back
    assert frame is not None
    return frame


def passing_value(code: CodeType, position: int) -> bool | None:
    """Return the truth for which a branch at an instruction does not raise.

    `None` if the instruction's result decides nothing, or neither or both of the ways raise.
    """
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: index for index, instruction in enumerate(instructions)}
    if position not in places:
        return None
    index, negated = places[position], False
    first = index
    while not _is_branch(instructions[index].opname):
        name = instructions[index].opname
        if name == "UNARY_NOT":
            negated = not negated
        elif index != first and name not in _PASSED_BETWEEN:
            return None
        index += 1
        if index == len(instructions):
            return None
    branch = instructions[index]
    if "NONE" in branch.opname:
        return None
    taken = _only_raises(code, instructions, places, places[branch.argval])
    passed = _only_raises(code, instructions, places, index + 1)
    if taken == passed:
        return None
    jumps_if = "TRUE" in branch.opname
    return (jumps_if if passed else not jumps_if) != negated


def _is_branch(name: str) -> bool:
    return "JUMP" in name and "_IF_" in name


def _only_raises(
    code: CodeType, instructions: list[dis.Instruction], places: dict[int, int], start: int
) -> bool:
    """Return True if every way from an instruction ends in an exception not caught here."""
    pending, seen = [start], set()
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        if len(seen) > MAX_INSTRUCTIONS or index >= len(instructions):
            return False
        found = instructions[index]
        name = found.opname
        if name in ("RAISE_VARARGS", "RERAISE"):
            if _is_caught(code, found.offset):
                return False
        elif name.startswith(("RETURN", "YIELD", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL")):
            return False
        elif "JUMP" in name:
            if found.argval <= found.offset:  # a loop goes on
                return False
            pending.append(places[found.argval])
            if "_IF_" in name:
                pending.append(index + 1)
        elif name in ("FOR_ITER", "SEND"):
            return False
        else:
            pending.append(index + 1)
    return True


def _is_caught(code: CodeType, offset: int) -> bool:
    return any(entry.start <= offset < entry.end for entry in dis.Bytecode(code).exception_entries)  # type: ignore[attr-defined]
