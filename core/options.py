"""How a profile is to be measured, as data that every caller shares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .document import Record
from .families import ModelSpec
from .sample import Sample


class ProfilingOptions(Record):
    """Settings of one measurement.

    Attributes:
        device: ``cpu``, ``cuda`` or ``cuda:N``; `None` measures where the model already is.
        num_threads: CPU threads used by the measured model; `None` leaves torch's default.
        busy_neighbours: Processes kept busy with the same work on other cores meanwhile, so that
            ranks sharing a machine are measured as they will run.
        budget_s: Seconds to spend on repeats, over all layers.
        autocast: Run under ``torch.autocast`` with this dtype.
        compile: Compile every layer with ``torch.compile`` first.
        deduplicate: Measure layers that cost the same once.
    """

    device: str | None = Field(None, pattern=r"^(cpu|cuda(:\d{1,3})?)$")
    num_threads: int | None = Field(None, ge=1, le=1024)
    busy_neighbours: int = Field(0, ge=0, le=64)
    budget_s: float = Field(20.0, gt=0, le=3600)
    autocast: Literal["bfloat16", "float16"] | None = None
    compile: bool = False
    deduplicate: bool = True


class MeasureRequest(Record):
    """A model and a sample as data, to be built and measured in a process of its own."""

    model: ModelSpec
    sample: Sample
    profiling: ProfilingOptions = ProfilingOptions()
