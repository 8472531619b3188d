"""Data loading for pipelines across processes."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, StackDataset

from .core.errors import InvalidInput
from .runtime.distributed import DistributedPipeline
from .runtime.pipeline import Pipeline


class PipelineLoader:
    """Loader whose batches all ranks agree on, each rank loading only what its stages use.

    Every rank makes one over equal data::

        loader = PipelineLoader(pipeline, images, labels, seed=0, num_workers=4)
        for epoch in range(10):
            for inputs, target in loader.epoch(epoch):
                loss = pipeline.step(*inputs, target=target)

    Ranks of the first stage load inputs, those of the last one targets, all others nothing. An
    incomplete last batch is left out.

    Args:
        pipeline: The pipeline to load for; that of a `Training` is its ``pipeline``.
        inputs: Map-style dataset of the model's inputs: a tensor per sample, or a tuple of them.
        targets: Map-style dataset of targets, of equal length. `None` if items of ``inputs`` are
            pairs of inputs and target, which first and last stage then load whole.
        seed: Seed of the order of every epoch.
        shuffle: Whether to draw a new order for each epoch.
        batch_size: Samples per batch; the plan's if `None`.
        **options: Further arguments of ``torch.utils.data.DataLoader``, such as ``num_workers``.

    Raises:
        InvalidInput: There are fewer samples than in one batch, or not one target per sample.
            While loading: an item of pairs has not two parts.
        PlanMismatch: The ranks disagree on the number of samples, the seed or the batch size.
    """

    def __init__(
        self,
        pipeline: DistributedPipeline | Pipeline,
        inputs: Dataset[Any],
        targets: Dataset[Any] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        plan, samples = pipeline.plan, len(cast(Sized, inputs))
        size = batch_size or plan.inputs[0].shape[0] * plan.num_microbatches
        found = "pairs" if targets is None else f"{len(cast(Sized, targets))} targets"
        self._loads_inputs, self._loads_targets = True, True
        if isinstance(pipeline, DistributedPipeline):
            self._loads_inputs = 0 in pipeline.stages
            self._loads_targets = plan.num_stages - 1 in pipeline.stages
            # Compared first: a rank that refused its own data would leave the others waiting.
            order = (
                f"seed {seed}, {samples} inputs and {found} in batches of {size}, shuffle={shuffle}"
            )
            pipeline.check_agreement({"the order of the data": [order]})
        if samples < size or (targets is not None and len(cast(Sized, targets)) != samples):
            raise InvalidInput(
                f"there are {samples} inputs and {found} for batches of {size}; give one target "
                "per input, and at least one batch"
            )
        self._are_pairs = targets is None
        self._batches = _AgreedBatches(samples, size, seed if shuffle else None)
        parts = [inputs] * self._loads_inputs + [targets] * (
            self._loads_targets and targets is not None
        )
        self._loader: DataLoader[Any] | None = None
        if self._loads_inputs or self._loads_targets:
            data = inputs if self._are_pairs else StackDataset(*cast("list[Dataset[Any]]", parts))
            self._loader = DataLoader(data, batch_sampler=self._batches, **options)

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, number: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield inputs and target of each batch; ``()`` and `None` where a rank needs none."""
        self._batches.epoch = number
        if self._loader is None:
            yield from (((), None) for _ in range(len(self)))
            return
        for parts in self._loader:
            if self._are_pairs and len(parts) != 2:
                raise InvalidInput(
                    f"items of inputs have {len(parts)} parts, but without targets= each is a pair "
                    "of inputs and target; put several inputs into a tuple: ((ids, mask), label)"
                )
            inputs = parts[0] if self._loads_inputs else ()
            yield (
                tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,),
                parts[-1] if self._loads_targets else None,
            )


class _AgreedBatches(Sampler[list[int]]):
    """Batches of sample numbers that follow from seed and epoch alone."""

    def __init__(self, samples: int, size: int, seed: int | None) -> None:
        self._samples, self._size, self._seed = samples, size, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self._samples // self._size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._samples)
        if self._seed is not None:
            # A large factor, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
            order = torch.randperm(self._samples, generator=generator)
        for number in range(len(self)):
            yield order[number * self._size : (number + 1) * self._size].tolist()
