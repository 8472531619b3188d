"""Uploaded ``.pt2`` programs: parsed in a child, and refused where the child runs out of memory."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import tempfile
import threading
import zipfile
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.api.http.large_bodies import LARGE_BYTES
from stagewright.api.model_sources import pt2_upload
from stagewright.capture.pt2.graph import read_pt2
from stagewright.core.errors import DeadlineExceeded, InvalidInput, MeasurementError
from stagewright.core.graph.graph import Graph


def packed(program: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("net/models/model.json", program)
    return file.getvalue()


def test_a_program_is_read_in_a_child():
    file = io.BytesIO()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    torch.export.save(torch.export.export(model, (torch.zeros(2, 4),)), file)
    archive = file.getvalue()
    assert asyncio.run(pt2_upload.ProgramReader().read(archive)) == read_pt2(archive)


def test_what_the_child_refuses_is_refused_here():
    reader = pt2_upload.ProgramReader()
    with pytest.raises(InvalidInput, match=r"not as torch\.export writes it"):
        asyncio.run(reader.read(packed(b"[{}]")))
    with pytest.raises(InvalidInput, match="not an archive"):
        asyncio.run(reader.read(b"PK cut off"))


def test_a_program_beyond_the_memory_limit_ends_the_child_alone():
    numbers = json.dumps(random.Random(0).choices(range(2**40), k=2**19)).encode()
    reader = pt2_upload.ProgramReader(memory_bytes=2**24)  # the setting `child_memory_bytes`
    with pytest.raises(InvalidInput, match="too large for this service"):
        asyncio.run(reader.read(packed(numbers)))


def test_the_server_does_not_load_the_reader():
    import subprocess

    code = (
        "import sys, stagewright.api.app; "
        "sys.exit(any(name.startswith('stagewright.capture') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("answer", [b"{}", b'{"layers": "SENDERS-TEXT"}', b"not JSON"])
def test_an_answer_that_is_no_graph_is_no_fault_of_the_server(answer, monkeypatch, caplog):
    """Cause: a child that answered nonsense was a 500, its answer quoted in the log."""
    program = f"import sys; sys.stdout.buffer.write({answer!r})"
    monkeypatch.setattr(pt2_upload, "COMMAND", (sys.executable, "-I", "-S", "-c", program))
    reader = pt2_upload.ProgramReader("off")
    with pytest.raises(MeasurementError, match="no valid graph"):
        asyncio.run(reader.read(b"any"))
    assert "no valid graph" in caplog.text
    assert "SENDERS-TEXT" not in caplog.text


def test_a_large_graph_comes_back_whole(monkeypatch):
    """Its lists are validated a slice at a time."""
    layers = [{"name": f"layers.{number}"} for number in range(9000)]
    graph = {"model": "m", "mode": "export", "inputs": [], "outputs": [], "layers": layers,
             "boundaries": [{"after": after} for after in range(8999)]}  # fmt: skip
    program = f"import sys; sys.stdout.write({json.dumps(json.dumps(graph))})"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        monkeypatch.setattr(pt2_upload, "COMMAND", (sys.executable, "-I", "-S", file.name))
        found = asyncio.run(pt2_upload.ProgramReader("off").read(b"any"))
    assert len(json.dumps(graph)) > LARGE_BYTES
    assert found == Graph.model_validate(graph)


def test_projects_take_turns_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One project's uploads kept every other one's waiting, however long."""
    begun: list[bytes] = []
    may_end = threading.Event()

    async def read_slowly(command: object, archive: bytes, *_: object, **__: object) -> bytes:
        begun.append(archive)
        await asyncio.to_thread(may_end.wait)
        return b"{}"

    # In a thread, a place granted earlier could begin later than the next one.
    async def choose_at_once(*_: object) -> None:
        return None

    monkeypatch.setattr(pt2_upload, "run_in_threadpool", choose_at_once)
    monkeypatch.setattr(pt2_upload, "run_confined_async", read_slowly)

    async def main() -> None:
        reader = pt2_upload.ProgramReader("off")
        many = [asyncio.create_task(reader.read(b"many", "a")) for _ in range(4)]
        await asyncio.sleep(0.1)
        one = asyncio.create_task(reader.read(b"one", "b"))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(pt2_upload, "MAX_WAIT_S", 0.1)
        with pytest.raises(DeadlineExceeded, match="turn"):
            await reader.read(b"late", "c")
        may_end.set()
        assert {type(end) for end in await asyncio.gather(*many, one, return_exceptions=True)} == {
            MeasurementError
        }

    asyncio.run(main())
    assert b"one" in begun[:4]
    assert b"late" not in begun
