"""Small documents for tests: seeded random profiles and clusters with every feature in them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.graph.graph import Boundary, Layer, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.profile.profile import (
    LayerProfile,
    LossProfile,
    Profile,
    SavedStorage,
    SplitLayer,
    TensorSplit,
    Timing,
)


def boundary(
    after: int, *, forward_bytes: int = 0, backward_bytes: int | None = None, legal: bool = True
) -> Boundary:
    """A boundary of one-byte elements; the gradient's bytes are at most the activation's."""
    backward_bytes = forward_bytes if backward_bytes is None else backward_bytes
    tensors = (
        TensorSpec(name="hidden", shape=(backward_bytes,), dtype="uint8", requires_grad=True),
        TensorSpec(name="mask", shape=(forward_bytes - backward_bytes,), dtype="uint8"),
    )
    return Boundary(
        after=after,
        tensors=tuple(tensor for tensor in tensors if tensor.size_bytes),
        legal=legal,
        reason="" if legal else "a test forbids it",
    )


def chain_profile(
    forward_s: Sequence[float],
    backward_s: Sequence[float] | None = None,
    *,
    forward_bytes: int = 0,
    parameter_bytes: int = 0,
    saved_bytes: int = 0,
) -> Profile:
    """A chain of layers, their backward twice the forward unless given; equal bytes everywhere."""
    backward_s = [2 * time_s for time_s in forward_s] if backward_s is None else backward_s
    layers = tuple(
        LayerProfile(
            layer=Layer(
                name=f"layer.{index}",
                module_fqns=(f"layer.{index}",),
                parameter_bytes=parameter_bytes,
            ),
            forward=Timing(median_s=forward),
            backward=Timing(median_s=backward),
            saved_activation_bytes=saved_bytes,
        )
        for index, (forward, backward) in enumerate(zip(forward_s, backward_s, strict=True))
    )
    return Profile(
        model="Chain",
        chain_break="",
        layers=layers,
        boundaries=tuple(
            boundary(after, forward_bytes=forward_bytes) for after in range(len(layers) - 1)
        ),
        parameters=tuple(
            Parameter(
                names=(f"layer.{index}.weight",),
                size_bytes=parameter_bytes,
                numel=parameter_bytes // 4,
                layers=(index,),
            )
            for index in range(len(layers))
            if parameter_bytes
        ),
        storages=tuple(
            SavedStorage(size_bytes=saved_bytes, layers=(index,))
            for index in range(len(layers))
            if saved_bytes
        ),
    )


def random_profile(
    seed: int, num_layers: int, *, ties: int = 1, illegal: float = 0.15, storages: bool = True
) -> Profile:
    """Uneven layers, shared storages, buffers, frozen and tied weights, a loss, illegal cuts."""
    draw = random.Random(seed)
    names = [f"block.{index}" for index in range(num_layers)]
    layers = tuple(
        LayerProfile(
            layer=Layer(name=name, module_type="Block", module_fqns=(f"{name}.fc", "shared")),
            forward=Timing(median_s=draw.lognormvariate(0, 1) * 1e-3),
            backward=Timing(median_s=draw.lognormvariate(0.7, 1) * 1e-3),
            saved_activation_bytes=draw.randrange(2000),
            workspace_bytes=draw.randrange(1000),
        )
        for name in names
    )
    boundaries = []
    for after in range(num_layers - 1):
        size = draw.choice([0, draw.randrange(1, 4000)])
        boundaries.append(
            boundary(
                after,
                forward_bytes=size,
                backward_bytes=draw.choice([size, size // 2]),
                legal=draw.random() >= illegal,
            )
        )
    parameters = [
        _parameter(draw, f"{name}.fc.weight", (index,)) for index, name in enumerate(names)
    ]
    for index in range(ties if num_layers > 1 else 0):
        users = draw.sample(range(num_layers), draw.choice([2, 2, min(3, num_layers)]))
        parameters.append(_parameter(draw, f"tied.{index}", tuple(sorted(users)), trainable=True))
    parameters.append(Parameter(names=("unused",), size_bytes=10**9))
    return Profile(
        model="Random",
        inputs=(TensorSpec(name="x", shape=(2, 8), dtype="float32"),),
        input_structure="x",
        layers=layers,
        boundaries=tuple(boundaries),
        parameters=tuple(parameters),
        storages=_storages(draw, num_layers) if storages else (),
        loss=LossProfile(
            forward=Timing(median_s=draw.random() * 1e-3),
            backward=Timing(median_s=draw.random() * 1e-3),
            saved_activation_bytes=draw.randrange(500),
        )
        if draw.random() < 0.7
        else None,
        notes=("made up",),
    )  # fmt: skip


def _parameter(
    draw: random.Random, name: str, layers: tuple[int, ...], *, trainable: bool | None = None
) -> Parameter:
    numel = draw.randrange(1, 1000)
    return Parameter(
        names=(name,),
        size_bytes=numel * draw.choice([2, 4]),
        numel=numel,
        layers=layers,
        kind="parameter" if trainable or draw.random() < 0.8 else "buffer",
        trainable=draw.random() < 0.8 if trainable is None else trainable,
    )


def _storages(draw: random.Random, num_layers: int) -> tuple[SavedStorage, ...]:
    return tuple(
        SavedStorage(
            size_bytes=draw.randrange(1, 2000),
            layers=tuple(
                sorted(draw.sample(range(num_layers), min(num_layers, draw.choice([1, 1, 2, 3]))))
            ),
        )
        for _ in range(2 * num_layers)
    )


def random_cluster(seed: int, num_devices: int, *, memory_bytes: int | None = None) -> Cluster:
    """One link level; a memory limit varies by a third from device to device."""
    draw = random.Random(seed)
    return Cluster(
        devices=tuple(
            Device(
                name=f"gpu:{index}",
                memory_bytes=None
                if memory_bytes is None
                else int(memory_bytes * draw.uniform(0.75, 1.25)),
            )
            for index in range(num_devices)
        ),
        levels=(
            LinkLevel(
                group_size=max(num_devices, 1),
                latency_s=draw.random() * 1e-4,
                bandwidth_bytes_per_s=10 ** draw.uniform(5.5, 8),
            ),
        ),
    )


def two_level_cluster(num_devices: int, *, memory_bytes: int | None = None) -> Cluster:
    """Pairs of devices on a fast link, pairs joined by a slow one."""
    even = num_devices + num_devices % 2
    return Cluster(
        devices=tuple(
            Device(name=f"gpu:{index}", memory_bytes=memory_bytes) for index in range(num_devices)
        ),
        levels=(
            LinkLevel(name="pair", group_size=2, latency_s=1e-6, bandwidth_bytes_per_s=1e8),
            LinkLevel(name="rack", group_size=max(4, even * 2), latency_s=1e-4,
                      bandwidth_bytes_per_s=1e6),
        ),
    )  # fmt: skip


def split_profile() -> Profile:
    """Four equal layers that two devices split, exchanging 8 MB forward and 16 MB backward."""
    profile = chain_profile([0.01] * 4, parameter_bytes=4_000_000, forward_bytes=1000)
    own = SplitLayer(
        compute_share=0.5, parameter_bytes=2_000_000, forward_reduced_bytes=8_000_000,
        forward_reductions=1, backward_reduced_bytes=16_000_000, backward_reductions=2,
    )  # fmt: skip
    return profile.model_copy(update={"splits": (TensorSplit(degree=2, layers=(own,) * 4),)})
