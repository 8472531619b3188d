"""One rank of torch.distributed.pipelining that runs an exported script; see test_torch.py.

Arguments: the folder with the script, this rank, the number of ranks, the form of the CSV.
"""

import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.formats.runtimes.small_models import BATCH, MODELS, loss_fn

folder, rank, world, form = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
dist.init_process_group(
    "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world
)
spec = importlib.util.spec_from_file_location("exported", folder / "torch_pipeline.py")
assert spec is not None
assert spec.loader is not None
exported = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exported)

build, sample, target = MODELS[(folder / "model").read_text()]
model, batch = build(), sample(BATCH)
share = BATCH // exported.NUM_MICROBATCHES
modules, schedule = exported.build_schedule(
    model, (batch[:share],), rank, torch.device("cpu"), loss_fn
)
if form == "compute_comms":
    schedule._load_csv(str(folder / "schedule_comms.csv"), format=form)
stages = exported.STAGES_OF_RANK
is_first, is_last = 0 in stages[rank], sum(map(len, stages)) - 1 in stages[rank]
losses: list[torch.Tensor] = []
arguments = (batch,) if is_first else ()
keywords = {"target": target(BATCH), "losses": losses} if is_last else {}
schedule.step(*arguments, **keywords)
gradients = {
    name: parameter.grad
    for module in modules
    for name, parameter in module.named_parameters()
    if parameter.grad is not None
}
loss = sum(loss.item() for loss in losses) / len(losses) if losses else None
torch.save({"gradients": gradients, "loss": loss}, folder / f"rank{rank}.pt")
dist.destroy_process_group()
