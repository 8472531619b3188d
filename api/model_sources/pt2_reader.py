"""Reading uploaded programs without the server paying for what they unfold to.

Sixty-four MiB of JSON come in half a MiB of archive, and as lists in lists take two GB of memory.
What is small is read in a thread; the rest in a child, which the limit ends.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded, InvalidInput, OutOfMemory
from ...core.graph.graph import Graph
from ..sandbox.child import run_confined_async
from ..sandbox.limits import Limits
from .measure import MeasuringFailed, SandboxChoice, chosen_sandbox
from .pt2_archive import program_json
from .pt2_graph import read_program

COMMAND = (sys.executable, "-P", "-m", "stagewright.api.model_sources.pt2_child")
SMALL = 300_000
"""Values, lists and objects that are read here; each takes some hundred bytes."""

MAX_CONCURRENT = 2
LIMITS = Limits(memory_bytes=2**31, deadline_s=60.0, output_bytes=32 * 2**20)
TOO_LARGE = (
    "the program is too large for this service; profile the model where it is, and send that"
)


class ProgramReader:
    """Reads a few programs at a time.

    Args:
        sandbox: Whether children get one.
    """

    def __init__(self, sandbox: SandboxChoice = "auto") -> None:
        self._sandbox = sandbox
        self._turn = asyncio.Semaphore(MAX_CONCURRENT)

    async def read(self, archive: bytes) -> Graph:
        """The graph in what ``torch.export.save`` wrote.

        Raises:
            InvalidInput: It is no such archive, too large, or has what a graph cannot hold.
        """
        async with self._turn:
            text = await run_in_threadpool(program_json, archive)
            if values_in(text) <= SMALL:
                return await run_in_threadpool(read_program, text)
            return await self._read_apart(text)

    async def _read_apart(self, text: bytes) -> Graph:
        sandbox = await run_in_threadpool(chosen_sandbox, self._sandbox)
        try:
            output = await run_confined_async(COMMAND, text, LIMITS, sandbox=sandbox)
        except (OutOfMemory, DeadlineExceeded):
            raise InvalidInput(TOO_LARGE) from None
        try:
            return await run_in_threadpool(Graph.model_validate_json, output)
        except ValidationError as error:
            raise MeasuringFailed(f"the child's graph does not fit: {error}") from None


def values_in(text: bytes) -> int:
    """At least as many as JSON has values, counted without reading it."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
