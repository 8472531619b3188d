"""Ranks: models under the given variants against the unsplit model; each writes JSON lines."""

from __future__ import annotations

import copy
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.plan.schedule import Schedule
from stagewright.core.profile.profile import Profile
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.random_state import RandomState
from stagewright.runtime.ranks.process_groups import init_process_group
from stagewright.runtime.trace import record as record_step
from tests.runtime.forked import run_forked
from tests.torch_models import Case, make_batch, make_case, traced_profile

PERFORMED: list[str] = []


def plan_of(variant: dict[str, Any], profile: Profile, dtype: torch.dtype) -> Plan:
    """The variant's layer counts, or near-equal ones, under its options."""
    count = variant["stages"]
    base, extra = divmod(len(profile.layers), count)
    replicas = variant.get("replicas", [1] * count)
    chunks = variant.get("chunks", 1)
    plan = plan_from_balance(
        profile,
        Cluster.uniform(sum(replicas) // chunks),
        PlanOptions(
            num_microbatches=variant.get("microbatches", 4),
            schedule=variant["schedule"],
            recompute=variant.get("recompute", "never"),
        ),
        variant.get("balance", [base + (index < extra) for index in range(count)]),
        replicas=replicas if max(replicas) > 1 else (),
    )
    if dtype is not torch.float64:
        return plan
    inputs = tuple(
        spec.model_copy(update={"dtype": "float64"}) if spec.dtype == "float32" else spec
        for spec in plan.inputs
    )
    return plan.model_copy(update={"inputs": inputs})


def compare(case: Case, variant: dict[str, Any], profile: Profile) -> dict[str, object]:
    dtype = getattr(torch, variant.get("dtype", "float64"))
    whole = copy.deepcopy(case.model).to(dtype)
    plan = plan_of(variant, profile, dtype)
    cast = getattr(torch, variant["autocast"]) if "autocast" in variant else None
    schedule = Schedule.model_validate(variant["own"]) if "own" in variant else None
    pipeline = DistributedPipeline(
        copy.deepcopy(case.model).to(dtype),
        plan,
        loss_fn=case.loss_fn,
        schedule=schedule,
        autocast=cast,
    )
    pipeline.observe(lambda action, began, ended: PERFORMED.append(str(action)))
    batch, target = make_batch(case, plan, dtype=dtype)
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    losses, expected = [], []
    PERFORMED.clear()
    timeline = None
    if "traced" in variant:
        with record_step(pipeline) as trace:
            pipeline.step(*values, target=target)
        timeline = trace.timeline()
        pipeline.module.zero_grad()
        unsplit(whole, values, target, case, plan.num_microbatches)  # buffers move there too
        whole.zero_grad()
        pipeline.observe(lambda action, began, ended: PERFORMED.append(str(action)))
    for _ in range(2):  # twice, so that gradients accumulate and buffers move on
        state = RandomState.now(torch.device("cpu"))
        loss = pipeline.step(*values, target=target)
        losses.append(None if loss is None else float(loss))
        state.restore(torch.device("cpu"))
        expected.append(unsplit(whole, values, target, case, plan.num_microbatches, cast))
    performed = list(PERFORMED)
    gradient = largest(
        {key: p.grad for key, p in pipeline.module.named_parameters()},
        {key: p.grad for key, p in whole.named_parameters(remove_duplicate=False)},
    )
    largest_norm = 0.01  # below what either model has
    norm = float(pipeline.clip_grad_norm_(largest_norm))
    expected_norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), largest_norm))
    evaluated = None
    if pipeline.rank in pipeline.schedule.stage_ranks[-1]:
        whole.eval()
    pipeline.train(False)
    output, _ = pipeline.evaluate(*values)
    fewer, _ = pipeline.evaluate(*[value[:-1] for value in values], pad=True)
    if output is not None:
        with torch.no_grad(), torch.autocast("cpu", cast, enabled=cast is not None):
            wanted = whole(*values)
        evaluated = max(
            relative_difference(found, right)
            for found, right in [
                *zip(tensors(output), tensors(wanted), strict=True),
                *zip(tensors(fewer), (value[:-1] for value in tensors(wanted)), strict=True),
            ]
        )
    gradients = {key: p.grad for key, p in whole.named_parameters(remove_duplicate=False)}
    wanted_order = [str(action) for action in pipeline.schedule.ranks[pipeline.rank]] * 2
    result = {
        "variant": variant,
        "rank": pipeline.rank,
        "names": sorted(pipeline.module.state_dict()),
        "all_names": sorted(whole.state_dict()),
        "loss": max(
            (abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True) if a is not None),
            default=None,
        ),
        "gradient": gradient,
        "norm": abs(norm - expected_norm) / expected_norm,
        "clipped": largest(
            {key: p.grad for key, p in pipeline.module.named_parameters()}, gradients
        ),
        "buffer": largest(dict(pipeline.module.named_buffers()), dict(whole.named_buffers())),
        "evaluated": evaluated,
        "order": wanted_order == performed,
        "plan": json.loads(plan.to_json()),
        "timeline": None if timeline is None else json.loads(timeline.to_json()),
    }
    pipeline.close()
    return result


def tensors(output: Any) -> list[torch.Tensor]:
    """The floating tensors of a model's output."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def largest(
    found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> float:
    """Largest relative difference over all names."""
    return max(
        (
            relative_difference(value, expected[key])
            if value is not None and expected[key] is not None
            else float(value is not expected[key])
            for key, value in found.items()
        ),
        default=0.0,
    )


def unsplit(whole, values, target, case, count, cast=None) -> float:
    total = 0.0
    for *piece, wanted in zip(*(tensor.chunk(count) for tensor in (*values, target)), strict=True):
        with torch.autocast("cpu", cast, enabled=cast is not None):
            loss = case.loss_fn(whole(*piece), wanted) / count
        loss.backward()
        total += float(loss.detach())
    return total


def main() -> None:
    """Importing torch and tracing is done once, before forking."""
    torch.set_num_threads(1)
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    variants = json.loads((folder / "variants.json").read_text(encoding="utf-8"))
    models = {}
    for name in dict.fromkeys(variant["model"] for variant in variants):
        case = make_case(name)
        models[name] = (case, traced_profile(case))
    run_forked(count, functools.partial(one_rank, variants, models, folder))


def one_rank(
    variants: list[dict[str, Any]], models: dict[str, tuple[Case, Profile]], folder: Path
) -> None:
    init_process_group(backend="gloo", timeout_s=60)
    with open(folder / f"{dist.get_rank()}.jsonl", "w", encoding="utf-8") as file:
        for variant in variants:
            case, profile = models[variant["model"]]
            file.write(json.dumps(compare(case, variant, profile)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
