"""Running commands as a shell does, and small documents to run them on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagewright.cli.main import main
from stagewright.cli.support import progress
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Boundary, Layer, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.profile.profile import LayerProfile, Profile, Timing

MIB = 2**20


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capfd, monkeypatch, tmp_path) -> Run:
    """Run ``stagewright`` with some words, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAGEWRIGHT_DEBUG", raising=False)

    def run_words(*words: object) -> Ran:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *capfd.readouterr())

    return run_words


@pytest.fixture
def profile() -> Profile:
    """Four layers of 1, 2, 3 and 4 ms forward, twice that backward, 1 MiB of weights each."""
    hidden = TensorSpec(name="hidden", shape=(8, 64), dtype="float32", requires_grad=True)
    return Profile(
        model="Ladder",
        inputs=(TensorSpec(name="x", shape=(8, 64), dtype="float32"),),
        layers=tuple(
            LayerProfile(
                layer=Layer(name=f"rung.{index}", parameter_bytes=MIB),
                forward=Timing(median_s=(index + 1) / 1000),
                backward=Timing(median_s=(index + 1) / 500),
                saved_activation_bytes=MIB,
                output_bytes=hidden.size_bytes,
            )
            for index in range(4)
        ),
        boundaries=tuple(Boundary(after=index, tensors=(hidden,)) for index in range(3)),
        parameters=tuple(
            Parameter(
                names=(f"rung.{index}.weight",), size_bytes=MIB, numel=MIB // 4, layers=(index,)
            )
            for index in range(4)
        ),
    )


@pytest.fixture
def profile_file(profile, tmp_path) -> Path:
    path = tmp_path / "ladder.json"
    profile.write(path)
    return path


@pytest.fixture
def cluster_file(tmp_path) -> Path:
    path = tmp_path / "cluster.json"
    Cluster.parse("2x1GiB").write(path)
    return path


@pytest.fixture(autouse=True)
def no_lines_of_progress(monkeypatch):
    """On a busy machine anything takes seconds; tests compare what else is on stderr."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 1000.0)
