"""Activation checkpoints in a model's forward are peeled off and left to the plan."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagewright.capture.capture import trace
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.requests.requests import ProfilingOptions
from stagewright.planner.plan import plan
from stagewright.profiler.measure.profile import profile
from stagewright.runtime.pipeline import Pipeline
from stagewright.runtime.verify import mean_of_squares, verify

# transformers has renamed gradient_checkpointing_enable, and warns in every call.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class DoubledSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Block(nn.Module):
    def __init__(self, rounds):
        super().__init__()
        self.linear, self.dropout, self.rounds = nn.Linear(8, 8), nn.Dropout(0.5), rounds

    def forward(self, x):
        y = self.dropout(torch.tanh(self.linear(x)))
        return x + (DoubledSign.apply(y) if self.rounds else y)


class Checkpointed(nn.Module):
    def __init__(self, reentrant, rounds=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rounds and index > 1) for index in range(4))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def gpt2(reentrant):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=32, n_positions=8, use_cache=False,
        bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_checkpointed_blocks_are_traced_and_noted(reentrant, rounds):
    captured = trace(Checkpointed(reentrant, rounds), torch.randn(2, 8))
    assert not captured.program.opaque
    assert sum(cut.boundary.legal for cut in captured.cuts) >= 3
    (note,) = [note for note in captured.graph.notes if "checkpointing" in note]
    assert "of 3 modules is left to the plan" in note
    assert "recompute='auto'" in note


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_transformers_with_gradient_checkpointing_run_as_planned(reentrant, recompute):
    torch.manual_seed(0)
    model, ids = gpt2(reentrant), torch.randint(0, 32, (4, 6))
    eager = copy.deepcopy(model)
    options = ProfilingOptions(budget_s=0.05)
    found = profile(model, {"input_ids": ids[:2]}, options=options)
    opaque = {layer.layer.name for layer in found.layers if layer.layer.opaque}
    assert opaque <= {"transformer.wte"}, "hooks make its inputs require gradients, nothing else"
    assert any("of 3 modules is left to the plan" in note for note in found.notes)
    made = plan(found, "2x8GB", PlanOptions(num_stages=2, recompute=recompute), num_microbatches=2)
    assert {stage.recompute for stage in made.stages} == {recompute}
    ours, theirs = Pipeline(model, made)(input_ids=ids), eager(input_ids=ids)
    torch.testing.assert_close(ours.logits, theirs.logits)
    for output in (ours, theirs):
        output.logits.square().mean().backward()
    for (name, parameter), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)
    target = torch.zeros(4)
    assert verify(gpt2(reentrant), made, {"input_ids": ids}, target, mean_of_squares).worst < 1e-4
