"""One rank: replicas of stages under the given strategies against the unsplit model; JSON lines."""

from __future__ import annotations

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stagewright.core.errors import PlanMismatch
from stagewright.core.plan.plan import Plan
from stagewright.core.plan.schedule import Schedule
from stagewright.core.profile.profile import Profile
from stagewright.runtime.checkpoint.load import load_checkpoint
from stagewright.runtime.checkpoint.save import save_checkpoint
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.random_state import RandomState
from stagewright.runtime.ranks.process_groups import init_process_group
from stagewright.runtime.replicas.sharded import align_gradients
from stagewright.runtime.replicas.strategy import Strategy
from tests.runtime.checkpoint.resume_worker import Tied
from tests.runtime.checkpoint.resume_worker import loss_fn as loss_of_tied
from tests.runtime.checkpoint.resume_worker import make_batch as tied_batch
from tests.runtime.equality_worker import largest, plan_of, tensors, unsplit
from tests.runtime.forked import run_forked
from tests.torch_models import SPECS, Case, make_batch, make_case, traced_profile

SGD = {"lr": 1e-2, "momentum": 0.9}


class Idle(nn.Module):
    """A layer whose weights get no gradient, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


def strategy_of(variant: dict[str, Any]) -> Strategy | dict[int, Strategy] | None:
    found = variant.get("strategy")
    return {int(stage): each for stage, each in found.items()} if isinstance(found, dict) else found


def full(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def here(value: Tensor) -> int:
    """Bytes of a tensor on this rank."""
    return (value.to_local() if isinstance(value, DTensor) else value).nbytes


def parameters(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: full(parameter) for name, parameter in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: torch.zeros(parameter.shape).double() if (g := parameter.grad) is None else full(g)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


class Trial:
    """A pipeline and the unsplit model, which take the same steps."""

    def __init__(self, case: Case, variant: dict[str, Any], profile: Profile) -> None:
        self.case = case
        plan = plan_of(variant, profile, torch.float64)
        if variant.get("planned"):
            stages = [
                {**stage.model_dump(), "strategy": variant["planned"]} for stage in plan.stages
            ]
            plan = Plan.model_validate({**plan.model_dump(), "stages": stages})
        self.plan = plan
        self.schedule = Schedule.model_validate(variant["own"]) if "own" in variant else None
        self.whole = copy.deepcopy(case.model).double()
        self.pipeline = self.pipelined(strategy_of(variant))
        self.optimizer = torch.optim.SGD(self.pipeline.module.parameters(), **SGD)
        self.theirs = torch.optim.SGD(self.whole.parameters(), **SGD)
        if case.name == "idle":
            self.batch = [torch.randn(2 * plan.num_microbatches, 4).double()]
            self.target = torch.randn(2 * plan.num_microbatches, 4).double()
        elif case.name == "tied":
            tokens, self.target = tied_batch(0, plan.num_microbatches)
            self.batch = [tokens]
        else:
            batch, self.target = make_batch(case, plan, dtype=torch.float64)
            self.batch = list(batch)

    def pipelined(self, strategy: Any) -> DistributedPipeline:
        model = copy.deepcopy(self.case.model).double()
        return DistributedPipeline(
            model,
            self.plan,
            loss_fn=self.case.loss_fn,
            schedule=self.schedule,
            strategy=strategy,
        )

    def step(self) -> float:
        """Of both; how far the losses are apart."""
        state = RandomState.now(torch.device("cpu"))
        loss = self.pipeline.step(*self.batch, target=self.target)
        state.restore(torch.device("cpu"))
        wanted = unsplit(self.whole, self.batch, self.target, self.case, self.plan.num_microbatches)
        return 0.0 if loss is None else abs(float(loss) - wanted) / abs(wanted)

    def update(self) -> None:
        for optimizer in (self.optimizer, self.theirs):
            optimizer.step()
            optimizer.zero_grad()

    def evaluated(self) -> float:
        self.pipeline.train(False)
        self.whole.eval()
        output, _ = self.pipeline.evaluate(*self.batch)
        self.pipeline.train()
        with torch.no_grad():
            wanted = tensors(self.whole(*self.batch))
        self.whole.train()
        if output is None:
            return 0.0
        pairs = zip(tensors(output), wanted, strict=True)
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def compare(case: Case, variant: dict[str, Any], profile: Profile) -> dict[str, object]:
    trial = Trial(case, variant, profile)
    pipeline, whole = trial.pipeline, trial.whole
    losses = [trial.step()]  # summed, then added to without sums, then all of it summed
    with pipeline.no_sync():
        losses.append(trial.step())
    losses.append(trial.step())
    without = [name for name, p in pipeline.module.named_parameters() if p.grad is None]
    difference = largest(gradients(pipeline.module), gradients(whole))
    norm = float(pipeline.clip_grad_norm_(0.01))
    wanted = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01))
    clipped = largest(gradients(pipeline.module), gradients(whole))
    of_gradients = sum(here(p.grad) for p in pipeline.module.parameters() if p.grad is not None)
    trial.update()
    evaluated = trial.evaluated()
    losses.append(trial.step())
    trial.update()
    here_names = [name for name, _ in pipeline.module.named_parameters()]
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    found = {
        "variant": variant,
        "rank": pipeline.rank,
        "without_gradient": without,
        "loss": max(losses),
        "gradient": difference,
        "norm": abs(norm - wanted) / wanted,
        "clipped": clipped,
        "evaluated": evaluated,
        "trained": largest(parameters(pipeline.module), dict(theirs)),
        "buffer": largest(dict(pipeline.module.named_buffers()), dict(whole.named_buffers())),
        "bytes": sum(theirs[name].nbytes for name in here_names),
        "of_parameters": sum(here(p) for p in pipeline.module.parameters()),
        "of_gradients": of_gradients,
        "trainable": sum(here(p) for p in pipeline.module.parameters() if p.requires_grad),
        "of_optimizer": sum(
            here(state["momentum_buffer"]) for state in trial.optimizer.state.values()
        ),
        "of_sharded": sum(here(p) for p in pipeline.module.parameters() if isinstance(p, DTensor)),
        "sharded": sum(isinstance(p, DTensor) for p in pipeline.module.parameters()),
    }
    if "checkpoint" in variant:
        found["resumed"] = resumed(trial, Path(variant["checkpoint"]))
    pipeline.close()
    return found


def resumed(trial: Trial, folder: Path) -> float:
    """Saved in shards and gone on with in others or whole, and back; how far they are apart."""
    save_checkpoint(folder / "shards", trial.pipeline, trial.optimizer, step=4)
    model = copy.deepcopy(trial.case.model).double()
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    load_checkpoint(folder / "shards", model, optimizer)
    theirs = {id(p): name for name, p in trial.whole.named_parameters()}
    momenta = {theirs[id(p)]: state["momentum_buffer"] for p, state in trial.theirs.state.items()}
    names = {id(p): name for name, p in model.named_parameters()}
    loaded = {names[id(p)]: state["momentum_buffer"] for p, state in optimizer.state.items()}
    apart = [
        largest(parameters(model), dict(trial.whole.named_parameters())),
        largest(dict(loaded), dict(momenta)),
    ]
    save_checkpoint(folder / "whole", trial.whole, trial.theirs, step=4)
    trial.pipeline.close()
    trial.pipeline = trial.pipelined("fully_shard")
    trial.optimizer = torch.optim.SGD(trial.pipeline.module.parameters(), **SGD)
    load_checkpoint(folder / "whole", trial.pipeline, trial.optimizer)
    apart.append(trial.step())
    trial.update()
    apart.append(
        largest(
            parameters(trial.pipeline.module),
            dict(trial.whole.named_parameters(remove_duplicate=False)),
        )
    )
    return max(apart)


def agreed(rank: int) -> list[list[float] | None]:
    """Gradients after replicas told each other which they have."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    for weight in weights[rank:2]:
        weight.grad = torch.ones(1)
    assert dist.group.WORLD is not None
    align_gradients(weights, dist.group.WORLD)
    return [None if weight.grad is None else weight.grad.tolist() for weight in weights]


