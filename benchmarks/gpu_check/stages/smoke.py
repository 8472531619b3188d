"""One tiny pipeline step on the device: import, profile, plan, run."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from benchmarks.gpu_check.program import Failed, Given, Result, run_program


def smoke(given: Given) -> Result:
    """Profile, plan and train a small stack of layers, and time each of the four."""
    took: dict[str, float] = {}
    start = time.monotonic()

    def lap(name: str) -> None:
        nonlocal start
        now = time.monotonic()
        took[name], start = round(now - start, 3), now

    import stagewright
    from stagewright import Cluster, PlanOptions
    from stagewright.core.requests.requests import ProfilingOptions

    lap("import")
    torch.manual_seed(0)
    device = torch.device(given.device)
    width, batch = (32, 8) if given.small else (1024, 256)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(batch, width, device=device)
    profile = stagewright.profile(
        model, x, options=ProfilingOptions(budget_s=2.0, device=device.type)
    )
    lap("profile")
    options = PlanOptions(num_stages=2, num_microbatches=2)
    plan = stagewright.plan(profile, Cluster.uniform(2), options)
    lap("plan")
    whole = torch.cat([x, x])
    expected = model(whole).detach()
    pipeline = stagewright.Pipeline(model, plan, devices=[device, device])
    output = pipeline(whole)
    output.square().mean().backward()
    lap("run")
    result: Result = {"took_s": took, "balance": list(plan.balance), "layers": len(profile.layers)}
    if not torch.allclose(output.detach(), expected, rtol=1e-4, atol=1e-5):
        raise Failed("the pipeline's output is not the model's", result)
    if any(parameter.grad is None for parameter in model.parameters()):
        raise Failed("a parameter got no gradient", result)
    return result


if __name__ == "__main__":
    sys.exit(run_program(smoke, asks_cuda=True))
