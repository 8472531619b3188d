"""Rank group of a link measurement: joining the other ranks, waiting for them, messages."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ...core.errors import InvalidInput, RankFailed, first_line
from ...core.rank_heartbeats import Heartbeats
from ..machine.memory import host_memory_bytes, is_out_of_memory
from .records import LinkOptions, RankDevice

GRACE_S = 5.0
"""Time torch has to notice a timeout itself before the rank that still waits is ended."""

JOINING_S = 0.05
"""Interval between checks of which ranks have joined."""

ADVICE = (
    "Are all ranks still running, measure with the same options, and can their machines reach "
    "each other? --timeout says how long to wait"
)

Silent = Callable[[str], None]


class RankGroup:
    """This rank and its connections to the others.

    Control messages travel by gloo on the CPU, so that they cost a GPU nothing; timed messages
    travel by the backend of the device: nccl on CUDA, gloo on the CPU.

    Args:
        options: Device and timeout.
        on_silence: Called from a thread, with the ranks concerned, once this rank has waited
            beyond the timeout in a call that torch does not end; it must end the process.
    """

    def __init__(self, options: LinkOptions, on_silence: Silent) -> None:
        self.rank, self.size = _required("RANK"), _required("WORLD_SIZE")
        self.options = options
        self.device = _device(options.device)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        self._timeout = timedelta(seconds=options.timeout_s)
        self._on_silence = on_silence
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._control: dist.ProcessGroup | None = None
        self._beats: Heartbeats | None = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        store = self._joined_store()
        try:
            self._connect_groups(store)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def _connect_groups(self, store: Any) -> None:
        is_gpu = self.device.type == "cuda"
        with self.waiting_for(range(self.size), "to connect"):
            dist.init_process_group(
                self.backend,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=self._timeout,
                device_id=self.device if is_gpu else None,
            )
            if is_gpu:
                self._control = dist.new_group(backend="gloo", timeout=self._timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Leave the group; after an error only stop the heartbeat: the others may be gone."""
        if self._beats is not None:
            self._beats.close()
        if kind is None:
            dist.destroy_process_group()

    def describe(self) -> RankDevice:
        card = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        return RankDevice(
            host=socket.gethostname(),
            group_rank=_number("GROUP_RANK"),
            local_rank=_local_rank(),
            local_ranks=_number("LOCAL_WORLD_SIZE"),
            device=str(self.device),
            kind=card.name if card else "cpu",
            memory_bytes=card.total_memory if card else host_memory_bytes(),
        )

    @contextlib.contextmanager
    def waiting_for(self, ranks: Sequence[int], what: str) -> Iterator[None]:
        """Name the ranks waited for in any error raised inside."""
        others = tuple(one for one in ranks if one != self.rank)
        who = f"rank {self.rank} waited for {_names(others)} {what}"
        too_long = f"{who}: no answer in {self.options.timeout_s:g} s. {ADVICE}"
        # torch's own timeout does not end every wait (a TCPStore read during a rendezvous, an
        # NCCL kernel that spins), so a thread of ours watches the clock as well.
        timer = threading.Timer(
            self.options.timeout_s + GRACE_S,
            lambda: self._on_silence(_blame(self._lost()) + too_long),
        )
        timer.daemon = True
        timer.start()
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch.distributed's own are of these
            timer.cancel()
            if is_out_of_memory(error):
                raise
            text = too_long if _is_timeout(error) else f"{who}: {first_line(error)}. {ADVICE}"
            lost = self._lost()
            raise RankFailed(_blame(lost) + text, ranks=lost) from error
        finally:
            timer.cancel()

    def gather(self, mine: str, what: str) -> list[str]:
        """Gather one text from every rank on every rank."""
        found: list[str] = [""] * self.size
        with self.waiting_for(range(self.size), what):
            dist.all_gather_object(found, mine, group=self._control)
        return found

    def broadcast(self, text: str, what: str) -> str:
        """Return rank 0's text on every rank."""
        texts = [text]
        with self.waiting_for([0] if self.rank else range(self.size), what):
            dist.broadcast_object_list(texts, src=0, group=self._control)
        return texts[0]

    def wait_for_all(self, active: Sequence[int], what: str) -> None:
        """Wait until every rank is here: the active ones work, the others only wait."""
        with self.waiting_for(active, what):
            dist.barrier(group=self._control)

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return a group of some ranks, `None` for all; every rank calls it in the same order."""
        if len(ranks) == self.size:
            return None
        if ranks not in self._groups:
            with self.waiting_for(range(self.size), "to form a group"):
                made = dist.new_group(list(ranks), backend=self.backend, timeout=self._timeout)
            self._groups[ranks] = made
        return self._groups[ranks]

    def settle(self) -> None:
        """Wait until this rank's device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return a message buffer of zeros, whose sums stay zero and never become denormal."""
        return torch.zeros(max(size_bytes // 4, 1), device=self.device)

    def number(self, value: int = 0) -> torch.Tensor:
        """Return a message that holds one number."""
        return torch.tensor([value], dtype=torch.int64, device=self.device)

    def _lost(self) -> tuple[int, ...]:
        """Return the ranks that stopped first, as far as is known."""
        return self._beats.find_out().ranks if self._beats is not None else ()

    def _joined_store(self) -> Any:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        with self.waiting_for([0], "to open the store that all ranks meet at"):
            store = self._connect(is_host=self.rank == 0 and not agent)
            self._wait_for_all(store)
            # A connection of its own: waiting on the other one would silence the heartbeat.
            self._beats = Heartbeats(self._connect(is_host=False), self.rank, self.size)
        return store

    def _connect(self, *, is_host: bool) -> Any:
        store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            _required("MASTER_PORT"),
            self.size,
            is_master=is_host,
            timeout=self._timeout,
            wait_for_workers=False,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"stagewright-links/{attempt}", store)

    def _wait_for_all(self, store: Any) -> None:
        store.set(f"here/{self.rank}", "1")
        missing = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + self.options.timeout_s
        while missing:
            missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
            if missing and time.monotonic() > deadline:
                raise RankFailed(
                    f"rank {self.rank} waited for {_names(missing)} to join: not there in "
                    f"{self.options.timeout_s:g} s. {ADVICE}",
                    ranks=tuple(missing),
                )
            if missing:
                time.sleep(JOINING_S)


def cuda_devices() -> int:
    """Count the CUDA devices torch sees on this machine."""
    return torch.cuda.device_count()


def _device(wanted: str | None) -> torch.device:
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted is None and not count):
        return torch.device("cpu")
    local = _local_rank()
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES", "").isdigit():
        local = 0  # some launchers show each process its own GPU alone
    if local >= count:
        raise InvalidInput(
            f"rank {_required('RANK')} would need cuda:{local}, but its machine has {count} CUDA "
            "devices; start as many ranks as there are devices, or measure with --device cpu"
        )
    return torch.device("cuda", local)


def _local_rank() -> int:
    local = _number("LOCAL_RANK")
    return _required("RANK") if local is None else local


def _required(name: str) -> int:
    number = _number(name)
    if number is None:
        raise InvalidInput(f"{name} is not set; start the ranks with torchrun")
    return number


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    # isdecimal: "+1", "1_0" and other texts that int() takes are no rank of a launcher
    return int(text) if text.isdecimal() else None


def _names(ranks: Sequence[int]) -> str:
    """Write ranks as ``rank 3``, ``ranks 0, 1 and 2`` or ``ranks 0, 1, 2 and 12 others``."""
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "no other rank"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} others"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _blame(lost: Sequence[int]) -> str:
    return f"{_names(lost)} stopped answering; " if lost else ""


def _is_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
