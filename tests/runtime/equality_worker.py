"""One rank: every model under every schedule against the unsplit model; prints JSON lines."""

from __future__ import annotations

import copy
import json
import os
import sys

import torch
import torch.distributed as dist

from stagewright.capture.difference import relative_difference
from stagewright.core.plan import Plan
from stagewright.core.profile import Profile
from stagewright.runtime import torch_engine
from stagewright.runtime.distributed import DistributedPipeline, init_process_group
from stagewright.schedules.named import make_schedule
from tests.torch_models import make_batch, make_case, make_plan, traced_profile

PERFORMED: list[str] = []


def record(stage_class: type) -> None:
    """Note every forward and backward in the order torch performs them."""
    for method, letter in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        original = getattr(stage_class, method)

        def noted(self, chunk, *args, _original=original, _letter=letter, **kwargs):
            PERFORMED.append(f"{self.stage_index}{_letter}{chunk}")
            return _original(self, chunk, *args, **kwargs)

        setattr(stage_class, method, noted)


def compare(
    name: str, schedule: str, num_stages: int, dtype: torch.dtype, profile: Profile
) -> dict[str, object]:
    case = make_case(name)
    whole = copy.deepcopy(case.model).to(dtype)
    plan: Plan = make_plan(case, num_stages, schedule=schedule, profile=profile)
    if dtype is torch.float64:
        inputs = tuple(
            spec.model_copy(update={"dtype": "float64"}) if spec.dtype == "float32" else spec
            for spec in plan.inputs
        )
        plan = plan.model_copy(update={"inputs": inputs})
    pipeline = DistributedPipeline(case.model.to(dtype), plan, loss_fn=case.loss_fn)
    batch, target = make_batch(case, plan, dtype=dtype)
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    PERFORMED.clear()
    losses, expected = [], []
    for _ in range(2):  # twice, so that gradients accumulate and buffers move on
        loss = pipeline.step(*values, target=target)
        losses.append(None if loss is None else float(loss))
        expected.append(unsplit(whole, values, target, case, plan.num_microbatches))
    order = [str(a) for a in make_schedule(plan.schedule, num_stages, 4).ranks[pipeline.rank]]
    gradients = {key: p.grad for key, p in whole.named_parameters(remove_duplicate=False)}
    buffers = dict(whole.named_buffers())
    result = {
        "model": name,
        "schedule": schedule,
        "rank": pipeline.rank,
        "dtype": str(dtype),
        "names": sorted(pipeline.module.state_dict()),
        "all_names": sorted(whole.state_dict()),
        "loss": max(
            (abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True) if a is not None),
            default=None,
        ),
        "gradient": largest(
            {key: p.grad for key, p in pipeline.module.named_parameters()}, gradients
        ),
        "buffer": largest(dict(pipeline.module.named_buffers()), buffers),
        "order": order * 2 == PERFORMED,
    }
    pipeline.close()
    return result


def largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative difference over all names."""
    return max((relative_difference(found[key], expected[key]) for key in found), default=0.0)


def unsplit(whole, values, target, case, count) -> float:
    total = 0.0
    for *piece, wanted in zip(*(tensor.chunk(count) for tensor in (*values, target)), strict=True):
        loss = case.loss_fn(whole(*piece), wanted) / count
        loss.backward()
        total += float(loss.detach())
    return total


def main() -> None:
    torch.set_num_threads(1)
    init_process_group(backend="gloo", timeout_s=60)
    record(torch_engine._WatchedStage)
    num_stages = dist.get_world_size()
    for name in sys.argv[1].split(","):
        profile = traced_profile(make_case(name))
        for schedule in ("gpipe", "1f1b"):
            for dtype in (torch.float64, torch.float32):
                found = compare(name, schedule, num_stages, dtype, profile)
                with open(f"{sys.argv[2]}/{found['rank']}.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main()
