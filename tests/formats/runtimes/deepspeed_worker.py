"""One rank of DeepSpeed that trains an exported class for three steps; see test_training.py.

Arguments: the folder with the class, this rank, the number of ranks.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

folder, rank, world = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(
    DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_SIZE=world
)

import deepspeed  # noqa: E402
import torch  # noqa: E402

from tests.formats.runtimes.small_models import BATCH, MODELS, loss_fn  # noqa: E402

# It compiles an all-reduce over shared memory for minutes; gloo's own does.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]

deepspeed.init_distributed(
    "gloo",
    auto_mpi_discovery=False,
    init_method=f"file://{folder / 'store'}",
    rank=int(rank),
    world_size=int(world),
)
scope: dict[str, Any] = {}
exec((folder / "planned_pipeline_module.py").read_text(), scope)
settings = json.loads((folder / "settings.json").read_text())
build, sample, target = MODELS[settings["model"]]
module = scope["PlannedPipelineModule"](list(build().float()), loss_fn=loss_fn)
steps = scope["GRADIENT_ACCUMULATION_STEPS"]
engine, *_ = deepspeed.initialize(
    model=module,
    optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": BATCH // steps,
        "gradient_accumulation_steps": steps,
        "steps_per_print": 1000,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    },
)
inputs, targets = sample(BATCH), target(BATCH).float()
inputs = inputs.float() if inputs.is_floating_point() else inputs


def micro_batches():
    while True:
        yield from zip(inputs.chunk(steps), targets.chunk(steps), strict=True)


batches = micro_batches()
losses = [float(engine.train_batch(batches)) for _ in range(3)]
(folder / f"losses{rank}.json").write_text(json.dumps(losses))
torch.distributed.barrier()
# DeepSpeed leaves a joinable thread behind, which the interpreter's end turns into an abort.
os._exit(0)
