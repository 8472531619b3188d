"""A model captured with few of its blocks gives the profile of the whole one, byte by byte."""

import pytest
import torch
from torch import nn

from stagewright.core.models.families import (
    BertConfig,
    BertSpec,
    CausalLMConfig,
    CausalLMSpec,
    GPT2Config,
    GPT2Spec,
    LlamaConfig,
    LlamaSpec,
    T5Spec,
    ViTConfig,
    ViTSpec,
)
from stagewright.core.requests.default_samples import default_sample
from stagewright.core.requests.hugging_face import CAUSAL_TYPES
from stagewright.profiler.estimates.estimate import (
    document,
    estimate,
    estimate_spec,
    rates_for,
    spec_work,
    target,
)
from stagewright.profiler.estimates.layer_costs import model_work
from stagewright.profiler.estimates.repeated_blocks import find_pattern, repeated_work
from stagewright.profiler.models.families import build_model

WANTED = target("H100")
INPUTS = (torch.empty(2, 7, device="meta"),)
LAYERS = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 128}
DECODER = {**LAYERS, "vocab_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 3,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": None,
}  # fmt: skip
OWN = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
}
DEEPER = {"cohere2": 22, "exaone4": 22, "olmo3": 22, "smollm3": 22, "gemma3_text": 26}
"""Types whose blocks alternate in fours and sixes."""


FEWEST = {
    "cohere2": 18, "exaone4": 18, "olmo3": 18, "smollm3": 18, "gemma3_text": 26, "gemma2": 10,
    "gpt_oss": 10, "deepseek_v2": 9, "deepseek_v3": 9, "ernie4_5_moe": 7, "glm4_moe": 7,
}  # fmt: skip
"""Blocks of which few are captured, of types that need more than six; the whole takes longest."""


def causal_lm(kind: str, layers: int | None = None, **settings: object) -> CausalLMSpec:
    layers = layers or DEEPER.get(kind, 12)
    config = CausalLMConfig(
        model_type=kind,
        **{**DECODER, "num_hidden_layers": layers},
        settings={**OWN.get(kind, {}), **settings},
    )
    return CausalLMSpec(family="causal_lm", config=config)


SPECS = {
    "gpt2, a tied head": GPT2Spec(
        family="gpt2", config=GPT2Config(vocab_size=128, n_layer=12, n_embd=64, n_head=4)
    ),
    "llama, a tied head": LlamaSpec(
        family="llama", config=LlamaConfig(**DECODER, tie_word_embeddings=True)
    ),
    "bert": BertSpec(family="bert", config=BertConfig(**LAYERS)),
    "vit": ViTSpec(
        family="vit", config=ViTConfig(**LAYERS, image_size=32, patch_size=8, num_attention_heads=4)
    ),
    "gemma2, windows in turns": causal_lm("gemma2", sliding_window=16),
    "deepseek_v3, experts behind dense layers": causal_lm("deepseek_v3"),
}


@pytest.fixture(autouse=True)
def on_meta():
    with torch.device("meta"):
        yield


def check_equal(spec) -> None:
    sample = default_sample(spec, 1, None if isinstance(spec, ViTSpec) else 32)
    short, whole = (profile_of(spec, sample, repeated) for repeated in (True, False))
    assert short.model_dump_json() == whole.model_dump_json()


def profile_of(spec, sample, repeated: bool):
    with pytest.MonkeyPatch.context() as patch:
        name = "stagewright.profiler.estimates.estimate.repeated_work"
        taken = []

        def note(*arguments):
            found = repeated_work(*arguments) if repeated else None
            taken.append(found is not None)
            return found

        patch.setattr(name, note)
        work = spec_work(spec, sample, WANTED)
    assert taken == [repeated], "the shallow model was refused"
    return document(work, WANTED, rates_for(WANTED, ()), spec)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_profile_is_that_of_the_whole_model(spec):
    check_equal(spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CAUSAL_TYPES))
def test_every_type_of_causal_language_model_is_equal(kind):
    check_equal(causal_lm(kind, FEWEST.get(kind, 6)))


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("gemma3_text", (6, 6, 20, 26)), ("deepseek_v3", (4, 1, 7, 12)), ("gpt_oss", (2, 2, 8, 12))],
)
def test_the_pattern_of_blocks_is_found(kind, pattern):
    found = find_pattern(build_model(causal_lm(kind)))
    assert found is not None
    assert (found.head, found.period, found.kept, found.total) == pattern


def test_what_was_not_looked_for_is_said_of_ones_own_model_alone():
    spec = SPECS["gpt2, a tied head"]
    inputs = {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    notes = {
        of: [note for note in profile.notes if "looked for" in note]
        for of, profile in (
            ("name", estimate_spec(spec, device="H100")),
            ("model", estimate(build_model(spec), inputs, device="H100")),
        )
    }
    assert (len(notes["name"]), len(notes["model"])) == (0, 1)


def test_two_lists_of_blocks_are_captured_as_a_whole():
    assert find_pattern(build_model(T5Spec(family="t5"))) is None


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(7, 7)  # an odd size: no devices split it, each block in turn
        self.scale = 1.0

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale


class Stack(nn.Module):
    """Twelve blocks; a rule says what the model's own forward does behind each."""

    def __init__(self, rule=lambda index, x, kept: x) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Block(number) for number in range(12))
        self.head = nn.Linear(7, 2)
        self.rule = rule

    def forward(self, x):
        x, kept = self.first(x), []
        for index, block in enumerate(self.blocks):
            kept.append(x)
            x = self.rule(index, block(x), kept)
        return self.head(x)


@pytest.mark.parametrize(
    "rule",
    [lambda index, x, kept: x, lambda index, x, kept: x + kept[0], lambda i, x, kept: x + kept[i]],
    ids=["a chain", "a skip from the first", "a residual"],
)
def test_skips_that_repeat_are_repeated(rule):
    model = Stack(rule)
    found, whole = repeated_work(model, INPUTS, WANTED), model_work(model, INPUTS, WANTED)
    assert found is not None
    for name in ("layers", "edges", "boundaries", "parameters", "chain_break", "outputs"):
        assert getattr(found.graph, name) == getattr(whole.graph, name), name
    assert found.storages == whole.storages
    assert (found.classes, found.layers) == (whole.classes, whole.layers)


def change_width(model: Stack) -> None:
    model.blocks[7].linear = nn.Linear(7, 7, bias=False)


def change_setting(model: Stack) -> None:
    model.blocks[7].scale = 2.0


def share_weights(model: Stack) -> None:
    model.blocks[7].linear = model.blocks[6].linear


def share_with_the_front(model: Stack) -> None:
    model.blocks[7].linear.weight = model.first.weight


@pytest.mark.parametrize(
    "change", [change_width, change_setting, share_weights, share_with_the_front]
)
def test_a_block_that_differs_is_not_left_out(change):
    model = Stack()
    change(model)
    assert repeated_work(model, INPUTS, WANTED) is None


@pytest.mark.parametrize(
    "rule",
    [
        lambda index, x, kept: x + sum(kept),
        lambda index, x, kept: x * (1.0 + index),
        lambda index, x, kept: x + kept[1] if index == 3 else x,
    ],
    ids=["growing", "another constant", "a skip from the second"],
)
def test_a_forward_that_treats_blocks_differently_is_captured_as_a_whole(rule):
    assert repeated_work(Stack(rule), INPUTS, WANTED) is None


def test_the_model_has_all_its_blocks_afterwards():
    model = Stack()
    blocks = model.blocks
    assert repeated_work(model, INPUTS, WANTED) is not None
    assert model.blocks is blocks
    assert len(blocks) == 12
