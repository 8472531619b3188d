"""Splits by the names of weights against those that the runtime finds in the program."""

import pytest
import torch

from stagewright.capture.capture import trace
from stagewright.core.graph.graph import Parameter
from stagewright.core.profile.profile import LayerProfile, Timing
from stagewright.core.profile.split_by_names import split_by_names
from stagewright.profiler.layers.tensor_shares import find_shares, list_splits
from tests.builders import chain_profile

WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 128}

MODELS = {
    "llama": ("Llama", "ForCausalLM", WIDE | {"intermediate_size": 128}),
    "mixtral": (
        "Mixtral", "ForCausalLM", WIDE | {"intermediate_size": 128, "num_experts_per_tok": 1},
    ),
    # With biases: those behind sums of rows are whole, and add no sum of their own.
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 128}),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", WIDE | {"intermediate_size": 256}),
    "bert": ("Bert", "ForMaskedLM", WIDE | {"intermediate_size": 256}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_block_exchanges_and_holds_what_the_program_does(name):
    hf = pytest.importorskip("transformers")
    family, task, sizes = MODELS[name]
    config = getattr(hf, f"{family}Config")(**sizes, bos_token_id=0, eos_token_id=0)
    model = getattr(hf, family + task)(config).eval()
    model.config.use_cache = False
    captured = trace(model, {"input_ids": torch.zeros(2, 64, dtype=torch.long)}, check=False)
    graph = captured.graph
    layers = tuple(
        LayerProfile(layer=one, forward=Timing(median_s=1), backward=Timing(median_s=2))
        for one in graph.layers
    )
    profile = chain_profile([1.0] * len(layers)).model_copy(
        update={
            "layers": layers, "parameters": graph.parameters, "boundaries": graph.boundaries,
        }
    )  # fmt: skip
    found = {split.degree: split for split in list_splits(find_shares(captured), layers)}
    usual = {split.degree: split for split in split_by_names(profile)}
    assert set(found) == set(usual) == {2, 4, 8}
    # The last block: the first one may take what is in front of it in parts or not.
    block = max(at for at, one in enumerate(graph.layers) if ".1" in one.name)
    for degree, split in found.items():
        one, other = split.layers[block], usual[degree].layers[block]
        for field in (
            "parameter_bytes", "forward_gathered_bytes", "backward_gathered_bytes", "gathers",
            "forward_reduced_bytes", "forward_reductions",
        ):  # fmt: skip
            assert getattr(other, field) == getattr(one, field), (degree, field)
        # Of experts, the program's choice of them is done by all.
        assert 1 / degree <= other.compute_share <= one.compute_share


def test_products_without_usual_names_are_done_by_all():
    names = ("q_proj", "o_proj", "odd")
    parameters = tuple(
        Parameter(names=(f"m.{name}.weight",), size_bytes=400, numel=100, layers=(0,))
        for name in names
    )
    profile = chain_profile([1.0], parameter_bytes=1200).model_copy(
        update={"parameters": parameters}
    )
    (block,) = split_by_names(profile)[0].layers
    assert block.compute_share == pytest.approx(1 / 3 + 2 / 3 / 2)
    assert "some of its weights have no usual names" in block.reasons
