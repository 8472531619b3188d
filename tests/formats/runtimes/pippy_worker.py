"""One rank of Accelerate that runs a model cut at exported split points; see test_training.py.

Arguments: the folder with the export, this rank, the number of ranks.
"""

import os
import sys
from pathlib import Path
from typing import Any

folder, rank, world = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import PartialState, prepare_pippy  # noqa: E402

from tests.formats.runtimes.small_models import BATCH, MODELS  # noqa: E402

store = f"file://{folder / 'store'}"
dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=int(world))
PartialState(cpu=True)
scope: dict[str, Any] = {}
exec((folder / "device_map.py").read_text(), scope)
build, sample, _ = MODELS["gpt"]
batch = sample(BATCH)
model = prepare_pippy(
    build().eval(),
    split_points=scope["split_points"],
    num_chunks=scope["num_chunks"],
    example_args=(batch[: BATCH // scope["num_chunks"]],),
)
with torch.no_grad():
    output = model(batch)
if int(rank) == int(world) - 1:  # with torch 2.13 Accelerate fails to send it to the others
    torch.save(output, folder / "output.pt")
dist.destroy_process_group()
