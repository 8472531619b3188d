"""Uploaded ``.pt2`` programs: parsed in a child, and refused where the child runs out of memory."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import zipfile
from typing import Any

import pytest
import torch
from torch import nn

from stagewright.api.model_sources import pt2_upload
from stagewright.api.sandbox.limits import ChildLimits
from stagewright.capture.pt2.graph import read_pt2
from stagewright.core.errors import InvalidInput


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


def test_a_program_beyond_the_memory_limit_ends_the_child_alone(monkeypatch):
    monkeypatch.setattr(pt2_upload, "LIMITS", ChildLimits(memory_bytes=2**24, deadline_s=20.0))
    numbers = json.dumps(random.Random(0).choices(range(2**40), k=2**19)).encode()
    with pytest.raises(InvalidInput, match="too large for this service"):
        asyncio.run(pt2_upload.ProgramReader().read(packed(numbers)))


def test_the_server_does_not_load_the_reader():
    import subprocess

    code = (
        "import sys, stagewright.api.app; "
        "sys.exit(any(name.startswith('stagewright.capture') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
