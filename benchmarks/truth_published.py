"""The eleven published throughputs, and Megatron-LM's runs of a 7B model, as rows.

None of them is fitted to. What a source leaves open is assumed here, and said beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from truth_models import META, Costs, run_both_ways
from truth_rows import Row, read_csv

from stagewright.core.cluster.accelerators import Precision
from stagewright.core.models.families import LlamaConfig, LlamaSpec, ResNetSpec
from stagewright.core.requests.default_samples import default_sample
from stagewright.profiler.estimates.estimate import DTYPES, spec_work, target
from stagewright.profiler.estimates.flops import Cost
from stagewright.profiler.estimates.layer_costs import CostRecorder
from stagewright.profiler.estimates.meta_device import DeviceKernels
from stagewright.profiler.models.families import build_model

Launch = Literal["eager", "compiled", "graph"]

RESNET = (
    ("A100-80GB", "float16", 256, 103.6),
    ("A100-80GB", "tf32", 256, 272.9),
    ("V100", "float32", 128, 348.8),
    ("V100", "float16", 256, 213.3),
)
"""Device, precision, batch, milliseconds a step: NVIDIA's DeepLearningExamples, PyTorch 21.03."""

BERT = (
    ("A100-80GB", "float16", 128, 256, 441.4),
    ("A100-80GB", "tf32", 128, 128, 403.8),
    ("A100-80GB", "float16", 512, 32, 152.4),
    ("V100", "float32", 128, 32, 640.0),
    ("V100", "float16", 128, 64, 285.7),
)
"""With the sequence length before the batch: the same, BERT 21.11."""

LOOKED_UP = "looked-up throughputs"
"""Set of the figures below, read in the sources and not remembered."""

EARLIER_BERT = (
    ("A100-40GB", "tf32", 128, 54, 234),
    ("A100-40GB", "float16", 128, 64, 415),
    ("A100-40GB", "tf32", 512, 8, 41),
    ("A100-40GB", "float16", 512, 16, 78),
    ("V100", "float32", 128, 8, 40),
    ("V100", "float16", 128, 16, 164),
    ("V100", "float32", 512, 2, 9),
    ("V100", "float16", 512, 4, 34),
)
"""With sequences a second: DeepLearningExamples' README of BERT for PyTorch 20.06, one GPU, batches
divided by the steps of accumulation (as kept at nlqq/NVIDIA-DeepLearningExamples, 68c8ab49)."""

RESNET_FORWARD = (
    ("V100", "float32", {64: 1200, 128: 1229, 256: 1261}),
    ("V100", "float16", {64: 2984, 128: 3249, 256: 3382}),
    ("T4", "float32", {64: 428, 128: 426, 256: 415}),
    ("T4", "float16", {64: 1165, 128: 1190, 256: 1198}),
)
"""Images a second of inference by batch: DeepLearningExamples' README of ResNet-50 v1.5 for PyTorch
21.03, at 291f0d02."""

MASKED = {128: 20, 512: 80}
"""Positions of a sequence that its recipe predicts; only they go through the vocabulary's head."""


def published_rows() -> Iterator[Row]:
    for device, precision, batch, milliseconds in RESNET:
        costs = _resnet(device, precision, batch, training=True)
        yield _row(f"ResNet-50 {precision} b{batch}", device, milliseconds, costs, precision)
    for device, precision, length, batch, milliseconds in BERT:
        costs = _bert(precision, length, batch)
        name = f"BERT-large s{length} {precision} b{batch}"
        yield _row(name, device, milliseconds, costs, precision)
    yield _row("GPT-2 124M s1024 b12", "A100-40GB", 250.0, _nano_gpt(12, 1024), "bfloat16")
    yield _row("Llama-3 8B s8192 b1, FSDP", "H100", 1422.0, _llama(8192), "bfloat16")
    for device, precision, length, batch, per_second in EARLIER_BERT:
        name = f"BERT-large s{length} {precision} b{batch}"
        costs = _bert(precision, length, batch)
        yield _row(name, device, 1e3 * batch / per_second, costs, precision, LOOKED_UP)
    for device, precision, rates in RESNET_FORWARD:
        for batch, per_second in rates.items():
            costs = _resnet(device, precision, batch, training=False)
            name = f"ResNet-50 forward {precision} b{batch}"
            yield _row(name, device, 1e3 * batch / per_second, costs, precision, LOOKED_UP)


