"""Requests to measure, from options and from files."""

import json

import pytest

from stagewright.cli.options.measure import (
    build_family_request,
    override_options,
    parse_tensor,
    read_request,
)
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import Sample, SampleTensor
from stagewright.core.models.families import GPT2Config, GPT2Spec
from stagewright.core.requests.requests import MeasureRequest, ProfilingOptions


@pytest.mark.parametrize(
    ("text", "tensor"),
    [
        ("8x64", SampleTensor(shape=(8, 64))),
        ("4", SampleTensor(shape=(4,))),
        ("2x3:bfloat16:zeros", SampleTensor(shape=(2, 3), dtype="bfloat16", fill="zeros")),
        (
            "1x128:int64:randint:5:50257",
            SampleTensor(shape=(1, 128), dtype="int64", fill="randint", low=5, high=50257),
        ),
    ],
)
def test_tensor(text, tensor):
    assert parse_tensor(text) == tensor


@pytest.mark.parametrize(
    "text", ["", "x", "8x", "8x-1", "8:float33", "8:int64", "8:int64:randint:5:5", "1:2:3:4:5:6"]
)
def test_tensor_that_cannot_be_read(text):
    with pytest.raises(InvalidInput):
        parse_tensor(text)


def test_family():
    request = build_family_request(
        "gpt2", '{"n_layer": 4}', ["input_ids=1x8:int64:randint:0:9"], "1x8:int64:zeros"
    )
    ids = SampleTensor(shape=(1, 8), dtype="int64", fill="randint", high=9)
    target = SampleTensor(shape=(1, 8), dtype="int64", fill="zeros")
    assert request == MeasureRequest(
        model=GPT2Spec(family="gpt2", config=GPT2Config(n_layer=4)),
        sample=Sample(inputs={"input_ids": ids}, target=target),
    )


@pytest.mark.parametrize(
    ("family", "config", "inputs", "said"),
    [
        ('x", "y": "', "{}", ["x=1"], "family"),
        ("alexnet", "{}", ["x=1"], "'mlp', 'resnet', 'unet', 'gpt2'"),
        ("mlp", "{", ["x=1"], "--config is not JSON"),
        ("mlp", '{"depth": 3}', ["x=1"], "/mlp/config/depth"),
        ("mlp", "{}", [], "--input"),
        ("mlp", "{}", ["8x64"], "NAME="),
    ],
)
def test_family_that_cannot_be_read(family, config, inputs, said):
    with pytest.raises(InvalidInput, match=said):
        build_family_request(family, config, inputs, None)


def test_file(tmp_path):
    request = build_family_request("mlp", "{}", ["input=8x64"], None)
    path = tmp_path / "request.json"
    path.write_text(request.model_dump_json())
    assert read_request(path) == request
    path.write_text(json.dumps({"model": {"family": "mlp"}}))
    with pytest.raises(InvalidInput, match="give a model and its sample, or a graph"):
        read_request(path)


def test_only_options_that_were_given_replace():
    base = ProfilingOptions(device="cuda", budget_s=3)
    assert override_options(base, device=None, num_threads=2) == ProfilingOptions(
        device="cuda", budget_s=3, num_threads=2
    )
    with pytest.raises(InvalidInput, match="/device"):
        override_options(base, device="tpu")
