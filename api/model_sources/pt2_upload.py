"""Uploaded ``.pt2`` programs, always parsed in a confined child process.

Half a MiB of archive can unpack to 64 MiB of JSON, which takes 2 GB of memory once parsed. The
memory limit ends the child, not the server.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import replace

from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded, InvalidInput, OutOfMemory
from ...core.graph.graph import Graph
from ..fair_limits import FairTurns
from ..http.large_bodies import LARGE_BYTES, WrongItems, in_slices
from ..http.threads import in_busy_thread
from ..sandbox.child import run_confined_async
from ..sandbox.limits import ChildLimits
from .measure import SandboxChoice, choose_sandbox, invalid_answer

COMMAND = (sys.executable, "-P", "-m", "stagewright.api.model_sources.pt2_child")
MAX_CONCURRENT, MAX_OF_PROJECT = 3, 2
LIMITS = ChildLimits(memory_bytes=2**31, deadline_s=60.0, output_bytes=16 * 2**20)
"""A graph has at most as many bytes as one in a request."""

MAX_WAIT_S = 60.0
"""Longest wait for earlier uploads; the reading itself takes a second or two."""


class ProgramReader:
    """Reader of uploaded programs, `MAX_CONCURRENT` at a time; projects take turns."""

    def __init__(self, sandbox: SandboxChoice = "auto", *, memory_bytes: int | None = None) -> None:
        self._sandbox = sandbox
        self._limits = replace(
            LIMITS, memory_bytes=min(memory_bytes or LIMITS.memory_bytes, LIMITS.memory_bytes)
        )
        self._turns = FairTurns(MAX_CONCURRENT, MAX_OF_PROJECT)

    async def read(self, archive: bytes, project: str = "") -> Graph:
        """Return the graph of what ``torch.export.save`` wrote.

        Raises:
            InvalidInput: It is no such program, contradicts itself, or is too large.
            DeadlineExceeded: It was not the project's turn within `MAX_WAIT_S`.
        """
        async with self._turns.place(project, time.monotonic() + MAX_WAIT_S):
            sandbox = await run_in_threadpool(choose_sandbox, self._sandbox)
            try:
                output = await run_confined_async(COMMAND, archive, self._limits, sandbox=sandbox)
            # The archive unpacks to more than the child may hold: the client's to change.
            except (OutOfMemory, DeadlineExceeded):
                raise InvalidInput(
                    "the program is too large for this service; profile the model where it is, "
                    "and send the profile"
                ) from None
            try:
                # The child parsed untrusted bytes; its answer is trusted no more than an upload.
                return await in_busy_thread(_parse_graph, output)
            except ValueError as error:  # pydantic's are, too
                raise invalid_answer("graph", error) from None


def _parse_graph(answer: bytes) -> Graph:
    found = from_json(answer)
    if len(answer) >= LARGE_BYTES:
        with suppress(WrongItems):  # which the validation of the whole finds again
            found = in_slices(Graph, found)
    return Graph.model_validate(found)
