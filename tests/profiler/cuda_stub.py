"""A stand-in for torch.cuda that keeps the order of all calls, each with its device and stream.

Layers run on the CPU meanwhile. `CudaStub.takes_cpu` lets the profiler believe that CPU tensors are
on one of the stub's cards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from stagewright.profiler.machine.memory import ON_CUDA

MIB = 2**20
TICK_S = 0.001
"""Work between any two events of a stream."""


@dataclass
class Card:
    """A GPU or a slice of one: its memory, and the work that waits in its streams."""

    name: str = "NVIDIA H100 80GB HBM3"
    total_memory: int = 80 * 2**30
    uuid: str = "1234"
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    reserved_peak: int = 0
    time_s: float = 0.0
    stream: str = "default"
    waiting: list[Event] = field(default_factory=list)


class Event:
    """An event that can be timed only once it was waited for, as torch's would raise or lie."""

    def __init__(self, stub: CudaStub, *, enable_timing: bool) -> None:
        assert enable_timing
        self._stub, self.device, self.time_s, self.is_complete = stub, None, 0.0, False

    def record(self, stream: Any = None) -> None:
        self.device, name = stream or self._stub.current_stream()
        card = self._stub.cards[self.device]
        card.time_s += TICK_S
        self.time_s = card.time_s
        card.waiting.append(self)
        self._stub.say("record", self.device, name)

    def synchronize(self) -> None:
        self._stub.say("wait", self.device)
        waiting = self._stub.cards[self.device].waiting
        for event in waiting[: waiting.index(self) + 1] if self in waiting else []:
            event.is_complete = True
            waiting.remove(event)

    def elapsed_time(self, other: Event) -> float:
        if self.device != other.device:
            raise RuntimeError("Both events must be created on the same device")
        if not (self.is_complete and other.is_complete):
            raise RuntimeError("Both events must be completed before calculating elapsed time")
        self._stub.say("read", self.device)
        return (other.time_s - self.time_s) * 1e3


