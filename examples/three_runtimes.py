"""Train a tiny Llama from one plan in three runtimes, and compare their losses step by step.

Ours, torch.distributed.pipelining and, where it is installed, DeepSpeed each run the plan's two
stages in two processes, from the files that `stagewright.export` writes::

    python examples/three_runtimes.py
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import stagewright

VOCABULARY, WIDTH, HEADS, KV_HEADS, LENGTH, BATCH, STEPS = 64, 32, 4, 2, 16, 8, 3
LEARNING_RATE = 0.5


class Block(nn.Module):
    """Grouped-query attention and SwiGLU, each behind an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KV_HEADS * size, bias=False) for _ in range(2))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        normed = self.norms[0](hidden)
        query, key, value = (
            layer(normed).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        normed = self.norms[1](hidden)
        return hidden + self.down(silu(self.gate(normed)) * self.up(normed))


def build_model() -> nn.Sequential:
    """Build the model with equal weights in every process; DeepSpeed takes its list of layers."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(6)]
    head = [nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, *head)


def make_batch(size: int = BATCH) -> Tensor:
    """Tokens, which are their own targets."""
    return torch.randint(VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(1))


def compute_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make_optimizer(parameters: object) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)  # type: ignore[arg-type]


def train_ours(folder: Path, rank: int) -> list[float]:
    plan = stagewright.Plan.read(folder / "plan.json")
    training = stagewright.build(plan, build_model(), loss_fn=compute_loss)
    optimizer = training.optimizer(torch.optim.SGD, lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        loss = training.step(make_batch(), target=make_batch())
        training.update(optimizer)
        losses += [] if loss is None else [float(loss)]
    training.close()
    return losses


def load(file: Path) -> dict[str, object]:
    """Run an exported file and return its names."""
    names: dict[str, object] = {"__file__": str(file)}
    exec(compile(file.read_text(), file, "exec"), names)
    return names


def train_torch(folder: Path, rank: int) -> list[float]:
    build_schedule = load(folder / "torch_pipeline.py")["build_schedule"]
    sample = (make_batch(stagewright.Plan.read(folder / "plan.json").microbatch_size),)
    modules, schedule = build_schedule(  # type: ignore[operator]
        build_model(), sample, rank, torch.device("cpu"), compute_loss
    )
    optimizer = make_optimizer(modules[0].parameters())
    reported = []
    for _ in range(STEPS):
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(make_batch())
        else:
            schedule.step(target=make_batch(), losses=losses)
            reported.append(float(torch.stack(losses).mean()))
        optimizer.step()
        optimizer.zero_grad()
    return reported


def train_deepspeed(folder: Path, rank: int) -> list[float]:
    import deepspeed

    # On a CPU DeepSpeed compiles an all-reduce of its own, which takes minutes.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    planned = load(folder / "planned_pipeline_module.py")["PlannedPipelineModule"]
    module = planned(list(build_model()), loss_fn=compute_loss)  # type: ignore[operator]
    plan = stagewright.Plan.read(folder / "plan.json")
    settings = {
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 0.0,
    }
    optimizer = make_optimizer(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    batches = make_batch().chunk(plan.num_microbatches)
    pairs = ((batch, batch) for _ in range(STEPS) for batch in batches)
    losses = [float(engine.train_batch(pairs)) for _ in range(STEPS)]
    return losses if rank == 1 else []


RUNTIMES = {"ours": train_ours, "torch": train_torch, "deepspeed": train_deepspeed}
FILES = {"torch": "torch_pipeline.py", "deepspeed": "planned_pipeline_module.py"}


def run_rank(runtime: str, folder: Path, rank: int) -> None:
    """Train as one rank; the last one writes the losses."""
    torch.set_num_threads(1)
    if runtime != "deepspeed":
        store = f"file://{folder / runtime}-store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    losses = RUNTIMES[runtime](folder, rank)
    if losses:
        (folder / f"{runtime}.json").write_text(json.dumps(losses))
    torch.distributed.barrier()
    # DeepSpeed leaves a joinable thread behind, which the interpreter's end turns into an abort.
    os._exit(0)


def start_ranks(runtime: str, folder: Path) -> list[float]:
    """Run both ranks of a runtime and return its losses."""
    program = [sys.executable, __file__, "--runtime", runtime, "--folder", str(folder)]
    common = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu", **free_address()}
    ranks = [
        subprocess.Popen(
            [*program, "--rank", str(rank)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        if any([process.wait(timeout=300) for process in ranks]):
            sys.exit(f"{runtime} failed")
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return list(json.loads((folder / f"{runtime}.json").read_text()))


def free_address() -> dict[str, str]:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtime", choices=RUNTIMES, help="Run one rank of this runtime.")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    if chosen.runtime:
        run_rank(chosen.runtime, chosen.folder, chosen.rank)
        return
    options = stagewright.PlanOptions(num_microbatches=4, num_stages=2)
    profile = stagewright.profile(build_model(), make_batch(BATCH // 4))
    plan = stagewright.plan(profile, "2xcpu", options)
    print(f"stages of {list(plan.balance)} layers")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan.to_json())
        for target, file in FILES.items():
            exported = stagewright.export(plan, target)
            for each, text in {file: exported.text, **exported.attachments}.items():
                (folder / each).write_text(text)
        for runtime in RUNTIMES:
            if runtime == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
                print("deepspeed  not installed")
                continue
            found[runtime] = start_ranks(runtime, folder)
            print(f"{runtime:9}  {'  '.join(f'{loss:.6f}' for loss in found[runtime])}")
    spread = max(max(steps) - min(steps) for steps in zip(*found.values(), strict=True))
    print(f"largest difference {spread:.1e}")
    sys.exit(spread > 1e-4)


if __name__ == "__main__":
    main()
