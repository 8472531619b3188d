"""FLOPs and bytes of known layers against formulas written by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.estimate_pipedream import recorded
from stagewright.core.models.families import (
    GPT2Config,
    GPT2Spec,
    LlamaConfig,
    LlamaSpec,
    MixtralConfig,
    MixtralSpec,
)
from stagewright.core.requests.default_samples import default_sample
from stagewright.profiler.estimates.estimate import spec_work, target

META = torch.device("meta")


def flops(costs) -> int:
    return sum(cost.flops for cost in costs)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=True)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def test_linear():
    """2 B I O forward; as much again for each of the two gradients."""
    forward, backward, output = recorded(nn.Linear(30, 50, device=META), [leaf(7, 30)], "cuda")
    assert output.shape == (7, 50)
    assert flops(forward) == 2 * 7 * 30 * 50
    assert flops(backward) == 2 * flops(forward)
    assert [cost.bytes for cost in forward] == [4 * (7 * 30 + 30 * 50 + 50 + 7 * 50)]


def test_convolution_with_groups():
    """2 B Cout H W (Cin / groups) k k."""
    layer = nn.Conv2d(8, 12, 5, stride=2, padding=2, groups=4, bias=False, device=META)
    forward, backward, output = recorded(layer, [leaf(3, 8, 20, 20)], "cuda")
    assert output.shape == (3, 12, 10, 10)
    assert flops(forward) == 2 * 3 * 12 * 10 * 10 * (8 // 4) * 25
    assert flops(backward) == 2 * flops(forward)


def test_winograd_is_for_three_by_three_alone():
    plain = [nn.Conv2d(4, 4, 3, device=META), nn.Conv2d(4, 4, 3, stride=2, device=META)]
    with_it = [flops(recorded(m, [leaf(1, 4, 9, 9)], "cuda", winograd=True)[0]) for m in plain]
    without = [flops(recorded(m, [leaf(1, 4, 9, 9)], "cuda")[0]) for m in plain]
    assert with_it == [int(without[0] / 2.25), without[1]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cuda", torch.bfloat16), ("cuda", torch.float32), ("cpu", torch.float32)],
)
def test_attention_is_the_fused_kernel(backend, dtype, causal):
    """Two products of T x T x d a head forward, five backward, half of them if causal."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    inputs = [leaf(2, 4, 64, 16, dtype=dtype) for _ in range(3)]
    forward, backward, _ = recorded(Function(attend), inputs, backend)
    product = 2 * 2 * 4 * 64 * 64 * 16 // (2 if causal else 1)
    assert flops(forward) == 2 * product
    assert flops(backward) == 5 * product
    assert {cost.kind for cost in forward if cost.flops} == {"attention"}


def test_grouped_products_meet_one_matrix_a_row():
    experts = leaf(4, 24, 40, dtype=torch.bfloat16)
    offsets = torch.empty(4, dtype=torch.int32, device=META)
    forward, backward, _ = recorded(
        Function(lambda rows, weights: torch._grouped_mm(rows, weights, offsets)),
        [leaf(96, 24, dtype=torch.bfloat16), experts],
        "cuda",
    )
    assert flops(forward) == 2 * 96 * 24 * 40
    assert flops(backward) == 2 * flops(forward)


def test_bytes_of_an_addition_and_of_what_is_free():
    forward, _, _ = recorded(Function(torch.add), [leaf(10, 20), leaf(10, 20)], "cuda")
    assert [(cost.kind, cost.bytes) for cost in forward] == [("elementwise", 3 * 800)]
    viewed, _, _ = recorded(Function(lambda x: x.view(20, 10).t()), [leaf(10, 20)], "cuda")
    assert viewed == ()
    spread, _, _ = recorded(Function(lambda x: x.expand(50, 20) * 2), [leaf(1, 20)], "cuda")
    assert [cost.bytes for cost in spread] == [4 * (20 + 50 * 20)]


def test_an_embedding_reads_its_rows_not_its_table():
    table = nn.Embedding(1000, 16, device=META)
    tokens = torch.empty(5, dtype=torch.int64, device=META)
    forward, backward, _ = recorded(table, [tokens], "cuda")
    assert [(cost.kind, cost.bytes) for cost in forward] == [("embedding", 2 * 5 * 16 * 4 + 5 * 8)]
    [scattered] = [cost for cost in backward if cost.kind == "embedding"]
    assert scattered.bytes >= 1000 * 16 * 4  # its gradient is dense


def test_dropout_is_one_kernel_on_a_gpu_and_three_on_a_cpu():
    on_gpu, _, _ = recorded(nn.Dropout(0.1), [leaf(4, 8)], "cuda")
    on_cpu, _, _ = recorded(nn.Dropout(0.1), [leaf(4, 8)], "cpu")
    assert len(on_gpu) == 1 < len(on_cpu)


TOKENS = 48


def test_decoder_as_a_whole():
    """Every weight of a product meets every token twice two times more often than forward."""
    pytest.importorskip("transformers")
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    spec = LlamaSpec(family="llama", config=config)
    work = spec_work(spec, default_sample(spec, 2, TOKENS), target("A100", "bfloat16"))
    attention = 3 * (2 * 32 * 32 + 2 * 32 * 16)
    weights = attention + 3 * 3 * 32 * 80 + 160 * 32
    scores = 3 * 7 * (2 * 2 * 4 * TOKENS * TOKENS * 8) // 2
    found = sum(flops((*part.forward, *part.backward)) for part in work.parts)
    assert found == 6 * 2 * TOKENS * weights + scores


def test_experts_count_those_a_token_meets():
    pytest.importorskip("transformers")
    config = MixtralConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    spec = MixtralSpec(family="mixtral", config=config)
    work = spec_work(spec, default_sample(spec, 2, TOKENS), target("A100", "bfloat16"))
    weights = 4 * 32 * 32 + 8 * 32 + 2 * 3 * 32 * 80 + 160 * 32
    scores = 7 * (2 * 2 * 4 * TOKENS * TOKENS * 8) // 2
    found = sum(flops((*part.forward, *part.backward)) for part in work.parts)
    assert found == 6 * 2 * TOKENS * weights + scores


def test_gradients_of_inputs_alone_are_half_of_a_blocks_backward():
    pytest.importorskip("transformers")
    config = GPT2Config(vocab_size=160, n_embd=32, n_layer=2, n_head=4, dropout=0.0)
    spec = GPT2Spec(family="gpt2", config=config)
    work = spec_work(spec, default_sample(spec, 2, TOKENS), target("A100", "bfloat16"))
    names = [layer.name for layer in work.graph.layers]
    block = work.layers[names.index("transformer.h.1")]
    products = [
        sum(cost.flops for cost in costs if cost.kind == "matmul")
        for costs in (block.forward, block.backward_input, block.backward)
    ]
    assert products == [products[0], products[0], 2 * products[0]]
    assert products[0] == 2 * 2 * TOKENS * 12 * 32 * 32