class CudaStub:
    """Cards with a caching allocator; ``calls`` lists what was asked of them, in order."""

    def __init__(self, *cards: Card) -> None:
        self.cards = list(cards) or [Card(), Card()]
        self.current, self.of_cpu = 0, 0
        self.calls: list[tuple[Any, ...]] = []

    @contextmanager
    def in_force(self) -> Iterator[CudaStub]:
        """Answer for torch.cuda."""
        stub = self

        class CardEvent(Event):
            def __init__(self, *, enable_timing: bool) -> None:
                super().__init__(stub, enable_timing=enable_timing)

        class CurrentDevice:  # a class, since torch asks whether devices are instances of it
            def __init__(self, device: Any) -> None:
                self.idx = stub.index(device)

            def __enter__(self) -> None:
                self.idx, stub.current = stub.current, self.idx

            def __exit__(self, *_: object) -> None:
                stub.current = self.idx

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda, "Event", CardEvent))
            stack.enter_context(mock.patch.object(torch.cuda, "device", CurrentDevice))
            for name in (
                "current_stream", "synchronize", "_sleep", "empty_cache", "mem_get_info",
                "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated",
                "max_memory_reserved", "get_device_properties", "get_device_name",
                "current_device", "device_count",
            ):  # fmt: skip
                patch = mock.patch.object(torch.cuda, name, getattr(self, name), create=True)
                stack.enter_context(patch)
            stack.enter_context(mock.patch.object(torch.cuda, "is_initialized", return_value=True))
            stack.enter_context(mock.patch.dict(os.environ))
            os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
            yield self

    @contextmanager
    def takes_cpu(self, index: int) -> Iterator[CudaStub]:
        """Answer for torch.cuda, and let the profiler take CPU tensors for those of a card."""
        self.of_cpu = index
        ON_CUDA.add("cpu")
        try:
            with self.in_force():
                yield self
        finally:
            ON_CUDA.remove("cpu")

    def fault(self) -> str | None:
        """Return what was wrong in the order of calls; None if nothing was.

        The stub itself refuses to read an event that was not waited for.
        """
        is_emptied, is_reset = False, False
        for name, device, *_ in self.calls:
            if device not in (None, self.of_cpu):
                return f"{name} was asked of card {device}, not of {self.of_cpu}"
            if name == "reset_peak":
                is_reset = is_emptied
                is_emptied = False
            elif name == "empty_cache":
                is_emptied = True
            elif name == "read_peak" and not is_reset:
                return "a peak was read that did not begin with an empty cache"
        return None

    def say(self, name: str, device: int | None, *more: Any) -> None:
        self.calls.append((name, device, *more))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def devices(self) -> set[int]:
        return {call[1] for call in self.calls if call[1] is not None}

    def index(self, device: Any = None) -> int:
        if device is None:
            return self.current
        if isinstance(device, int):
            return device
        if device.type == "cpu":
            return self.of_cpu
        return self.current if device.index is None else device.index

    def current_stream(self, device: Any = None) -> tuple[int, str]:
        index = self.index(device)
        return index, self.cards[index].stream

    def synchronize(self, device: Any = None) -> None:
        index = self.index(device)
        self.say("synchronize", index)
        while self.cards[index].waiting:
            self.cards[index].waiting.pop().is_complete = True

    def _sleep(self, cycles: int) -> None:
        self.say("sleep", self.current, cycles)

    # The allocator: memory given back stays reserved until the cache is emptied.

    def take(self, size: int, device: Any = None) -> None:
        card = self.cards[self.index(device)]
        if card.allocated + size > card.total_memory:
            index = self.index(device)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. GPU {index} has a total "
                f"capacity of {card.total_memory} bytes."
            )
        card.allocated += size
        card.reserved = max(card.reserved, card.allocated)
        card.peak = max(card.peak, card.allocated)
        card.reserved_peak = max(card.reserved_peak, card.reserved)

    def give(self, size: int, device: Any = None) -> None:
        self.cards[self.index(device)].allocated -= size

    def empty_cache(self) -> None:
        self.say("empty_cache", None)
        for card in self.cards:
            card.reserved = card.allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        card = self.cards[self.index(device)]
        card.peak, card.reserved_peak = card.allocated, card.reserved
        self.say("reset_peak", self.index(device))

    def memory_allocated(self, device: Any = None) -> int:
        return self.cards[self.index(device)].allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        self.say("read_peak", self.index(device))
        return self.cards[self.index(device)].peak

    def max_memory_reserved(self, device: Any = None) -> int:
        return self.cards[self.index(device)].reserved_peak

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        card = self.cards[self.index(device)]
        self.say("mem_get_info", self.index(device))
        return card.total_memory - card.reserved, card.total_memory

    def get_device_properties(self, device: Any = None) -> Card:
        return self.cards[self.index(device)]

    def get_device_name(self, device: Any = None) -> str:
        return self.cards[self.index(device)].name

    def current_device(self) -> int:
        return self.current

    def device_count(self) -> int:
        return len(self.cards)


SLICE = Card("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864 * MIB, "abcd")
"""What torch sees of a MIG slice."""


class Scratch(nn.Module):
    """A layer that takes memory of the current card: for the call, and in its first call to keep.

    Its function ``run`` counts its calls, and runs out of memory from number ``fails_at`` on.
    Neither is put back by the profiler, which puts back what it finds in a module.
    """

    def __init__(self, stub: CudaStub, size: int, *, lasting: int = 0) -> None:
        super().__init__()

        def run() -> None:
            run.calls += 1
            if run.calls == 1:
                stub.take(lasting)
            if 0 < run.fails_at <= run.calls:
                stub.take(2**60)
            stub.take(size)
            stub.give(size)

        run.calls = run.fails_at = 0
        self.run: Any = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.run()
        return x * 2
