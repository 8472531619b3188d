"""Whole models of the public measurements, run on the meta device for their operations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from truth_rows import Row, find_device, read_csv, record

from stagewright.core.cluster.accelerators import get_accelerator
from stagewright.profiler.estimates.flops import Cost

Costs = tuple[Cost, ...]
META = torch.device("meta")

CLASSES = {"bert_large": "BertForPreTraining", "opt_13": "OPTForCausalLM"}
"""Classes of `transformers`; the others are GPT-2 with a language-model head."""

LEFT_OUT = ("switchxl4", "switch4")
"""Their experts take as many tokens as the router gives them, which a meta tensor cannot say."""


def neusight_rows(folder: Path) -> Iterator[Row]:
    """Return the whole models of NeuSight's table: float32, eager attention."""
    for entry in read_csv(folder / "neusight" / "whole_models.csv"):
        model, mode = entry["model"], entry["mode"]
        if model in LEFT_OUT:
            continue
        device = find_device(entry["device"])
        shape = int(entry["batch"]), int(entry["sequence"])
        backend = get_accelerator(device).backend
        forward, backward = hugging_face_costs(
            folder / "neusight" / "configs", model, *shape, mode == "train", backend
        )
        name = f"{model} {mode} {shape[1]} x {shape[0]}"
        launch: Literal["compiled", "eager"] = "compiled" if entry["variant"] else "eager"
        name += " compiled" if entry["variant"] else ""
        if mode == "train":
            total_s = float(entry["e2e_ms"]) / 1e3
            yield Row(
                "training, fp32", device, name, total_s, (forward, backward), "float32", launch
            )
            name += " (forward)"
        yield Row(
            "forward, fp32", device, name, float(entry["forward_ms"]) / 1e3, (forward,), "float32",
            launch,
        )  # fmt: skip


@cache
def hugging_face_costs(
    folder: Path, name: str, batch: int, length: int, training: bool, backend: str
) -> tuple[Costs, Costs]:
    """Return the operations of a forward and, if training, of its backward."""
    import transformers

    given = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    kind = given.get("model_type")
    config = transformers.CONFIG_MAPPING[kind](
        **{key: value for key, value in given.items() if key not in ("architectures", "model_type")}
    )
    config._attn_implementation = "eager"
    config.use_cache = False
    builder = getattr(transformers, CLASSES.get(name, "GPT2LMHeadModel"))
    with META:
        model = builder(config)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
    model.train(training)
    outputs: list[Any] = []

    def forward() -> None:
        with torch.set_grad_enabled(training):
            # Decoders ask for the positions' values unless given a mask; encoders for the mask's.
            mask = {} if name.startswith("bert") else {"attention_mask": torch.ones_like(tokens)}
            outputs.append(model(tokens, **mask))

    ran = record(forward, backend)
    if not training:
        return ran, ()
    loss = sum(value.sum() for value in outputs[0].to_tuple() if isinstance(value, Tensor))
    return ran, record(loss.backward, backend)


MPT_SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip
"""Width, heads, blocks, as in the source's configurations."""

MPT_VOCABULARY = 50368

GPUS_PER_NODE = 8

ADAM_BYTES = 28
"""A parameter's update: float32 weight, gradient and two moments read, all but the gradient
written."""


class MPTBlock(nn.Module):
    """One block of an MPT: no biases, fused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        batch, length, width = values.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(values)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = values + self.down(functional.gelu(self.up(self.norm_2(values))))
        return changed


class MPTEnds(nn.Module):
    """Embedding, tied head and loss of an MPT without blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(MPT_VOCABULARY, width)
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = functional.linear(self.norm(self.table(tokens)), self.table.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def run_both_ways(model: nn.Module, given: Tensor, backend: str = "cuda") -> tuple[Costs, Costs]:
    """Return the operations of a module's forward and backward."""
    outputs: list[Tensor] = []
    forward = record(lambda: outputs.append(model(given)), backend)
    output = outputs[0]
    return forward, record(lambda: output.backward(torch.empty_like(output)), backend)


@cache
def mpt_costs(size: str, batch: int, length: int) -> tuple[Costs, Costs, Costs, Costs]:
    """Return a block's forward and backward, and those of the ends."""
    width, heads, _ = MPT_SIZES[size]
    with META:
        block, ends = MPTBlock(width, heads).bfloat16(), MPTEnds(width).bfloat16()
        values = torch.empty(batch, length, width, dtype=torch.bfloat16, requires_grad=True)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
    return (*run_both_ways(block, values), *run_both_ways(ends, tokens))


NODE_BYTES_PER_S = 0.8 * 200e9
"""What 1,600 Gbit/s between the source's nodes sustain, by the usual four fifths of a ring."""


def sharding(parameters: float, gpus: int, reduced_bytes: int) -> tuple[float, tuple[float, int]]:
    """Return seconds between nodes, and bytes sent inside one, of a micro-batch under FSDP.

    Weights in bfloat16 are gathered twice, and the sum of their gradients is scattered. None of it
    is taken as hidden: otherwise small micro-batches would be as fast as large ones.
    """
    moved = parameters * (2 + 2 + reduced_bytes)
    nodes = gpus // GPUS_PER_NODE
    if nodes > 1:
        return moved * (nodes - 1) / nodes / NODE_BYTES_PER_S, (0.0, 1)
    return 0.0, (moved * (gpus - 1) / gpus, gpus)


def mpt_rows(folder: Path) -> Iterator[Row]:
    """Return llm-foundry's training steps, per micro-batch of one GPU.

    Where it recomputes, a block's last product is left out: no backward needs its result. A step
    with recomputation takes 1.07 to 1.2 times one without in this table, a whole forward more
    would be 1.33.
    """
    for entry in read_csv(folder / "llm-foundry" / "mpt_training.csv"):
        size, batch, length = entry["Model"], int(entry["MicroBatchSize"]), entry["SeqLen (T)"]
        gpus, steps = int(entry["# GPUs"]), int(entry["GradAccum"])
        parameters, device = int(entry["NumParams"]), find_device(entry["GPU"])
        tokens = batch * int(length)
        forward, backward, first, last = mpt_costs(size, batch, int(length))
        again: Costs = ()
        if entry["Activation Checkpointing"] == "True":
            again = forward[: _last_product(forward)]
        blocks = MPT_SIZES[size][2]
        update = Cost("elementwise", 0, ADAM_BYTES * parameters // gpus // steps)
        between_s, sent = sharding(parameters, gpus, 2 if entry["MP Mode"] == "PURE" else 4)
        yield Row(
            "training, bf16", device,
            f"mpt-{size} {length} x {batch} on {gpus}" + (" recomputed" if again else ""),
            tokens / float(entry["Throughput (T/s/GPU)"]),
            (forward * blocks + again * blocks, backward * blocks, first + last, (update,)),
            "bfloat16", "eager",
            fixed_s=between_s, sent=sent,
            facts={"gpus": gpus, "parameters": parameters},
        )  # fmt: skip


def _last_product(costs: Costs) -> int:
    return max(index for index, cost in enumerate(costs) if cost.kind == "matmul")
