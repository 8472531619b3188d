"""A request to measure, put together from a file or from command-line options; no torch."""

from __future__ import annotations

import json
from pathlib import Path

from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ...core.graph.sample import Sample, SampleTensor
from ...core.models.families import ModelSpec
from ...core.requests.requests import MeasureRequest, ProfilingOptions
from ..support.validation import checked, checked_json


def read_request(path: Path) -> MeasureRequest:
    """Read a request, or a graph to be measured, from a JSON file.

    Raises:
        InvalidInput: The file is missing, or neither.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    if _is_graph(text):
        return MeasureRequest(graph=Graph.from_json(text))
    request: MeasureRequest = checked_json(MeasureRequest, text, f"request to measure ({path})")
    return request


def _is_graph(text: bytes) -> bool:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    schema = document.get("schema_version", "") if isinstance(document, dict) else ""
    return str(schema).startswith("stagewright.graph/")


def family_request(
    family: str, config: str, inputs: list[str], target: str | None
) -> MeasureRequest:
    """A request for a model of a family.

    Args:
        family: Its name, e.g. ``gpt2``.
        config: Its configuration as JSON.
        inputs: ``NAME=TENSOR`` each, see `parse_tensor`.
        target: A tensor the loss is taken against.

    Raises:
        InvalidInput: One of them cannot be read.
    """
    try:
        model = json.dumps({"family": family, "config": json.loads(config)})
    except ValueError as error:
        raise InvalidInput(f"--config is not JSON: {error}") from None
    spec: ModelSpec = checked_json(ModelSpec, model, "model")
    if not inputs:
        raise InvalidInput("a family needs its inputs: --input NAME=SHAPE:DTYPE:FILL")
    tensors = {}
    for text in inputs:
        name, equals, tensor = text.partition("=")
        if not equals:
            raise InvalidInput(f"cannot read input {text!r}; write NAME=SHAPE:DTYPE:FILL")
        tensors[name] = parse_tensor(tensor)
    sample = Sample(inputs=tensors, target=parse_tensor(target) if target else None)
    return MeasureRequest(model=spec, sample=sample)


def parse_tensor(text: str) -> SampleTensor:
    """A tensor to make up, from ``SHAPE[:DTYPE[:FILL[:LOW:HIGH]]]``.

    For example ``8x3x224x224``, or ``1x128:int64:randint:0:50257``.

    Raises:
        InvalidInput: The text has another form, or its parts do not fit together.
    """
    shape, *rest = text.split(":")
    fields = dict(zip(("dtype", "fill", "low", "high"), rest, strict=False))
    sizes = shape.split("x")
    if len(rest) > 4 or not all(size.isdecimal() for size in sizes):
        raise InvalidInput(
            f"cannot read tensor {text!r}; write SHAPE:DTYPE:FILL:LOW:HIGH, "
            "e.g. 8x3x224x224 or 1x128:int64:randint:0:50257"
        )
    return checked(SampleTensor, shape=tuple(map(int, sizes)), **fields)


def with_options(base: ProfilingOptions, **given: object) -> ProfilingOptions:
    """The options with those replaced that were given, i.e. are not `None`.

    Raises:
        InvalidInput: A value is not accepted.
    """
    replaced = {name: value for name, value in given.items() if value is not None}
    return checked(ProfilingOptions, **{**base.model_dump(), **replaced})
