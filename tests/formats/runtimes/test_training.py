"""One plan, several runtimes: three steps have the losses of the unsplit model."""

import json
import os
import subprocess
import sys

import pytest
import torch

import stagewright
from stagewright.formats.plan_for import plan_for
from stagewright.formats.runtimes.registry import export
from tests.formats.runtimes.small_models import BATCH, MODELS, loss_fn
from tests.formats.runtimes.test_own_parsers import ROOT, RUNTIMES, needs_runtimes


def make_plan(schedule, num_stages=2, model="cnn", **options):
    build, sample, _ = MODELS[model]
    chosen = stagewright.PlanOptions(
        num_microbatches=4, schedule=schedule, num_stages=num_stages, **options
    )
    return stagewright.plan(
        stagewright.profile(build(), sample(BATCH // 4)), f"{num_stages}xcpu", chosen
    )


def unsplit_losses(dtype=torch.float64, model="cnn"):
    build, sample, target = MODELS[model]
    inputs = sample(BATCH)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    model = build().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), target(BATCH).to(dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_deepspeed(plan, model, folder):
    """Train an exported class in a process for each stage; return the losses that ranks report."""
    (folder / "planned_pipeline_module.py").write_text(export(plan, "deepspeed").text)
    (folder / "settings.json").write_text(json.dumps({"model": model}))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{RUNTIMES}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    run_ranks("deepspeed_worker", folder, plan.num_stages, environment)
    files = [folder / f"losses{rank}.json" for rank in range(plan.num_stages)]
    return [json.loads(file.read_text()) for file in files]


def run_ranks(worker, folder, ranks, environment):
    """Run a worker of this folder in each rank; end all if one fails."""
    command = [sys.executable, "-m", f"tests.formats.runtimes.{worker}", str(folder)]
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)], env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=400) for process in started]
        texts = [(folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(ranks)]
        assert codes == [0] * ranks, texts
    finally:
        for process, log in zip(started, logs, strict=True):
            process.kill()
            process.wait()
            log.close()


@needs_runtimes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_stages", "recompute"),
    [("cnn", 2, "never"), ("cnn", 2, "always"), ("tied", 3, "never"), ("tied", 2, "always")],
)
def test_deepspeed_trains_the_stages(model, num_stages, recompute, tmp_path):
    """Of a tied weight, each stage trained a copy of its own, without a word."""
    plan = make_plan("1f1b", num_stages, model, recompute=recompute)
    assert bool(plan.shared_weights) == (model == "tied")
    for losses in train_deepspeed(plan, model, tmp_path):
        # DeepSpeed sums gradients in float32 only.
        assert losses == pytest.approx(unsplit_losses(torch.float32, model), rel=1e-5)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_torchgpipe_trains_the_stages(recompute):
    import torchgpipe

    plan = make_plan("gpipe", num_stages=3, recompute=recompute)
    scope = {}
    exec(export(plan, "torchgpipe").text, scope)
    build, sample, target = MODELS["cnn"]
    model = torchgpipe.GPipe(
        build(),
        scope["balance"],
        devices=["cpu"] * 3,
        chunks=scope["chunks"],
        checkpoint=scope["checkpoint"],
    )
    assert [len(part) for part in model.partitions] == list(plan.balance)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_fn(model(sample(BATCH)), target(BATCH))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(unsplit_losses(), rel=1e-12)


def test_accelerate_dispatches_a_model_whose_forward_is_the_unsplit_one(tmp_path):
    """Stage 0 on the CPU, stage 1 read from disk as it is needed: two devices without a GPU."""
    import accelerate
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(50, (2, 7))
    profile = stagewright.profile(model, {"input_ids": tokens, "use_cache": False})
    plan = stagewright.plan(
        stagewright.for_inference(profile),
        "2xcpu",
        stagewright.PlanOptions(
            num_stages=2,
            objective="throughput",
            no_cut_after=("model.embed_tokens", "model.norm"),
        ),
    )
    scope = {}
    exec(export(plan, "accelerate").text, scope)
    assert set(scope["device_map"].values()) == {0, 1}
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        places = {name: ("cpu", "disk")[stage] for name, stage in scope["device_map"].items()}
        dispatched = accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=str(tmp_path)
        )
        assert torch.equal(dispatched(tokens, use_cache=False).logits, expected)


def test_accelerate_pipelines_a_model_at_the_split_points(tmp_path):
    """prepare_pippy on two processes gives the unsplit model's outputs."""
    build, sample, _ = MODELS["gpt"]
    # Accelerate pads batches that have other than num_chunks samples, wrongly.
    profile = stagewright.profile(build(), sample(1))
    options = stagewright.PlanOptions(num_microbatches=BATCH, num_stages=2)
    plan = plan_for("accelerate", profile, "2xcpu", options).plan
    (tmp_path / "device_map.py").write_text(export(plan, "accelerate").text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run_ranks("pippy_worker", tmp_path, 2, environment)
    with torch.no_grad():
        expected = build().eval()(sample(BATCH))
    found = torch.load(tmp_path / "output.pt")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@needs_runtimes
@pytest.mark.slow
def test_three_runtimes_train_one_plan_alike():
    """The example ends with 1 if losses differ, and says so if DeepSpeed was left out."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{RUNTIMES}"}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "three_runtimes.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert len(lines["ours"]) == len(lines["torch"]) == len(lines["deepspeed"]) == 3
    assert float(lines["ours"][2]) < float(lines["ours"][0]), "it learns"
