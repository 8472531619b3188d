"""What a captured graph carries to be run again, and what it never does."""

import json
import re

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.serialize.leaf_modules import build_leaf, describe_leaf
from stagewright.capture.serialize.operations import NotSerializable
from stagewright.core.graph.allowed_ops import MODULES
from stagewright.core.graph.graph import Graph, LeafModule
from tests.portable_models import MODELS, awkward, bert, gpt2, inception, lstm


def graph_of(build):
    torch.manual_seed(0)
    model, sample = build()
    return trace(model.train(), sample, check=False).graph


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_common_models_can_be_rebuilt_and_fit_in_a_request(build):
    graph = graph_of(build)
    assert graph.rebuildable, graph.not_rebuildable
    text = graph.to_json()
    assert Graph.from_json(text) == graph
    assert 2_000 < len(text) < 200_000


def test_no_weight_and_no_statistic_is_written():
    """Each parameter and running statistic is set to a number that must not be found."""
    secret = 7.654321
    for build in (gpt2, inception, lstm, awkward):
        model, sample = build()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_floating_point() and name not in ("scale", "seen"):
                    tensor.fill_(secret)
        text = trace(model.train(), sample, check=False).graph.to_json()
        assert "7.65" not in text
    assert secret == pytest.approx(7.654321)


def fills_of(graph):
    return {entry.names[0]: entry.fill for entry in graph.state if entry.fill is not None}


def test_buffers_are_written_by_their_pattern():
    model = nn.Sequential(nn.Linear(4, 4))
    buffers = {
        "positions": torch.arange(1000).expand(1, 1000),
        "every_second": torch.arange(3, 2003, 2),
        "mask": torch.ones(1, 1, 300, 300, dtype=torch.bool).tril(),
        "ones": torch.ones(5000),
        "table": torch.tensor([3, 1, 2]),
        "large_table": torch.arange(90_000).reshape(300, 300).t().contiguous(),
        "frequencies": torch.tensor([0.5, 0.25]),
        "learned": torch.randn(1000) * 3,
        "quantised": torch.arange(-100, 100, dtype=torch.int8),
    }
    for name, value in buffers.items():
        model.register_buffer(name, value.clone())
    fills = fills_of(trace(model, torch.randn(2, 4), check=False).graph)
    assert {name: fill.kind for name, fill in fills.items()} == {
        "positions": "range", "every_second": "range", "mask": "causal", "ones": "constant",
        "table": "values", "large_table": "integers", "frequencies": "values",
        "learned": "normal", "quantised": "integers",
    }  # fmt: skip
    assert (fills["every_second"].start, fills["every_second"].step) == (3, 2)
    assert (fills["large_table"].low, fills["large_table"].high) == (0, 90_000)
    assert fills["learned"].std == pytest.approx(3, rel=0.2)


def test_integer_inputs_keep_the_range_of_the_sample():
    sample = graph_of(bert).sample
    assert sample.inputs["attention_mask"].low == 0
    assert sample.inputs["attention_mask"].high == 2
    assert 32 < sample.inputs["input_ids"].high <= 64
    assert sample.inputs["labels"].fill == "randint"


class Own(nn.Module):
    """Code that no graph holds."""

    def forward(self, x):
        return x if x.sum() > 1e9 else x * 2


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounds(nn.Module):
    def forward(self, x):
        return Straight.apply(x)


class Hooked(nn.Linear):
    pass


@pytest.mark.parametrize(("module", "reason"), [(Own(), "Own"), (Hooked(4, 4), "Hooked")])
def test_what_only_its_author_s_code_can_do_is_named_with_its_layer(module, reason):
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4))
    graph = trace(model, torch.randn(2, 4), check=False).graph
    assert not graph.rebuildable
    (found,) = graph.not_rebuildable
    assert found.layer == "1"
    assert reason in found.reason
    assert found.operation == graph.operations[1].name


def test_a_graph_that_cannot_be_rebuilt_is_never_half_written():
    model = nn.Sequential(nn.Linear(4, 4), Own())
    graph = trace(model, torch.randn(2, 4), check=False).graph
    document = json.loads(graph.to_json())
    assert not any(document[name] for name in ("modules", "state", "regions", "returns"))
    assert all("arguments" not in entry for entry in document["operations"])
    assert graph.sample is None
    assert Graph.from_json(graph.to_json()) == graph


def test_nothing_in_a_document_looks_like_code():
    """Strings are names, operators, modes and types; no parentheses and no quotes."""
    for build in (gpt2, awkward):
        document = json.loads(graph_of(build).to_json())
        document.pop("input_structure")
        document.pop("notes")
        for text in strings(document):
            assert re.fullmatch(r"[A-Za-z0-9_.@/+\- ]*", text), text


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


LEAVES = [
    nn.Linear(3, 4, bias=False), nn.Conv1d(4, 8, 3, padding="same", groups=2),
    nn.Conv2d(3, 4, (3, 5), stride=2, padding_mode="reflect", padding=1),
    nn.ConvTranspose2d(4, 2, 2, stride=2, output_padding=1), nn.BatchNorm2d(4, momentum=None),
    nn.BatchNorm1d(4, affine=False), nn.LayerNorm([3, 4], eps=1e-6, bias=False),
    nn.GroupNorm(2, 4), nn.RMSNorm(8), nn.InstanceNorm2d(3, affine=True), nn.Dropout(0.3),
    nn.Embedding(10, 4, padding_idx=2), nn.GELU(approximate="tanh"), nn.LeakyReLU(0.3),
    nn.Hardtanh(-2, 2), nn.PReLU(3), nn.Softmax(dim=-1), nn.Threshold(0.1, 20.0), nn.ELU(2.0),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.AvgPool2d(2, count_include_pad=False),
    nn.AdaptiveAvgPool2d((None, 2)), nn.Flatten(2), nn.Upsample(scale_factor=2.0, mode="nearest"),
    nn.PixelShuffle(2), nn.ZeroPad2d((1, 2, 3, 4)), nn.ConstantPad1d(2, 3.5), nn.Identity(),
    nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3), nn.GRU(4, 6, batch_first=True),
    nn.RNN(4, 6, nonlinearity="relu"), nn.LocalResponseNorm(3), nn.Softplus(2, 10.0),
    nn.Unflatten(1, (2, 3)), nn.CELU(0.5), nn.GLU(1), nn.LPPool2d(2, 3), nn.Softshrink(0.1),
]  # fmt: skip


@pytest.mark.parametrize("module", LEAVES, ids=repr)
def test_leaf_modules_become_settings_and_back(module):
    leaf = LeafModule.model_validate_json(describe_leaf("net", module).model_dump_json())
    again = build_leaf(leaf)
    assert type(again) is type(module)
    assert set(leaf.settings) <= MODULES[leaf.type]
    plain = (bool, int, float, str, tuple, type(None))
    kept = {name: value for name, value in vars(module).items() if isinstance(value, plain)}
    assert {name: vars(again)[name] for name in kept} == kept


def test_a_leaf_that_was_changed_is_refused():
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x
    grown = nn.Linear(2, 2)
    grown.weight = nn.Parameter(torch.zeros(3, 2))
    for module in (hooked, patched, grown):
        with pytest.raises(NotSerializable):
            describe_leaf("net", module)