def _row(
    name: str,
    device: str,
    milliseconds: float,
    costs: tuple[Costs, ...],
    precision: Any,
    group: str = "published throughputs",
) -> Row:
    return Row(group, device, name, milliseconds / 1e3, costs, precision, "eager")


def _resnet(device: str, precision: Precision, batch: int, *, training: bool) -> tuple[Costs, ...]:
    with META:
        model = build_model(ResNetSpec(family="resnet")).to(DTYPES[precision]).train(training)
        images = torch.empty(batch, 3, 224, 224, dtype=DTYPES[precision])
    recorders = [CostRecorder(target(device, precision).winograd) for _ in range(1 + training)]
    with DeviceKernels("cuda"), torch.set_grad_enabled(training):
        with recorders[0]:
            output = model(images).sum()
        if training:
            with recorders[1]:
                output.backward()
    return tuple(tuple(recorder.costs) for recorder in recorders)


class EagerAttention(nn.Module):
    """A transformer's block before fused attention: scores in memory, dropout on them."""

    def __init__(
        self, width: int, heads: int, *, causal: bool, float_softmax: bool, gelu_parts: int
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.float_softmax = heads, causal, float_softmax
        self.gelu_parts = gelu_parts
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        batch, length, width = values.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(values)).chunk(3, -1)
        )
        scores = query @ key.transpose(-2, -1) * 0.125
        mask = torch.empty(length, length, dtype=torch.bool, device="meta")
        scores = scores.masked_fill(mask, -1.0) if self.causal else scores + scores[:, :1, :1]
        # Autocast leaves the softmax in float32, so that dropout moves float32, too.
        kept = functional.softmax(scores.float() if self.float_softmax else scores, -1)
        kept = torch.native_dropout(kept, 0.1, True)[0].to(value.dtype)
        mixed = (kept @ value).transpose(1, 2).reshape(batch, length, width)
        values = values + torch.native_dropout(self.out(mixed), 0.1, True)[0]
        middle = self.up(self.norm_2(values))
        if self.gelu_parts == 1:
            middle = functional.gelu(middle)
        else:  # the formula with tanh, spelt out
            inner = 0.8 * (middle + 0.04 * torch.pow(middle, 3.0))
            middle = 0.5 * middle * (1.0 + torch.tanh(inner))
        changed: Tensor = values + torch.native_dropout(self.down(middle), 0.1, True)[0]
        return changed


class Head(nn.Module):
    """A head over the vocabulary, and the loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        logits = self.head(self.norm(values)).float()
        goal = torch.zeros(logits.shape[0], dtype=torch.int64, device="meta")
        return functional.cross_entropy(logits, goal)


def _blocks(
    block: nn.Module, head: nn.Module, shape: tuple[int, int, int], predicted: int, depth: int,
    dtype: torch.dtype,
) -> tuple[Costs, ...]:  # fmt: skip
    with META:
        values = torch.empty(*shape, dtype=dtype, requires_grad=True)
        last = torch.empty(predicted, shape[-1], dtype=dtype, requires_grad=True)
    forward, backward = run_both_ways(block.to(dtype), values)
    first, end = run_both_ways(head.to(dtype), last)
    return forward * depth, backward * depth, first + end


def _bert(precision: Precision, length: int, batch: int) -> tuple[Costs, ...]:
    with META:
        block = EagerAttention(1024, 16, causal=False, float_softmax=False, gelu_parts=1)
        head = Head(1024, 30528)
    shape = (batch, length, 1024)
    return _blocks(block, head, shape, batch * MASKED[length], 24, DTYPES[precision])


def _nano_gpt(batch: int, length: int) -> tuple[Costs, ...]:
    with META:
        block = EagerAttention(768, 12, causal=True, float_softmax=True, gelu_parts=8)
        head = Head(768, 50304)
    return _blocks(block, head, (batch, length, 768), batch * length, 12, torch.bfloat16)


def _llama(length: int) -> tuple[Costs, ...]:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=length,
    )  # fmt: skip
    spec = LlamaSpec(family="llama", config=config)
    work = spec_work(spec, default_sample(spec, 1, length), target("H100", "bfloat16"))
    forward = tuple(cost for part in work.parts for cost in part.forward)
    backward = tuple(cost for part in work.parts for cost in part.backward)
    # Selective recomputation saves attention and every second product.
    products = [cost for cost in forward if cost.kind == "matmul"]
    again = tuple(cost for cost in forward if cost.kind not in ("matmul", "attention"))
    return forward, backward, again + tuple(products[1::2]), (_adam(8.03e9 / 8),)


def _adam(parameters: float) -> Cost:
    return Cost("elementwise", 0, int(28 * parameters))


MEGATRON_WIDTH, MEGATRON_FFN, MEGATRON_DEPTH, MEGATRON_VOCABULARY = 4096, 10880, 32, 131072
"""Megatron-LM's own choice of the inner width with SwiGLU: 2/3 of 4 widths, in whole 64s."""


