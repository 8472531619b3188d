"""Layers carry their author's names, in execution order, with what flows between them."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import capture, trace
from tests.torch_models import make_case


def test_residual_blocks_are_layers():
    case = make_case("resnet")
    names = [layer.name for layer in capture(case.model, case.sample).layers]
    blocks = [f"layer{g + 1}.{i}" for g, count in enumerate((2, 2, 2, 2)) for i in range(count)]
    assert names == ["conv1", "bn1", "relu", "maxpool", *blocks, "avgpool", "fc"]


def test_transformer_blocks_are_layers():
    case = make_case("gpt2")
    graph = capture(case.model, case.sample)
    names = [layer.name for layer in graph.layers]
    blocks = [f"transformer.h.{index}" for index in range(3)]
    assert names == [
        "transformer.wte", "transformer.wpe", "transformer.drop", *blocks,
        "transformer.ln_f", "lm_head",
    ]  # fmt: skip
    tied = next(p for p in graph.parameters if "lm_head.weight" in p.names)
    assert "transformer.wte.weight" in tied.names
    assert tied.layers == (0, len(names) - 1)


def test_children_of_a_sequential_are_layers_whatever_they_hold():
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(3, 4), block, nn.Linear(4, 2))
    graph = capture(model, torch.randn(2, 3))
    assert graph.mode == "sequential"
    assert [layer.name for layer in graph.layers] == ["0", "1", "2"]
    assert graph.layers[1].parameter_bytes == 4 * (16 + 4)


def test_a_module_called_again_is_a_run_of_its_own():
    case = make_case("unet")
    names = [layer.name for layer in capture(case.model, case.sample).layers]
    assert names[:6] == ["stem", "pool", "downs.0", "pool@1", "downs.1", "ups.0"]


def test_long_skips_are_live_at_every_boundary_they_cross():
    case = make_case("unet")
    graph = capture(case.model, case.sample)
    position = [layer.name for layer in graph.layers].index("downs.1")
    boundary = graph.boundaries[position]
    shapes = {tensor.shape for tensor in boundary.tensors}
    assert shapes == {(2, 4, 16, 16), (2, 8, 8, 8), (2, 16, 4, 4)}
    assert boundary.forward_bytes == 4 * sum(torch.Size(shape).numel() for shape in shapes)
    assert boundary.backward_bytes == boundary.forward_bytes


def test_edges_run_forwards_and_integers_need_no_gradient():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.mix = nn.Linear(4, 4)
            self.again = nn.Embedding(10, 4)

        def forward(self, ids):
            return self.mix(self.embed(ids)) + self.again(ids)

    graph = capture(Late(), torch.randint(0, 10, (2, 3)))
    assert all(edge.source < edge.target for edge in graph.edges)
    first = graph.boundaries[0]
    by_type = {tensor.dtype: tensor.requires_grad for tensor in first.tensors}
    assert by_type == {"int64": False, "float32": True}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_gradients_flow_through_casts_to_small_floats(dtype):
    """Stages behind a cast to float8 sent no gradients back."""

    class Narrow(nn.Module):
        def forward(self, x):
            return x.to(dtype)

    class Wide(nn.Module):
        def forward(self, x):
            return x.float()

    graph = capture(nn.Sequential(nn.Linear(4, 4), Narrow(), Wide()), torch.randn(2, 4))
    sent = [tensor for boundary in graph.boundaries for tensor in boundary.tensors]
    assert [tensor.requires_grad for tensor in sent] == [True, True]


@pytest.mark.parametrize("mode", ["export", "trace"])
def test_both_tracers_agree(mode):
    case = make_case("resnet")
    graph = capture(case.model, case.sample, mode=mode)
    other = capture(case.model, case.sample)
    assert graph.mode == mode
    assert [layer.name for layer in graph.layers] == [layer.name for layer in other.layers]
    assert [b.forward_bytes for b in graph.boundaries] == [
        b.forward_bytes for b in other.boundaries
    ]


def test_keyword_inputs_keep_their_order_and_names():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(5, 3)

        def forward(self, left, right, scale=None):
            return self.left(left) - self.right(right)

    sample = {"right": torch.randn(2, 5), "left": torch.randn(2, 3)}
    for mode in ("export", "trace"):
        captured = trace(Two(), sample, mode=mode)
        assert captured.structure.keyword == ("right", "left")
        assert [spec.shape for spec in captured.graph.inputs] == [(2, 5), (2, 3)]


class _ShiftsTargets(nn.Module):
    """Writes to a tensor made from its inputs alone between the blocks, as seq2seq models do."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Embedding(8, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x, targets):
        memory = self.encoder(x)
        shifted = targets.new_zeros(targets.shape)
        shifted[..., 1:] = targets[..., :-1].clone()
        before = shifted * 2
        shifted[..., 0] = 3
        shifted.masked_fill_(shifted == 5, 0)
        return self.head(memory + self.decoder(shifted).mean(1)) + before.sum()


def test_writes_to_what_only_depends_on_inputs_join_the_first_reader():
    sample = {"x": torch.randn(2, 4), "targets": torch.randint(1, 8, (2, 6))}
    graph = capture(_ShiftsTargets(), sample)
    assert [layer.name for layer in graph.layers] == ["encoder", "decoder", "head"]
    assert [boundary.reason for boundary in graph.boundaries] == ["", ""]
