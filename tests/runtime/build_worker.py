"""Two ranks: what `build` makes, against the unsplit model; each writes JSON lines."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from stagewright import LossScale, Training, Weights, build
from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.price_split import plan_from_balance
from stagewright.profiler.models.families import build_model
from stagewright.runtime.meta_init.materialise import materialise_whole
from stagewright.runtime.ranks.process_groups import init_process_group
from tests.runtime.forked import run_forked
from tests.torch_models import SPECS, Case, make_batch, make_case, make_plan, traced_profile

CPU = torch.device("cpu")
LARGEST_NORM = 0.05


@functools.cache
def profile_of(name: str) -> Profile:
    """Traced before the ranks are forked."""
    return traced_profile(make_case(name))


def is_on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(SPECS[name])


def unsplit_step(model: nn.Module, loss_fn: Any, batch: Any, target: Any, count: int) -> float:
    """A loop over micro-batches; gradients are added up."""
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    total = 0.0
    for *piece, wanted in zip(*(tensor.chunk(count) for tensor in (*values, target)), strict=True):
        loss = loss_fn(model(*piece), wanted) / count
        loss.backward()
        total += float(loss.detach())
    return total


def largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(relative_difference(value, expected[name]) for name, value in found.items())


def weights_of(training: Training, model: nn.Module) -> float:
    return largest(
        {name: p.detach() for name, p in training.named_parameters()},
        {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)},
    )


def double(plan: Plan) -> Plan:
    inputs = tuple(
        spec.model_copy(update={"dtype": "float64"}) if spec.dtype == "float32" else spec
        for spec in plan.inputs
    )
    return plan.model_copy(update={"inputs": inputs})


def without_data(name: str, weights: Weights) -> dict[str, Any]:
    """Loss and gradients of a model of which each rank has only its stage."""
    case = make_case(name)
    plan = double(make_plan(case, 2, profile=profile_of(name)))
    torch.set_default_dtype(torch.float64)
    model, whole = is_on_meta(name), is_on_meta(name)
    training = build(plan, model, loss_fn=case.loss_fn, weights=weights)
    materialise_whole(whole, weights, CPU)
    batch, target = make_batch(case, plan, dtype=torch.float64)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    loss = training.step(*args, target=target, **kwargs)
    expected = unsplit_step(whole, case.loss_fn, batch, target, plan.num_microbatches)
    held = {id(parameter) for parameter in training.parameters()}
    result = {
        "loss": None if loss is None else abs(float(loss) - expected) / expected,
        "gradient": largest(
            {key: p.grad for key, p in training.named_parameters()},
            {key: p.grad for key, p in whole.named_parameters(remove_duplicate=False)},
        ),
        "held_bytes": sum(p.nbytes for p in training.parameters()),
        "model_bytes": sum(p.nbytes for p in whole.parameters()),
        "elsewhere": [n for n, p in model.named_parameters() if p.is_meta == (id(p) in held)],
    }
    training.close()
    torch.set_default_dtype(torch.float32)
    return result


def accumulated() -> dict[str, Any]:
    """Six steps, three to an update, clipped."""
    case = make_case("mlp")
    plan = double(make_plan(case, 2, profile=profile_of("mlp")))
    torch.set_default_dtype(torch.float64)
    whole = is_on_meta("mlp")
    training = build(
        plan, is_on_meta("mlp"), loss_fn=case.loss_fn, weights=Weights(seed=1),
        max_norm=LARGEST_NORM, accumulate=3,
    )  # fmt: skip
    materialise_whole(whole, Weights(seed=1), CPU)
    ours = torch.optim.SGD(training.parameters(), lr=1.0)
    theirs = torch.optim.SGD(whole.parameters(), lr=1.0)
    updated, norms = [], []
    for step in range(6):
        batch, target = make_batch(case, plan, seed=step, dtype=torch.float64)
        training.step(*batch, target=target)
        unsplit_step(whole, case.loss_fn, batch, target, plan.num_microbatches)
        updated.append(training.update(ours))
        if step % 3 == 2:
            for parameter in whole.parameters():
                parameter.grad /= 3
            norm = float(nn.utils.clip_grad_norm_(whole.parameters(), LARGEST_NORM))
            norms.append(abs(norm - training.norm) / norm)
            assert norm > LARGEST_NORM
            theirs.step(), theirs.zero_grad()
    result = {"updated": updated, "norm": max(norms), "weights": weights_of(training, whole)}
    training.close()
    torch.set_default_dtype(torch.float32)
    return result


def in_half_precision(dtype: torch.dtype) -> dict[str, Any]:
    """Three updates, of which the second overflows on rank 0 alone."""
    case = make_case("mlp")
    with torch.autocast("cpu", dtype):
        profile = traced_profile(case)
    plan = make_plan(case, 2, profile=profile)
    whole = is_on_meta("mlp")
    training = build(
        plan, is_on_meta("mlp"), loss_fn=case.loss_fn, weights=Weights(seed=1), autocast=dtype,
        precision=None,
    )  # fmt: skip
    materialise_whole(whole, Weights(seed=1), CPU)
    ours = torch.optim.SGD(training.parameters(), lr=0.1)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    updated, scales, kept = [], [], []
    first = next(training.parameters())
    for step in range(3):
        batch, target = make_batch(case, plan, seed=step)
        training.step(*batch, target=target)
        overflows = step == 1 and dist.get_rank() == 0 and training.loss_scale is not None
        if overflows:
            first.grad[0] = float("inf")
        before = [p.detach().clone() for p in training.parameters()]
        updated.append(training.update(ours))
        scales.append(training.loss_scale.value if training.loss_scale else None)
        kept.append(all(map(torch.equal, before, training.parameters())))
        if updated[-1]:
            unsplit_step(whole, case.loss_fn, batch, target, plan.num_microbatches)
            theirs.step(), theirs.zero_grad()
    result = {
        "updated": updated, "scales": scales, "kept": kept, "skipped": training.skipped,
        "weights": weights_of(training, whole), "sent": plan.boundaries[0].tensors[0].dtype,
    }  # fmt: skip
    training.close()
    return result


def replicated(strategy: Any) -> dict[str, Any]:
    """One stage on two ranks, in float16, with an overflow on one of them."""
    case = make_case("mlp")
    profile = profile_of("mlp")
    plan = plan_from_balance(
        profile,
        Cluster.uniform(2),
        PlanOptions(num_microbatches=4, schedule="1f1b"),
        [len(profile.layers)],
        replicas=[2],
    )
    whole = is_on_meta("mlp")
    training = build(
        plan, is_on_meta("mlp"), loss_fn=case.loss_fn, weights=Weights(seed=1), strategy=strategy,
        autocast=torch.float16, precision=None, max_norm=LARGEST_NORM,
    )  # fmt: skip
    materialise_whole(whole, Weights(seed=1), CPU)
    ours = torch.optim.SGD(training.parameters(), lr=0.1)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1)
    updated, norms = [], []
    for step in range(3):
        batch, target = make_batch(case, plan, seed=step)
        training.step(*batch, target=target)
        if step == 1 and dist.get_rank() == 0:
            gradient = next(training.parameters()).grad
            getattr(gradient, "_local_tensor", gradient)[0] = float("inf")
        updated.append(training.update(ours))
        if updated[-1]:
            unsplit_step(whole, case.loss_fn, batch, target, plan.num_microbatches)
            norm = float(nn.utils.clip_grad_norm_(whole.parameters(), LARGEST_NORM))
            norms.append(abs(norm - training.norm) / norm)
            theirs.step(), theirs.zero_grad()
    full = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p
        for name, p in training.named_parameters()
    }
    wanted = dict(whole.named_parameters())
    result = {
        "updated": updated, "norm": max(norms),
        "weights": largest({n: p.detach() for n, p in full.items()}, wanted),
    }  # fmt: skip
    training.close()
    return result


def bare() -> dict[str, Any]:
    """The second rank's stage has no parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    whole = copy.deepcopy(model)
    case = Case("bare", make_case("mlp").spec, model, (torch.rand(2, 4),), mse_loss)
    training = build(make_plan(case, 2), model, loss_fn=mse_loss, max_norm=LARGEST_NORM)
    ours = training.optimizer(torch.optim.AdamW, lr=0.1)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
    updated = []
    for step in range(2):
        torch.manual_seed(step)
        batch, target = torch.rand(8, 4), torch.rand(8, 4)
        training.step(batch, target=target)
        mse_loss(whole(batch), target).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), LARGEST_NORM)
        theirs.step(), theirs.zero_grad()
        updated.append(training.update(ours))
    held = len(list(training.parameters()))
    weights = weights_of(training, whole) if held else 0.0
    result = {"updated": updated, "held": held, "weights": weights}
    training.close()
    return result


