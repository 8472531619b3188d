"""Uploaded ``.pt2`` programs, always parsed in a confined child process.

Half a MiB of archive can unpack to 64 MiB of JSON, which takes 2 GB of memory once parsed. The
memory limit ends the child, not the server.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from ...core.errors import DeadlineExceeded, InvalidInput, OutOfMemory
from ...core.graph.graph import Graph
from ..sandbox.child import run_confined_async
from ..sandbox.limits import ChildLimits
from .measure import MeasuringFailed, SandboxChoice, choose_sandbox

COMMAND = (sys.executable, "-P", "-m", "stagewright.api.model_sources.pt2_child")
MAX_CONCURRENT = 2
LIMITS = ChildLimits(memory_bytes=2**31, deadline_s=60.0, output_bytes=32 * 2**20)


class ProgramReader:
    """Reader of uploaded programs, `MAX_CONCURRENT` at a time."""

    def __init__(self, sandbox: SandboxChoice = "auto") -> None:
        self._sandbox = sandbox
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def read(self, archive: bytes) -> Graph:
        """Return the graph of what ``torch.export.save`` wrote, or raise `InvalidInput`."""
        async with self._slots:
            sandbox = await run_in_threadpool(choose_sandbox, self._sandbox)
            try:
                output = await run_confined_async(COMMAND, archive, LIMITS, sandbox=sandbox)
            # The archive unpacks to more than the child may hold: the client's to change.
            except (OutOfMemory, DeadlineExceeded):
                raise InvalidInput(
                    "the program is too large for this service; profile the model where it is, "
                    "and send the profile"
                ) from None
            try:
                # The child parsed untrusted bytes; its answer is trusted no more than an upload.
                return await run_in_threadpool(Graph.model_validate_json, output)
            except ValidationError as error:
                raise MeasuringFailed(f"the child returned no valid graph: {error}") from None
