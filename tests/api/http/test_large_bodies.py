"""Bodies of megabytes are read beside the event loop, a little at a time, to the same end."""

from __future__ import annotations

import copy
import json
import threading

import pytest
from pydantic import TypeAdapter, ValidationError

from stagewright.api.http import large_bodies
from stagewright.api.http.large_bodies import LARGE_BYTES, SLICE, in_slices
from stagewright.api.http.problems import Problem
from stagewright.api.http.strict_requests import StrictRequest
from stagewright.api.planning.requests import PlanRequest
from stagewright.core.plan.plan import MAX_CONSTRAINTS, Pin, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile

NUM_LAYERS = 1000


@pytest.fixture
def large(profile):
    """A profile with so many layers that it is read beside the loop."""
    layer, boundary = profile["layers"][1], profile["boundaries"][0]
    profile["layers"] = [
        {**copy.deepcopy(layer), "layer": {**layer["layer"], "name": f"blocks.{number}"}}
        for number in range(NUM_LAYERS)
    ]
    profile["boundaries"] = [{**boundary, "after": number} for number in range(NUM_LAYERS - 1)]
    assert len(json.dumps(profile)) > LARGE_BYTES
    return profile


def test_what_is_read_in_slices_is_what_is_read_at_once(large):
    request = {"profile": large, "cluster": "2xcpu"}
    before = copy.deepcopy(request)
    half_read = in_slices(PlanRequest, request)
    assert {type(layer) for layer in half_read["profile"]["layers"]} == {LayerProfile}
    assert request == before
    assert TypeAdapter(PlanRequest).validate_python(half_read) == PlanRequest.model_validate(before)


def test_no_call_has_more_than_a_slice_and_the_loop_has_none(client, large, monkeypatch):
    """Cause: validating a valid profile of 10,000 layers stopped all other requests for 3 s."""
    calls = []
    reader = large_bodies._reader

    def watched(kind):
        def validate(items):
            calls.append((len(items), threading.current_thread().name))
            return reader(kind)(items)

        return validate

    loops = []
    client.portal.call(lambda: loops.append(threading.current_thread().name))
    monkeypatch.setattr(large_bodies, "_reader", watched)
    answer = client.post("/v1/profiles", json=large)
    assert answer.status_code == 201, answer.text
    assert answer.json()["id"] == Profile.model_validate(large).content_id()
    assert sum(count for count, _ in calls) == 2 * NUM_LAYERS - 1
    assert max(count for count, _ in calls) == SLICE
    assert loops[0] not in {name for _, name in calls}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("layers", 700, "layer", "name"), 17, "valid string"),
        (("layers", 700, "output_bytes"), True, "wants a number"),
        (("layers", 700, "layr"), {}, "did you mean 'layer'?"),
        (("boundaries", 998, "after"), -1, "greater than or equal"),
    ],
)
def test_what_does_not_fit_is_named_as_in_a_small_one(client, large, path, value, words):
    *parents, last = path
    here = large
    for part in parents:
        here = here[part]
    here[last] = value
    answer = client.post("/v1/profiles", json=large)
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert words in error["detail"]
    assert error["pointer"] == "/" + "/".join(map(str, path))


class Counted(TypeAdapter):
    """Keeps what it is to validate."""

    def __init__(self, kind):
        super().__init__(kind)
        self.given = []

    def validate_python(self, value):
        self.given.append(value)
        return super().validate_python(value)


def refused(body):
    """The pointer of what is wrong in a body, and what was validated in one call."""
    request = StrictRequest({"type": "http", "headers": []})
    request.adapter = Counted(Profile)
    with pytest.raises(Problem) as caught:
        request._large(json.dumps(body).encode())
    (error,) = caught.value.document.errors
    return error.pointer, request.adapter.given


def test_what_does_not_fit_is_not_read_again_in_one_call(large):
    """Cause: one wrong layer of 33,185 stopped all other requests for 8.9 s."""
    large["layers"][700]["output_bytes"] = "many"
    assert refused(large) == ("/layers/700/output_bytes", [])
    large["layers"][700]["output_bytes"] = 1
    del large["boundaries"]
    pointer, (given,) = refused(large)
    assert pointer == "/boundaries"
    assert {type(layer) for layer in given["layers"]} == {LayerProfile}


def test_what_is_no_json_is_said(client):
    answer = client.post(
        "/v1/profiles",
        content=b"[" + b"1," * LARGE_BYTES,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["title"] == "Malformed JSON"


def test_a_list_beyond_its_length_is_refused_without_its_items():
    """Cause: 300,000 pins were validated one by one, for 3 s, before they were counted."""
    pins = [{"layer": "0", "stage": 0}] * (MAX_CONSTRAINTS + 1)
    assert in_slices(PlanOptions, {"pins": pins})["pins"] is pins
    read = in_slices(PlanOptions, {"pins": pins[1:]})["pins"]
    assert {type(pin) for pin in read} == {Pin}
    with pytest.raises(ValidationError, match="at most 10000 items"):
        PlanOptions.model_validate({"pins": pins})
