"""The first run of every layer: what it is given, what it keeps, and its scratch memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from ...capture.program.program import tensors_of
from ...core.profile.profile import SavedStorage
from .error_attribution import blamed
from .layer_run import LayerRun, bytes_of
from .memory_run import memory_run
from .precision import Context
from .saved_storages import Storage, StorageTable


@dataclass(frozen=True)
class FirstRun:
    """Findings of the first run; lists have one entry per layer.

    Attributes:
        values: What every node read by some layer held.
        storages: The storage table of the layers that belong to the model.
        workspace_bytes: Of the forward or the backward, whichever needs more (see `MemoryRun`),
            with the gradients that wait meanwhile for a layer in front. The last layer's is the
            loss's too, which runs behind it wherever it is.
    """

    values: dict[fx.Node, Any]
    storages: tuple[SavedStorage, ...]
    output_bytes: list[int]
    workspace_bytes: list[int]


def first_run(
    model: nn.Module,
    runs: Sequence[LayerRun],
    inputs: Mapping[fx.Node, Tensor],
    num_layers: int,
    context: Context,
) -> FirstRun:
    """Run every layer once, forwards and backwards, and fill in ``saved_bytes`` of each.

    The model's trainable parameters have gradients by now. Of the runs the first ``num_layers`` are
    its layers; the loss follows them if there is one.
    """
    table = StorageTable(model, inputs.values())
    values: dict[fx.Node, Any] = dict(inputs)
    device = next(iter(inputs.values())).device
    output_bytes, forward_bytes, backward_bytes = [], [], []
    for index, run in enumerate(runs):
        with blamed(run):
            found = memory_run(run, values, table, device, context)
        table.keep(index, found.kept)
        for node, value in zip(run.writes, found.produced, strict=True):
            if node is not None:
                values[node] = value
        output_bytes.append(bytes_of(found.produced))
        forward_bytes.append(found.forward_bytes)
        backward_bytes.append(found.backward_bytes)
        run.saved_bytes = table.bytes_of(index)
    waiting = waiting_gradients(runs, values)
    workspace_bytes = [
        max(forward, backward + passing)
        for forward, backward, passing in zip(forward_bytes, backward_bytes, waiting, strict=True)
    ]
    if len(runs) > num_layers:
        outputs = _held_outputs(runs[-1], values, table)
        # The loss is no layer of the plan, so the last layer is charged with the larger of both.
        workspace_bytes[num_layers - 1] = max(workspace_bytes[num_layers - 1 :]) + outputs
    return FirstRun(values, table.records(num_layers), output_bytes, workspace_bytes)


def waiting_gradients(runs: Sequence[LayerRun], values: Mapping[fx.Node, Any]) -> list[int]:
    """Sum for every run the bytes of other layers' gradients alive during its backward.

    A value made further in front and read further behind has one, as skips across layers do.
    """
    last_reader: dict[fx.Node, int] = {}
    for index, run in enumerate(runs):
        for node, needed in zip(run.reads, run.needs_grad, strict=True):
            if needed:
                last_reader[node] = index
    waiting = [0] * len(runs)
    for maker, run in enumerate(runs):
        for made in run.writes:
            if made is not None and made in last_reader:
                size = bytes_of(values[made])
                for index in range(maker + 1, last_reader[made]):
                    waiting[index] += size
    return waiting


def _held_outputs(loss: LayerRun, values: Mapping[fx.Node, Any], table: StorageTable) -> int:
    """Sum the model outputs that only the caller of the loss keeps alive."""
    storages = {
        storage.key: storage
        for node in loss.reads
        for storage in map(Storage.of, tensors_of(values[node]))
    }
    return sum(s.size_bytes for s in storages.values() if not table.counts(s))
