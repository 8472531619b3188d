"""What tests of the runtime may use."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def nccl_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks of the test record what they launch; on NCCL none may wait for ever."""
    from tests.nccl.process_group import find_deadlocks

    folder = tmp_path / "launches"
    folder.mkdir()
    monkeypatch.setenv("NCCL_MANNERS", str(folder))
    yield
    assert find_deadlocks(folder) == []