class MegatronBlock(nn.Module):
    """One tensor-parallel share of a block: fused attention, SwiGLU."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        width, inner = MEGATRON_WIDTH, MEGATRON_FFN // ways
        self.heads = 32 // ways
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width // ways, bias=False)
        self.out = nn.Linear(width // ways, width, bias=False)
        self.up, self.down = (
            nn.Linear(width, 2 * inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )

    def forward(self, values: Tensor) -> Tensor:
        batch, length, _ = values.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(values)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, middle = self.up(self.norm_2(values)).chunk(2, -1)
        changed: Tensor = values + self.down(functional.silu(gate) * middle)
        return changed


def megatron_rows(folder: Path) -> Iterator[Row]:
    """Return the 7B runs on A100s: 4 stages of 8 chunks, or 4 ways of tensor parallelism.

    The step is the closed form of the interleaved schedule; all-reduces of tensor parallelism are
    priced by the link table, those of replicas taken as hidden.
    """
    entries = read_csv(folder / "megatron" / "golden.csv")
    for entry in (row for row in entries if "gpt3_7b" in row["case"]):
        ways = int(entry["tensor-model-parallel-size"])
        stages = int(entry["pipeline-model-parallel-size"])
        batch, length = int(entry["micro-batch-size"]), int(entry["seq-length"])
        replicas = 8 // (ways * stages)
        microbatches = int(entry["global-batch-size"]) // (batch * replicas)
        with META:
            block = MegatronBlock(ways).bfloat16()
            head = Head(MEGATRON_WIDTH, MEGATRON_VOCABULARY // ways).bfloat16()
            shape = (batch, length, MEGATRON_WIDTH)
            values = torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True)
            last = torch.empty(
                batch * length, MEGATRON_WIDTH, dtype=torch.bfloat16, requires_grad=True
            )
        blocks = sum(run_both_ways(block, values), ())
        ends = sum(run_both_ways(head, last), ())
        chunks = int(entry["num-layers-per-virtual-pipeline-stage"] or 0)
        passes = MEGATRON_DEPTH // stages // chunks if chunks else 1
        fill = (stages - 1) / passes
        per_stage = MEGATRON_DEPTH // stages
        message = 2 * batch * length * MEGATRON_WIDTH
        sent = 4 * per_stage * microbatches * message * 2 * (ways - 1) / ways
        # The last stage has the head, and every micro-batch waits for it.
        parts = (blocks * round(per_stage * (microbatches + fill)), ends * microbatches)
        parameters = 7.5e9 / 8
        yield Row(
            "Megatron-LM 7B, bf16", "A100-80GB", f"{entry['case'].partition('/')[2]}",
            float(entry["iteration_s_median"]), (*parts, (_adam(parameters),)), "bfloat16",
            "compiled", sent=(sent, ways),
        )  # fmt: skip