def at_its_limit() -> dict[str, Any]:
    """A loss scale far too large finds its way down, all ranks together."""
    case = make_case("mlp")
    plan = make_plan(case, 2, profile=profile_of("mlp"))
    training = build(
        plan,
        case.model,
        loss_fn=lambda output, target: case.loss_fn(output, target) * 1e4,
        loss_scale=LossScale(value=2.0**125, backoff=2.0**-16),
    )
    optimizer = torch.optim.SGD(training.parameters(), lr=0.1)
    batch, target = make_batch(case, plan)
    updated = []
    while not updated or not updated[-1]:
        training.step(*batch, target=target)
        updated.append(training.update(optimizer))
    result = {"updated": updated, "scale": training.loss_scale.value, "norm": training.norm}
    training.close()
    return result


def one_rank() -> None:
    init_process_group(backend="gloo", timeout_s=60)
    folder = Path(sys.argv[1])
    cells: dict[str, Callable[[], dict[str, Any]]] = {
        "checkpoint": lambda: without_data("gpt2", Weights(folder / "gpt2.safetensors")),
        "saved": lambda: without_data("unet", Weights(folder / "unet")),
        "init": lambda: without_data("mlp", Weights(seed=4)),
        "accumulated": accumulated,
        "bare": bare,
        "float16": lambda: in_half_precision(torch.float16),
        "bfloat16": lambda: in_half_precision(torch.bfloat16),
        "reduce": lambda: replicated(None),
        "fully_shard": lambda: replicated("fully_shard"),
        "limit": at_its_limit,
    }
    with open(folder / f"{dist.get_rank()}.jsonl", "w", encoding="utf-8") as file:
        for name, cell in cells.items():
            print(json.dumps({"cell": name, "rank": dist.get_rank(), **cell()}), file=file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ("gpt2", "unet", "mlp"):
        profile_of(name)
    run_forked(2, one_rank)
