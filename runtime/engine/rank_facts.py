"""Facts about a rank's plan, options and model that have to be equal on all ranks."""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from ...core.document import Record, content_digest
from ...core.graph.graph import Graph
from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def list_facts(
    model: nn.Module, graph: Graph, plan: Plan, schedule: Schedule, options: Mapping[str, object]
) -> dict[str, list[str]]:
    """Return what `check_consistency` compares, the most telling facts first.

    Of a plan only what is run counts: plans that ranks made by themselves may differ in notes. Of a
    model, values of weights do not count, because each stage's are used on its own ranks alone.
    """
    return {
        "the number of micro-batches per step": [str(schedule.num_microbatches)],
        "the layers per stage": ["-".join(map(str, plan.balance))],
        "the replicas per stage": ["-".join(str(len(ranks)) for ranks in schedule.stage_ranks)],
        "the tensor degree per stage": ["-".join(str(stage.tensor) for stage in plan.stages)],
        "the shapes of the micro-batch": [
            f"{spec.name} {spec.dtype} {spec.shape}" for spec in plan.inputs
        ],
        "the schedule": [f"{schedule.name} {content_digest(schedule)}"],
        "the tensors between stages": [
            *_lines(plan.boundaries),
            *(
                f"stage {send.source} to {send.target}: {send.tensors}"
                for send in plan.direct_sends
            ),
        ],
        "the options": [f"{name}={_without_address(value)}" for name, value in options.items()],
        "the model": [type(model).__qualname__],
        "the model's modules": [_describe_module(*pair) for pair in model.named_modules()],
        "the model's parameters and buffers": list(_list_tensors(model)),
        "the captured graph": [
            f"captured by {graph.mode} in {'training' if graph.training else 'evaluation'} mode",
            *_lines(graph.layers),
            *_lines(graph.operations),
            *_lines(graph.parameters),
        ],
    }


def _lines(records: Iterable[Record]) -> list[str]:
    return [_without_address(record.model_dump_json()) for record in records]


def _list_tensors(model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kind = "trainable" if parameter.requires_grad else "frozen"
        yield f"{name} {parameter.dtype} {tuple(parameter.shape)} {kind}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name} {buffer.dtype} {tuple(buffer.shape)} buffer"


def _describe_module(path: str, module: nn.Module) -> str:
    kind = type(module)
    words = f"{path or '(the whole)'}: {kind.__qualname__}({_without_address(module.extra_repr())})"
    words += "" if module.training else " in evaluation mode"
    # Layers called as written are no operations in the graph, so their code is compared as text.
    return words if kind.__module__.startswith("torch.") else f"{words} {_source_digest(kind)}"


def _source_digest(kind: type[nn.Module]) -> str:
    """Return a checksum of a class's ``forward``: of its text, or its bytecode if there is none."""
    function = inspect.unwrap(kind.forward)
    try:
        content = inspect.getsource(function).encode()
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        content = code.co_code if code is not None else b""
    return f"forward {zlib.crc32(content):08x}"


def _without_address(value: object) -> str:
    """Return a value's text without addresses in memory, which differ between processes."""
    return _ADDRESS.sub("", str(value))
