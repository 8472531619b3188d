"""One training script under plans of many kinds: the unsplit model's numbers, or what refuses it.

The script makes its optimizer before the pipeline, decays weights by an attribute of theirs, masks
and clamps gradients by hooks, evaluates in between, averages the model's weights and saves them.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.plan.plan import Plan
from stagewright.runtime.build import build
from stagewright.runtime.distributed import DistributedPipeline
from stagewright.runtime.ranks.process_groups import init_process_group
from stagewright.schedules.plan_schedule import count_ranks
from tests.runtime.forked import print_line, run_forked
from tests.runtime.tensor_parallel.plans import Mix, write_plan

MICROBATCHES, STEPS, SHARE = 4, 3, 0.1
MIXES = [
    ["t1", "t1"], ["r2"], ["z2"], ["f2"], ["t2"], ["t2", "t2"], ["t2r2"], ["t2f2"], ["r2", "t2"],
    ["z2", "t2"], ["f2", "f2"],
]  # fmt: skip


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = [(8, 16), (16, 8), (8, 16), (16, 8)]
    layers = [part for size in sizes for part in (nn.Linear(*size), nn.Tanh())]
    model = nn.Sequential(*layers[:-1]).double()
    for name, weight in model.named_parameters():
        weight.no_decay = name.endswith("bias")  # type: ignore[attr-defined]
    mask = (torch.rand(16, 8) > 0.5).double()
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient * mask)
    model.get_parameter("4.weight").register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    groups: dict[bool, list[Any]] = {False: [], True: []}
    for weight in model.parameters():
        groups[weight.no_decay].append(weight)  # type: ignore[attr-defined]
    decays = {False: 0.1, True: 0.0}
    made = [{"params": some, "weight_decay": decays[kind]} for kind, some in groups.items()]
    return torch.optim.AdamW(made, lr=1e-2)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    batch = torch.randn(4 * MICROBATCHES, 8, dtype=torch.float64)
    return batch, torch.randn(4 * MICROBATCHES, 8, dtype=torch.float64)


def average(teacher: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, SHARE)


def train_unsplit() -> dict[str, Any]:
    model = make_model()
    teacher, optimizer, losses = copy.deepcopy(model), make_optimizer(model), []
    for seed in range(STEPS):
        batch, target = draw(seed)
        loss = mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(loss), float(mse_loss(model.eval()(batch), target))]
        model.train()
        average(teacher, model)
    return {"losses": losses, "state": model.state_dict(), "teacher": teacher.state_dict()}


def run_script(plan: Plan, expected: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return how far the script is from the unsplit model's numbers, and what refused a line."""
    model = make_model()
    teacher, optimizer = copy.deepcopy(model), make_optimizer(model)
    training = build(plan, model, loss_fn=mse_loss, **options)
    refused, worst = {}, 0.0
    for seed in range(STEPS):
        batch, target = draw(seed)
        losses = [training.step(batch, target=target)]
        try:
            training.update(optimizer)
        except InvalidInput as error:  # its line is the one to change, as it says
            refused["optimizer"] = str(error)
            optimizer = make_optimizer(training.module)
            optimizer.step()
            optimizer.zero_grad()
        training.train(False)
        losses.append(training.evaluate(batch, target=target)[1])
        training.train(True)
        for loss, wanted in zip(losses, expected["losses"][2 * seed :], strict=False):
            worst = max(worst, abs(float(loss) - wanted) if loss is not None else 0.0)
        try:
            average(teacher, model)
        except (RuntimeError, NotImplementedError) as error:
            refused["teacher"] = str(error)
    if "teacher" not in refused:
        worst = max(worst, apart(teacher.state_dict(), expected["teacher"]))
    if isinstance(training.pipeline, DistributedPipeline):
        saved = training.pipeline.gather_state_dict()
    else:
        saved = model.state_dict()
    if saved is not None:
        worst = max(worst, apart(saved, expected["state"]))
    stale = [
        name
        for name, value in model.state_dict().items()
        if not value.is_meta
        and value.shape == expected["state"][name].shape
        and apart(
            {name: getattr(value, "full_tensor", lambda value=value: value)()}, expected["state"]
        )
        > 1e-9
    ]
    model.eval()
    try:
        training.evaluate(batch)
    except PlanMismatch as error:
        refused["mode"] = str(error)
    training.close()
    return {"worst": worst, "refused": refused, "stale": stale}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((value - expected[name]).abs().max()) for name, value in found.items())


def one_rank(plans: list[tuple[str, Plan]], expected: dict[str, Any]) -> None:
    init_process_group(backend="gloo", timeout_s=60)
    for name, plan in plans:
        members = list(range(count_ranks(plan)))
        group = dist.new_group(members)
        if dist.get_rank() in members:
            print_line({"plan": name, **run_script(plan, expected, group=group)})
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    model, (batch, _) = make_model(), draw(0)
    captured = trace(model, batch[:4], check=False)
    plans = []
    for stages in MIXES:
        mix = Mix(tuple(stages))
        plans.append((str(mix), write_plan(captured, mix, MICROBATCHES)))
    expected = train_unsplit()
    alone = write_plan(captured, Mix(("t1", "t1")), MICROBATCHES)
    print_line({"plan": "one process", **run_script(alone, expected)})
    run_forked(4, functools.partial(one_rank, plans, expected))


if __name__ == "__main__":
    sys.exit(main())
