"""Normalisation that capture could not keep as a module: its running statistics are out of reach.

torch's own classes are called as modules wherever they are. A class of the user's that inherits
from one is traced into operations, which move the running statistics as they run, each micro-batch
by itself: nothing tells from outside what they saw.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx
from torch.nn.modules.batchnorm import _NormBase

from ...capture.program.mutation import mutated_inputs
from ...capture.program.program import Program, resolve
from ...capture.program.segment import Segment
from ...core.errors import PlanMismatch


def check_statistics_in_reach(program: Program, stages: Iterable[Segment]) -> None:
    """See that in these stages running statistics are moved by modules alone.

    Args:
        program: The captured model.
        stages: Those that several replicas share, or whose statistics are deferred.

    Raises:
        PlanMismatch: Operations move some; the message names their module.
    """
    held = {path for stage in stages for path, _ in stage.named_modules()}
    for node in program.graph.nodes:
        changed = mutated_inputs(node, program) if node.op == "call_function" else []
        for path in filter(None, (_norm_of(each, program) for each in changed)):
            if path in held:
                found = type(resolve(program.model, path)).__name__
                raise PlanMismatch(
                    f"{path} ({found}) was captured as single operations, whose running statistics "
                    "cannot be deferred, nor shared by replicas; use torch.nn's own class there, "
                    "or plan without replicas of its stage (max_replicas=1) and leave out "
                    "batch_statistics"
                )


def _norm_of(node: fx.Node, program: Program) -> str:
    """The path of the module in training that this is the running mean of; empty for others."""
    path, _, name = str(node.target).rpartition(".")
    if node.op != "get_attr" or name != "running_mean":
        return ""
    try:
        module = resolve(program.model, path)
    except AttributeError:
        return ""
    return path if isinstance(module, _NormBase) and module.training else ""
