"""Plans with checkpointed layers, reduced to plans without, by a second computation.

What is checkpointed is derived again, and checkpoints become layers that cost what running them
twice costs; what remains is checked like any other plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...core.graph.tensors import TensorSpec
from ...core.plan.plan import Plan, Stage
from ...core.profile.profile import Profile, SavedStorage


def checkpoint_faults(plan: Plan, profile: Profile) -> Iterator[str]:
    """Yield what is wrong with the layers that a plan says are checkpointed."""
    expected: set[tuple[int, int]] = set()
    if plan.options.recompute == "layers" and plan.options.objective != "latency":
        expected = set(_expect_checkpoints(profile))
    for number, stage in enumerate(plan.stages):
        first, last = stage.first_layer, stage.first_layer + stage.num_layers
        wanted = {span for span in expected if first <= span[0] and span[1] <= last}
        if set(stage.checkpoints) != wanted:
            yield (
                f"stage {number}: checkpoints are {sorted(stage.checkpoints)}, "
                f"expected {sorted(wanted)}"
            )


def reduce_checkpoints(plan: Plan, profile: Profile) -> tuple[Plan, Profile]:
    """Return plan and profile with checkpoints as costs of layers."""
    if plan.options.recompute != "layers":
        return plan, profile
    spans = [span for stage in plan.stages for span in stage.checkpoints]
    options = plan.options.model_copy(update={"recompute": "never"})
    stages = tuple(map(_forget, plan.stages))
    reduced = plan.model_copy(update={"options": options, "stages": stages})
    return reduced, _run_twice(profile, spans)


def _forget(stage: Stage) -> Stage:
    if stage.recompute != "layers":
        return stage
    return stage.model_copy(update={"recompute": "never", "checkpoints": ()})


def _expect_checkpoints(profile: Profile) -> Iterator[tuple[int, int]]:
    """Yield the runs of layers between legal cuts that save at least twice what enters them."""
    begin = 0
    for end in range(1, len(profile.layers) + 1):
        if end < len(profile.layers) and not profile.boundaries[end - 1].legal:
            continue
        inside = profile.layers[begin:end]
        entering = sum(tensor.size_bytes for tensor in _entering(profile, begin))
        saved = _saved_between(profile, begin, end)
        if entering and saved >= 2 * entering and not any(one.layer.stateful for one in inside):
            yield begin, end
        begin = end


def _entering(profile: Profile, layer: int) -> tuple[TensorSpec, ...]:
    return tuple(profile.boundaries[layer - 1].tensors if layer else profile.inputs)


def _saved_between(profile: Profile, begin: int, end: int) -> int:
    if profile.storages:
        return sum(
            one.size_bytes
            for one in profile.storages
            if any(begin <= layer < end for layer in one.layers)
        )
    return sum(one.saved_activation_bytes for one in profile.layers[begin:end])


def _run_twice(profile: Profile, spans: list[tuple[int, int]]) -> Profile:
    layers = list(profile.layers)
    readers: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    apart: list[SavedStorage] = []
    inside: set[int] = set()
    for begin, end in spans:
        saved = _saved_between(profile, begin, end)
        for tensor in _entering(profile, begin):
            if not profile.edges:  # names need not stand for tensors
                apart.append(SavedStorage(size_bytes=tensor.size_bytes, layers=(begin,)))
                continue
            readers.setdefault(tensor.name, set()).add(begin)
            sizes[tensor.name] = tensor.size_bytes
        for at in range(begin, end):
            one = layers[at]
            twice = one.forward.median_s + one.backward.median_s
            layers[at] = one.model_copy(
                update={
                    "backward": one.backward.model_copy(update={"median_s": twice}),
                    "saved_activation_bytes": 0,
                    "workspace_bytes": one.workspace_bytes + saved,
                }
            )
            inside.add(at)
    storages = apart + [
        SavedStorage(size_bytes=sizes[name], layers=tuple(sorted(at)))
        for name, at in readers.items()
    ]
    if profile.storages:
        outside = [(one.size_bytes, set(one.layers) - inside) for one in profile.storages]
    else:
        outside = [
            (one.saved_activation_bytes, {at} - inside) for at, one in enumerate(profile.layers)
        ]
    storages += [
        SavedStorage(size_bytes=size, layers=tuple(sorted(at))) for size, at in outside if at
    ]
    return profile.model_copy(update={"layers": tuple(layers), "storages": tuple(storages)})