def cases(names: list[str]) -> dict[str, tuple[Case, Profile]]:
    """Models by name, with their profiles."""
    found = {}
    for name in dict.fromkeys(names):
        case = make_case("mlp")
        if name == "tied":
            sample, _ = tied_batch(0, count=1)
            case = Case("tied", SPECS["mlp"], Tied().double(), sample, loss_of_tied)
        if name == "idle":
            sample = torch.randn(2, 4).double()
            case = Case("idle", SPECS["mlp"], Idle().double(), sample, nn.functional.mse_loss)
        found[name] = (case, traced_profile(case))
    return found


def one_rank(
    variants: list[dict[str, Any]], models: dict[str, tuple[Case, Profile]], folder: Path
) -> None:
    init_process_group(backend="gloo", timeout_s=60)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 2:
        (folder / f"agreed-{rank}.json").write_text(json.dumps(agreed(rank)), encoding="utf-8")
    for variant in variants:
        try:
            found = compare(models[variant["model"]][0], variant, models[variant["model"]][1])
        except PlanMismatch as error:
            found = {"variant": variant, "rank": rank, "refused": str(error)}
        with open(folder / f"{rank}-{ranks}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Variants by number of ranks; importing torch and tracing is done once, before forking."""
    folder = Path(sys.argv[1])
    variants = {
        int(ranks): found
        for ranks, found in json.loads((folder / "variants.json").read_text("utf-8")).items()
    }
    torch.set_num_threads(1)
    models = cases([variant["model"] for found in variants.values() for variant in found])
    for ranks in sorted(variants):  # each in new processes: torch remembers groups it destroyed
        run_forked(ranks, functools.partial(one_rank, variants[ranks], models, folder))


if __name__ == "__main__":
    main()
