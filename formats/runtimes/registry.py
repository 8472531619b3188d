"""Registry of the runtimes that plans can be exported to and cuts imported from."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.profile.profile import Profile
from ..expressible import check_expressible
from ..target import Export, ImportedCut, ModelLayers, Target
from . import (
    accelerate,
    colossalai,
    deepspeed,
    llama_cpp,
    maxtext,
    megatron,
    pipedream,
    sglang,
    tensorrt_llm,
    torch_pipelining,
    torchgpipe,
    torchtitan,
    vllm,
)

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        torch_pipelining.TARGET,
        torchtitan.TARGET,
        megatron.TARGET,
        deepspeed.TARGET,
        accelerate.TARGET,
        vllm.TARGET,
        sglang.TARGET,
        tensorrt_llm.TARGET,
        colossalai.TARGET,
        maxtext.TARGET,
        llama_cpp.TARGET,
        torchgpipe.TARGET,
        pipedream.TARGET,
    )
}

MAX_TEXT = 2**20
"""Characters of a file that cuts are read from."""


def find_target(name: str) -> Target:
    """Return a target by its name. Raises: InvalidInput."""
    target = TARGETS.get(name)
    if target is None:
        close = get_close_matches(name, TARGETS, n=1)
        hint = f"did you mean {close[0]!r}? There" if close else "there"
        raise InvalidInput(f"no target is called {name!r}; {hint} are {', '.join(TARGETS)}")
    return target


def export(plan: Plan, target: str) -> Export:
    """Write a plan in the form of another runtime.

    Args:
        plan: A plan that the runtime can express; plan with ``--for`` to be sure of one.
        target: Name of the runtime, such as ``megatron``.

    Raises:
        InvalidInput: There is no such target.
        Inexpressible: The runtime lacks something the plan uses; each is named with the option
            that avoids it.
    """
    found = find_target(target)
    check_expressible(plan, found)
    return found.write(plan)


def import_cut(text: str, target: str, model: Profile | ModelLayers) -> ImportedCut:
    """Read a cut in the form of another runtime, for a model.

    Raises:
        InvalidInput: There is no such target, or the text is not in its form.
    """
    if len(text) > MAX_TEXT:
        raise InvalidInput(f"the text has {len(text)} characters, at most {MAX_TEXT} are read")
    layers = model if isinstance(model, ModelLayers) else ModelLayers.of(model)
    found = find_target(target)
    return replace(found.read(text, layers), inference=found.rules.inference)
