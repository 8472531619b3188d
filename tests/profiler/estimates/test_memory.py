"""What a model keeps, found without memory, is what it keeps when it really runs."""

from contextlib import nullcontext

import pytest
import torch

from stagewright.capture.capture import trace
from stagewright.capture.sample import read_sample
from stagewright.core.models.families import (
    BertConfig,
    BertSpec,
    GPT2Config,
    GPT2Spec,
    LlamaConfig,
    LlamaSpec,
    MixtralConfig,
    MixtralSpec,
    MLPSpec,
    ModelSpec,
    ResNetConfig,
    ResNetSpec,
    UNetConfig,
    UNetSpec,
    ViTConfig,
    ViTSpec,
)
from stagewright.core.requests.default_samples import default_sample
from stagewright.profiler.estimates.estimate import spec_work, target
from stagewright.profiler.layers.first_run import first_run
from stagewright.profiler.layers.layer_run import layer_runs
from stagewright.profiler.layers.loss_layer import Loss
from stagewright.profiler.models.families import build_loss, build_model, make_sample

HEADS = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
GROUPED = {**HEADS, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_GPT2 = {"vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4}

SPECS: dict[str, ModelSpec] = {
    "mlp": MLPSpec(family="mlp"),
    "resnet": ResNetSpec(family="resnet", config=ResNetConfig(depth=18, width=4)),
    "unet": UNetSpec(family="unet", config=UNetConfig(width=2, depth=2)),
    "gpt2": GPT2Spec(family="gpt2", config=GPT2Config(**SMALL_GPT2, dropout=0.0)),
    "gpt2 with dropout": GPT2Spec(family="gpt2", config=GPT2Config(**SMALL_GPT2)),
    "llama": LlamaSpec(family="llama", config=LlamaConfig(**GROUPED)),
    "mixtral": MixtralSpec(family="mixtral", config=MixtralConfig(**GROUPED)),
    "bert": BertSpec(family="bert", config=BertConfig(**HEADS, num_attention_heads=4, dropout=0.0)),
    "vit": ViTSpec(
        family="vit", config=ViTConfig(hidden_size=96, image_size=32, num_hidden_layers=2)
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_storage_table_equals_the_measured_one(name):
    spec = SPECS[name]
    if not isinstance(spec, MLPSpec | ResNetSpec | UNetSpec):
        pytest.importorskip("transformers")
    sample = default_sample(spec, 2)
    work = spec_work(spec, sample, target("CPU", "float32", 1))
    model = build_model(spec)
    inputs, goal = make_sample(sample)
    structure, flat = read_sample(model, inputs)
    captured = trace(model, structure.as_sample(flat), check=False)
    runs = layer_runs(captured)
    count = len(runs)
    runs.append(Loss(build_loss(spec), goal, torch.device("cpu")).run(captured))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    values = dict(zip(captured.program.inputs, flat, strict=True))
    real = first_run(model, runs, values, count, nullcontext)
    table = sorted((storage.layers, storage.size_bytes) for storage in real.storages)
    assert sorted((s.layers, s.size_bytes) for s in work.storages) == table
    assert [part.saved_bytes for part in work.parts] == [run.saved_bytes for run in runs]
    assert [part.workspace_bytes for part in work.parts] == real.workspace_bytes
    assert [part.output_bytes for part in work.parts] == real.output_bytes


def test_attention_on_a_gpu_keeps_no_scores():
    """Taken apart it would keep several tensors of length x length a head."""
    pytest.importorskip("transformers")
    spec = SPECS["gpt2 with dropout"]
    tokens = 512
    fused = spec_work(spec, default_sample(spec, 1, tokens), target("A100", "bfloat16"))
    apart = spec_work(spec, default_sample(spec, 1, tokens), target("CPU", "float32", 1))
    scores_bytes = 2 * 4 * tokens * tokens * 2  # two layers of four heads, two bytes each
    assert sum(s.size_bytes for s in fused.storages) < scores_bytes * 2
    assert sum(s.size_bytes for s in apart.storages) > scores_bytes * 4
