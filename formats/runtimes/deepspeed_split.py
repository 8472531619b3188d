"""DeepSpeed's own partition methods, computed from a model's layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import numpy

from ...core.errors import InvalidInput
from ..target import ModelLayers
from .block_counts import split_evenly

_METHOD = re.compile(r"partition_method[\"']?\s*[=:]\s*[\"']([^\"'\n]{1,1000})[\"']")
_STAGES = re.compile(r"(?:num_stages|num_pp)\s*=\s*(\d{1,3})\b")


def split_by_method(text: str, layers: ModelLayers) -> list[int] | None:
    """Return the parts of the ``partition_method`` and ``num_stages`` that a text gives.

    `None` if it gives no number of stages, or the layers' weights or types are not known.

    Raises:
        InvalidInput: DeepSpeed has no such method, or it fits no layer.
    """
    stages, given = _STAGES.search(text), _METHOD.search(text)
    if stages is None or not int(stages[1]) or (given is None and "PipelineModule(" not in text):
        return None
    method, num_stages = given[1].lower() if given else "parameters", int(stages[1])
    if method == "uniform":
        return _split_evenly(len(layers.names), num_stages)
    if method == "parameters":
        weights = layers.parameter_counts
    elif method.startswith("type:"):
        weights = tuple(map(int, _match_types(method.split(":")[1], layers.types)))
    else:
        raise InvalidInput(
            f"DeepSpeed has no partition_method {method!r}; it has uniform, parameters and "
            "type:REGEX"
        )
    return split_balanced(weights, num_stages) if weights else None


def _match_types(pattern: str, types: Sequence[str]) -> list[bool]:
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InvalidInput(f"{pattern!r} of partition_method is no pattern: {error}") from None
    found = [compiled.search(name) is not None for name in types]
    if types and not any(found):
        raise InvalidInput(
            f"no layer has a type that fits {pattern!r} of partition_method; there are "
            f"{', '.join(dict.fromkeys(types))}"
        )
    return found


def split_balanced(weights: Sequence[int], num_stages: int) -> list[int]:
    """Return the parts with the least difference between the heaviest and the lightest stage.

    The rule of partition_balanced in deepspeed/runtime/utils.py of 0.19.8. For every end only the
    heaviest and lightest stage of one split of the layers in front are kept, so the result is not
    always the best; of equal splits, that with the shortest last stage. O(S L^2).
    """
    size = len(weights)
    if size <= num_stages:
        return _split_evenly(size, num_stages)
    reached = numpy.array([0, *accumulate(weights)], dtype=float)
    heaviest, lightest = numpy.full(size + 1, numpy.inf), numpy.full(size + 1, numpy.inf)
    heaviest[0] = 0.0
    starts: list[list[int]] = []
    for _ in range(num_stages):
        before, starts_here = (heaviest.copy(), lightest.copy()), [0]
        heaviest[0] = numpy.inf  # only before the first stage are there no layers
        for end in range(1, size + 1):
            last = reached[end] - reached[:end]
            high, low = numpy.maximum(before[0][:end], last), numpy.minimum(before[1][:end], last)
            start = end - 1 - int(numpy.argmin((high - low)[::-1]))
            heaviest[end], lightest[end] = high[start], low[start]
            starts_here.append(start)
        starts.append(starts_here)
    parts = [size]
    for starts_here in reversed(starts):
        parts.append(starts_here[parts[-1]])
    return parts[::-1]


def _split_evenly(num_layers: int, num_stages: int) -> list[int]:
    return [*accumulate(split_evenly(num_layers, num_stages), initial=0)]
