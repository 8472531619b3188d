"""No word of pydantic reaches a user: each kind of violation says what was given and allowed."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from stagewright.core.document import Record, to_invalid_input
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.requests.requests import ProfilingOptions


class Thing(Record):
    size: Annotated[int, Field(ge=1, le=9)] = 1
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    colour: Literal["red", "green", "blue"] = "red"
    depth: Literal[18, 34] = 18
    year: Literal["18", "34"] = "18"
    names: tuple[str, ...] = ()


class Needy(Record):
    size: int


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (Thing, {"size": 0}, "/size: 0 is too small: at least 1"),
        (Thing, {"size": 10}, "/size: 10 is too large: at most 9"),
        (Thing, {"share": 0}, "/share: 0 is too small: more than 0"),
        (Thing, {"share": 1}, "/share: 1 is too large: less than 1"),
        (Thing, {"size": "many"}, "/size: 'many' is not a whole number"),
        (Thing, {"share": "x"}, "/share: 'x' is not a number"),
        (Thing, {"names": 3}, "/names: 3 is not a list"),
        (Thing, {"names": [3]}, "/names/0: 3 is not a text"),
        (Thing, {"colour": "gren"}, "'gren' is none of 'red', 'green' or 'blue'; did you mean"),
        (Thing, {"depth": "18"}, "/depth: '18' is none of 18 or 34; write it without quotes"),
        (Thing, {"year": 34}, "/year: 34 is none of '18' or '34'; write it in quotes"),
        (PlanOptions, {"tensor": 0}, "/tensor: 0 is too small: at least 1, or 'auto'"),
        (PlanOptions, {"tensor": "x"}, "/tensor: 'x' is not a whole number, or 'auto'"),
        (PlanOptions, {"strategies": ["zero3"]}, "did you mean 'fully_shard'?"),
        (PlanOptions, {"strategies": ["fsdp"]}, "did you mean 'fully_shard'?"),
        (Thing, {"colour": "fsdp"}, "'fsdp' is none of 'red', 'green' or 'blue'"),
        (Thing, {"sise": 1}, "/sise: is not known here"),
        (Needy, {}, "/size: is missing"),
        (ProfilingOptions, {"device": "gpu"}, "/device: 'gpu' is none of cpu, cuda or cuda:N"),
    ],
)
def test_a_violation_is_said_plainly(kind, given, words):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(given)
    found = to_invalid_input(caught.value, "thing")
    assert isinstance(found, InvalidInput)
    assert words in str(found)
    assert "Input should" not in str(found)
    assert "constrained" not in str(found)
    assert "literal" not in str(found)
    assert found.field == words.partition(":")[0] or not words.startswith("/")
