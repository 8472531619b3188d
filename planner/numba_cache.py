"""Ahead-of-time compilation of the planner's inner loops into numba's cache.

The first compilation takes half a minute of a processor; numba caches the result beside the
sources and then loads it in a second. A server compiles in a separate process and plans in plain
Python meanwhile.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..core.cluster.cluster import Cluster
from ..core.graph.graph import Boundary, Layer
from ..core.graph.tensors import TensorSpec
from ..core.plan.plan import PlanOptions
from ..core.profile.profile import LayerProfile, Profile, Timing
from ..schedules import numba_jit as jit
from .plan import plan

FOLDER = Path(__file__).resolve().parent
SOURCES = (
    FOLDER / "search" / "device_prices.py",
    FOLDER / "search" / "label_kernel.py",
    FOLDER / "search" / "label_table.py",
    FOLDER / "search" / "relaxation_kernel.py",
    FOLDER / "simulator" / "event_loop.py",
    FOLDER.parent / "schedules" / "action_order.py",
    FOLDER.parent / "schedules" / "numba_jit.py",
)

ASKED = (
    PlanOptions(max_replicas=None, recompute="auto", num_microbatches=16),
    PlanOptions(objective="throughput", max_replicas=None),
    PlanOptions(schedule="zero_bubble"),
    PlanOptions(schedule="interleaved_1f1b"),
    PlanOptions(schedule="zbv"),
    PlanOptions(schedule="dualpipev"),
)
"""Options that together run every compiled loop on `example`, where memory is short."""

DEVICES, MEMORY_BYTES = 4, 24 * 10**6
LAYERS = 24


def is_done() -> bool:
    """Return True if nothing is left to compile, without the second that loading numba takes."""
    return not jit.is_available() or _mark().exists()


def compile_all() -> None:
    """Compile what is not cached yet; takes a second if everything is.

    Raises:
        ImportError: numba is not installed.
    """
    importlib.import_module("numba")
    jit.load()
    profile, cluster = example(), Cluster.uniform(DEVICES, memory_bytes=MEMORY_BYTES)
    for options in ASKED:
        plan(profile, cluster, options)
    with suppress(OSError):  # no writable place for the mark: the next process compiles again
        mark = _mark()
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def load_common() -> None:
    """Load what most plans need from numba's cache, unless numba is missing or switched off.

    Importing numba is a part of it only: the first compiled call imports ten times as much.
    """
    if jit.is_available():
        jit.load()
        plan(example(), Cluster.uniform(DEVICES, memory_bytes=MEMORY_BYTES), ASKED[0])


def example() -> Profile:
    """Return the profile of a small model with uneven layers."""
    layers = tuple(
        LayerProfile(
            layer=Layer(name=f"layer {index}", module_type="Layer", parameter_bytes=10**5),
            forward=Timing(median_s=1e-3 * (1 + index % 5)),
            backward=Timing(median_s=1e-3 * (2 + index % 3)),
            saved_activation_bytes=10**5 * (1 + index % 2),
        )
        for index in range(LAYERS)
    )
    sent = TensorSpec(name="x", shape=(1000,), dtype="float32", requires_grad=True)
    boundaries = tuple(Boundary(after=after, tensors=(sent,)) for after in range(LAYERS - 1))
    return Profile(model="Example", layers=layers, boundaries=boundaries)


def _mark() -> Path:
    """Return the file that exists once all loops of these sources are compiled on this machine."""
    # numba keys its cache by processor and by each source's time and size; so does the mark.
    known = [sys.version, platform.machine(), platform.processor()]
    with suppress(PackageNotFoundError):
        known.append(version("numba"))
    for source in SOURCES:
        found = source.stat()
        known.append(f"{source.name} {found.st_mtime_ns} {found.st_size}")
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
    kept = os.environ.get("NUMBA_CACHE_DIR")
    return (Path(kept) if kept else FOLDER / "__pycache__") / f"compiled-{digest}"


if __name__ == "__main__":
    compile_all()
