"""``stagewright checkpoint``: inspect a training run's checkpoints, or convert one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ...core.errors import InvalidInput
from ...core.text_table import format_table
from ...core.units import count, format_bytes
from ..support.output import JsonFlag, check_writable, emit, say, say_next

if TYPE_CHECKING:
    from ...runtime.checkpoint_files.manifest import Checkpoint


def command(
    action: Annotated[
        Literal["inspect", "convert"],
        Argument(metavar="ACTION", help="List the contents, or write a single file."),
    ],
    folder: Annotated[
        Path, Argument(metavar="FOLDER", help="Folder given to save_checkpoint, or one step in it.")
    ],
    output: Annotated[
        Path | None,
        Argument(metavar="OUT", help="For convert: output file (.safetensors, .pt or .pth)."),
    ] = None,
    step: Annotated[int | None, Option(min=0, help="Step to use. Default: the latest.")] = None,
    with_optimizer: Annotated[
        bool, Option("--with-optimizer", help="For convert: include the optimizer's state.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Inspect the checkpoints of a training run, or convert one to a single file.

    inspect lists all tensors and the optimizer's settings without loading them or torch.
    convert writes a state dict or a safetensors file, whatever plan the checkpoint is from.
    """
    if action == "inspect":
        if output is not None or with_optimizer:
            raise InvalidInput("OUT and --with-optimizer require convert")
        _inspect(folder, step, as_json=as_json)
    else:
        if output is None:
            raise InvalidInput("missing output file: stagewright checkpoint convert FOLDER OUT")
        _convert(folder, output, step, with_optimizer=with_optimizer, as_json=as_json)


def _inspect(folder: Path, step: int | None, *, as_json: bool) -> None:
    from ...runtime.checkpoint_files.step_folder import find_step, list_steps

    path, record = find_step(folder, step)
    steps = list_steps(path.parent)
    emit(
        json.dumps(_as_data(path, record, steps), indent=2)
        if as_json
        else f"{_table(record)}\n\n{_summary(path, record, steps)}"
    )
    chosen = "" if step is None else f" --step {step}"
    follow = f"stagewright checkpoint convert {shlex.quote(str(folder))} model.safetensors{chosen}"
    say_next(follow, quiet=as_json)


def _convert(
    folder: Path, output: Path, step: int | None, *, with_optimizer: bool, as_json: bool
) -> None:
    from ...runtime.checkpoint.convert import convert_checkpoint

    check_writable(output)
    record = convert_checkpoint(folder, output, step=step, with_optimizer=with_optimizer)
    tensors = record.tensors(optimizer=with_optimizer)
    data = {
        "file": str(output),
        "step": record.step,
        "tensors": len(tensors),
        "size_bytes": sum(tensor.size_bytes for tensor in tensors.values()),
    }
    text = f"{output}: {count(len(tensors), 'tensor')} of step {record.step}, "
    text += _format_size(record, with_optimizer)
    emit(json.dumps(data) if as_json else text)
    say(f"wrote {output}", quiet=as_json)
    chosen = "" if step is None else f" --step {step}"
    say_next(f"stagewright checkpoint inspect {shlex.quote(str(folder))}{chosen}", quiet=as_json)


def _table(record: Checkpoint) -> str:
    """Format one row per tensor of the model, with the state the optimizer keeps for it."""
    other_names: dict[str, list[str]] = {}
    for alias, name in record.aliases.items():
        other_names.setdefault(name, []).append(alias)
    rows = [("tensor", "shape", "dtype", "size", "group", "optimizer state")]
    for name, tensor in record.model.items():
        state = record.optimizer.parameters.get(name) if record.optimizer else None
        kept = [*state.slots, *state.values] if state else []
        rows.append(
            (
                " = ".join([name, *other_names.get(name, [])]),
                "x".join(map(str, tensor.shape)) or "scalar",
                tensor.dtype,
                format_bytes(tensor.size_bytes),
                str(state.group) if state else "",
                ", ".join(kept),
            )
        )
    return format_table(rows)


def _summary(path: Path, record: Checkpoint, steps: tuple[int, ...]) -> str:
    lines = [
        f"{path}: step {record.step}, saved by {count(record.ranks, 'rank')}"
        + (f" under {record.plan}" if record.plan else ""),
        f"{count(len(record.model), 'tensor')} in the model, {_format_size(record, False)}; "
        f"{format_bytes(sum(record.files.values()))} on disk in total",
    ]
    if record.optimizer is None:
        lines.append("no optimizer state")
    else:
        lines.append(
            f"{record.optimizer.kind} state for {len(record.optimizer.parameters)} of them"
        )
        for index, group in enumerate(record.optimizer.groups):
            values = ", ".join(f"{key} {value}" for key, value in group.items())
            lines.append(f"  group {index}: {values}")
    if record.random:
        lines.append(f"random number generators of {count(len(record.random), 'rank')}")
    if record.extra:
        lines.append(f"extra: {', '.join(record.extra)}")
    lines.append(f"available steps: {', '.join(map(str, steps))}")
    return "\n".join(lines)


def _format_size(record: Checkpoint, with_optimizer: bool) -> str:
    tensors = record.tensors(optimizer=with_optimizer).values()
    return format_bytes(sum(tensor.size_bytes for tensor in tensors))


def _as_data(path: Path, record: Checkpoint, steps: tuple[int, ...]) -> dict[str, Any]:
    tensors = record.tensors()
    return {
        "path": str(path),
        "steps": list(steps),
        "size_bytes": sum(tensor.size_bytes for tensor in tensors.values()),
        "tensors": {
            key: {**tensor.model_dump(mode="json"), "size_bytes": tensor.size_bytes}
            for key, tensor in tensors.items()
        },
        "checkpoint": json.loads(record.to_json()),
    }
