"""Training loops of other libraries drive a `Pipeline` like the model itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from stagewright.runtime.pipeline import Pipeline
from tests.torch_models import Case, make_case, make_plan

STEPS = 4
MICROBATCHES = 4


@pytest.fixture(scope="module")
def language_model():
    """A causal language model, its sample with labels, and token sequences as data."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=32, n_head=4, vocab_size=64, n_positions=32, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    rows = [torch.randint(0, 64, (12,)) for _ in range(8 * STEPS)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    sample = {name: torch.stack([row[name] for row in data[:2]]) for name in data[0]}
    return transformers.GPT2LMHeadModel(config), sample, data


def split(model, sample):
    case = Case("model", make_case("mlp").spec, model, sample, None)
    return Pipeline(model, make_plan(case, 3, num_microbatches=MICROBATCHES))


def assert_equal_weights(pipeline, model):
    """Compare states after training: equal up to the order of sums over micro-batches."""
    theirs = model.state_dict()
    for name, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_trainer_of_transformers(language_model, accelerate, tmp_path):
    transformers = pytest.importorskip("transformers")
    start, sample, data = language_model

    def train(model):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=8, max_steps=STEPS,
            optim="sgd", learning_rate=0.5, label_names=["labels"], report_to=[],
            save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16])
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return [*losses, trainer.evaluate()["eval_loss"]]

    whole, pipeline = copy.deepcopy(start), split(copy.deepcopy(start), sample)
    # Otherwise the Trainer divides the sum by all labels, though the first of each row, which has
    # nothing before it, counts in no loss.
    whole.accepts_loss_kwargs = False
    losses = train(pipeline)
    assert losses == pytest.approx(train(whole), rel=1e-4)
    assert losses[-1] < losses[0]
    assert_equal_weights(pipeline, whole)


@pytest.fixture
def accelerate():
    """The package, whose precision is set once for a process unless it is reset."""
    found = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield found
    state._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(language_model, accelerate, precision):
    start, sample, data = language_model

    def train(model):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=8)
        )
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, accelerator.unwrap_model(model, keep_fp32_wrapper=False)

    whole, pipeline = copy.deepcopy(start), split(copy.deepcopy(start), sample)
    losses, unwrapped = train(pipeline)
    assert len(losses) == STEPS
    # In bfloat16 the sums over micro-batches round differently, to about three digits.
    assert losses == pytest.approx(train(whole)[0], rel=1e-5 if precision == "no" else 1e-2)
    assert unwrapped is pipeline
    assert unwrapped(**{name: tensor.repeat(4, 1) for name, tensor in sample.items()}).loss > 0
    if precision == "no":
        assert_equal_weights(pipeline, whole)


@pytest.mark.filterwarnings("ignore")  # Lightning uses what torch has deprecated
def test_lightning():
    lightning = pytest.importorskip("lightning")
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
    data = [(torch.rand(4), torch.randint(0, 2, ())) for _ in range(8 * STEPS)]

    class Module(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.losses = []

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train(model):
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module(model)
        trainer.fit(module, DataLoader(data, batch_size=8))
        return module.losses

    whole, pipeline = copy.deepcopy(start), split(copy.deepcopy(start), torch.rand(2, 4))
    losses = train(pipeline)
    assert len(losses) == STEPS
    assert losses == pytest.approx(train(whole), rel=1e-5)
    assert_equal_weights(pipeline, whole)
