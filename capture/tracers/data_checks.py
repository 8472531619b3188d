"""Omission of data-dependent checks, such as ``assert (ids >= 0).all()``, while a model is traced.

A branch on data cannot be traced, since both ways lead on. Where one way can only raise, there is a
single way to trace: the one on which the check holds.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..observation.interception import replace_attribute

PACKAGE = __name__.partition(".")[0]

MAX_INSTRUCTIONS = 200
"""Most bytecode instructions followed to see whether a branch raises."""

SWALLOWERS = frozenset({"suppress", "assertRaises", "raises"})
"""Names of context managers that keep an exception from leaving their block."""

_PASSED_BETWEEN = ("CACHE", "PRECALL", "TO_BOOL", "NOP", "EXTENDED_ARG", "NOT_TAKEN")


@contextmanager
def skip_data_checks() -> Iterator[list[str]]:
    """Let checks of data pass inside; yield the places of those that were met."""
    met: list[str] = []
    # Who called the tracer may catch what it likes: that is not part of the model.
    outside = set(_frames(sys._getframe(1)))

    def answer(frame: FrameType) -> bool | None:
        value = passing_value(frame.f_code, frame.f_lasti, frame.f_globals)
        if value is not None and _is_caught_by_callers(frame, outside):
            return None
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


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_caught_by_callers(frame: FrameType, outside: Collection[FrameType]) -> bool:
    """Return True if a caller inside the model could catch an exception that leaves a frame.

    The check is then no check but a branch: ``try: check(x)`` with ``except ValueError: x = -x``.
    """
    for caller in _frames(frame.f_back):
        if caller in outside:
            return False
        # Handlers of torch and of this package raise again what they catch.
        if caller.f_globals.get("__name__", "").partition(".")[0] not in ("torch", PACKAGE):
            code = _Bytecode.of(caller.f_code, caller.f_globals)
            handler = code.handler(caller.f_lasti)
            if handler is not None and not code.only_raises(handler, may_store=True):
                return True
    return False


def passing_value(
    code: CodeType, position: int, variables: Mapping[str, Any] | None = None
) -> bool | None:
    """Return the truth for which a branch at an instruction does not raise.

    `None` if the instruction's result decides nothing, or neither or both of the ways raise.
    ``variables`` are the code's global variables.
    """
    read = _Bytecode.of(code, variables or {})
    instructions, places = read.instructions, read.places
    if position not in places:
        return None
    # From the instruction that asks for the truth to the branch on it, there may be nothing that
    # uses the truth otherwise: only negations, and what the interpreter puts in between.
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
    if "NONE" in branch.opname:  # asks whether it is None, not whether it is true
        return None
    jump_raises = read.only_raises(places[branch.argval])
    next_raises = read.only_raises(index + 1)
    if jump_raises == next_raises:
        return None
    # POP_JUMP_IF_TRUE jumps for True, POP_JUMP_IF_FALSE for False. That truth passes if what comes
    # next raises, and the other one if what is jumped to raises; `not` turns it round.
    jumps_if = "TRUE" in branch.opname
    return (jumps_if if next_raises else not jumps_if) != negated


def _is_branch(name: str) -> bool:
    return "JUMP" in name and "_IF_" in name


@dataclass(frozen=True)
class _Bytecode:
    """Instructions of a function, and where each of them goes on if it raises."""

    instructions: list[dis.Instruction]
    places: dict[int, int]
    handlers: list[tuple[int, int, int]]
    has_swallower: bool

    @classmethod
    def of(cls, code: CodeType, variables: Mapping[str, Any]) -> _Bytecode:
        instructions = list(dis.get_instructions(code))
        places = {instruction.offset: index for index, instruction in enumerate(instructions)}
        entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        handlers = [(entry.start, entry.end, entry.target) for entry in entries]
        return cls(instructions, places, handlers, _names_swallower(code.co_names, variables))

    def handler(self, offset: int) -> int | None:
        """Return the index of what handles an exception at an offset; `None` if it leaves."""
        for start, end, target in self.handlers:
            if start <= offset < end:
                return self.places[target]
        return None

    def only_raises(self, start: int, *, may_store: bool = False) -> bool:
        """Return True if every way from an instruction ends in an exception that leaves.

        What a handler stores before, as `finally` does, changes nothing about that.
        """
        pending, seen = [start], set()
        while pending:
            index = pending.pop()
            if index in seen:
                continue
            seen.add(index)
            if len(seen) > MAX_INSTRUCTIONS or index >= len(self.instructions):
                return False
            following = self._following(index, may_store)
            if following is None:
                return False
            pending += following
        return True

    def _following(self, index: int, may_store: bool) -> list[int] | None:
        """Return the instructions that may follow one; `None` if the function then goes on."""
        found = self.instructions[index]
        name = found.opname
        # The end of a `with` block raises the exception again.
        ends_block = name == "WITH_EXCEPT_START" and not self.has_swallower
        if ends_block or name in ("RAISE_VARARGS", "RERAISE"):
            handler = self.handler(found.offset)
            return [] if handler is None else [handler]
        if name.startswith(("RETURN", "YIELD")):
            return None
        if name.startswith(("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL")) and not may_store:
            return None
        if "JUMP" in name:
            if found.argval <= found.offset:  # a loop goes on
                return None
            ways = [self.places[found.argval]]
            return [*ways, index + 1] if "_IF_" in name else ways
        return None if name in ("FOR_ITER", "SEND") else [index + 1]


def _names_swallower(names: Sequence[str], variables: Mapping[str, Any]) -> bool:
    """Return True if names are those of a context manager that may swallow an exception.

    Looked at are global variables and what the modules and classes among them hold; a context
    manager that is reached otherwise, such as through ``self``, is taken for one that does not.
    """
    known = [variables[name] for name in names if name in variables]
    held = [vars(each) for each in known if isinstance(each, ModuleType | type)]
    known += [table[name] for table in held for name in names if name in table]
    return not SWALLOWERS.isdisjoint(names) or any(map(_may_swallow, known))


def _may_swallow(value: Any) -> bool:
    if isinstance(value, FunctionType) and value.__code__.co_filename == contextlib.__file__:
        # A generator made a context manager swallows where it goes on after its `yield` raised.
        generator = getattr(value, "__wrapped__", None)
        if not isinstance(generator, FunctionType):
            return False
        read = _Bytecode.of(generator.__code__, {})
        yields = [each for each in read.instructions if each.opname == "YIELD_VALUE"]
        handlers = [read.handler(each.offset) for each in yields]
        return any(
            each is not None and not read.only_raises(each, may_store=True) for each in handlers
        )
    kind = value if isinstance(value, type) else type(value)
    leave = getattr(kind, "__exit__", None)
    if not isinstance(leave, FunctionType) or kind.__module__.partition(".")[0] == "torch":
        return False
    instructions = list(dis.get_instructions(leave))
    returned = [
        instructions[index - 1] if each.opname == "RETURN_VALUE" else each
        for index, each in enumerate(instructions)
        if each.opname in ("RETURN_VALUE", "RETURN_CONST")
    ]
    # Where two ways meet at a return, only one of their values comes right before it.
    computed = any(each.is_jump_target and each.opname == "RETURN_VALUE" for each in instructions)
    return computed or any("CONST" not in each.opname or bool(each.argval) for each in returned)
