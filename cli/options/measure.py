"""Measurement requests built from a file or from command-line options; imports no torch."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ...core.graph.tensors import Sample, SampleTensor
from ...core.requests.requests import MeasureRequest, ProfilingOptions
from ..support.named_models import find_config, read_family, read_model
from ..support.read_documents import build_record, read_json, read_json_file, schema_version


def read_request(path: Path) -> MeasureRequest:
    """Read a request, a captured graph to be measured or a ``config.json`` from a JSON file."""
    if find_config(str(path)) is not None:
        spec, sample = read_model(str(path), None, 1, None)
        return MeasureRequest(model=spec, sample=sample)
    text = read_json_file(path)
    try:
        is_graph = (schema_version(text) or "").startswith("stagewright.graph/")
    except (ValueError, RecursionError):
        is_graph = False  # the reader of requests says what is wrong with the JSON
    if is_graph:
        return MeasureRequest(graph=Graph.from_json(text))
    request: MeasureRequest = read_json(MeasureRequest, text, f"request to measure ({path})")
    return request


def build_family_request(
    family: str, config: str, inputs: list[str], target: str | None
) -> MeasureRequest:
    """Build a request for a family's model; each input is ``NAME=TENSOR``, see `parse_tensor`."""
    spec = read_family(family, config)
    if not inputs:
        raise InvalidInput("--family requires its inputs: --input NAME=SHAPE:DTYPE:FILL")
    tensors = {}
    for text in inputs:
        name, equals, tensor = text.partition("=")
        if not equals:
            raise InvalidInput(f"cannot read input {text!r}; write NAME=SHAPE:DTYPE:FILL")
        tensors[name] = parse_tensor(tensor)
    sample = Sample(inputs=tensors, target=parse_tensor(target) if target else None)
    return MeasureRequest(model=spec, sample=sample)


def parse_tensor(text: str) -> SampleTensor:
    """Parse a synthetic tensor from ``SHAPE[:DTYPE[:FILL[:LOW:HIGH]]]``.

    For example ``8x3x224x224``, or ``1x128:int64:randint:0:50257``.
    """
    shape, *rest = text.split(":")
    fields = dict(zip(("dtype", "fill", "low", "high"), rest, strict=False))
    sizes = shape.split("x")
    if len(rest) > 4 or not all(size.isdecimal() for size in sizes):
        raise InvalidInput(
            f"cannot read tensor {text!r}; write SHAPE:DTYPE:FILL:LOW:HIGH, "
            "e.g. 8x3x224x224 or 1x128:int64:randint:0:50257"
        )
    return build_record(SampleTensor, shape=tuple(map(int, sizes)), **fields)


def override_options(base: ProfilingOptions, **given: object) -> ProfilingOptions:
    """Return the options with every value replaced that is not `None`."""
    replaced = {name: value for name, value in given.items() if value is not None}
    return build_record(ProfilingOptions, **{**base.model_dump(), **replaced})
