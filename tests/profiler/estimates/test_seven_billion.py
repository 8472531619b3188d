"""A Llama of 7 billion parameters on eight devices of 40 GB, with few and many micro-batches."""

import math

import pytest

from stagewright.core.cluster.accelerators import find_card_bytes
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def profile():
    from stagewright.core.requests.default_samples import default_sample
    from stagewright.core.requests.presets import find_preset
    from stagewright.profiler.estimates.estimate import estimate_spec

    found = find_preset("llama-7b")
    sample = default_sample(found.spec, 1, found.sequence_length)
    return estimate_spec(found.spec, sample, device="A100-40GB")


@pytest.mark.parametrize("microbatches", [64, 512])
def test_it_fits_with_many_micro_batches(profile, microbatches):
    """Receive buffers for every micro-batch of a step filled the devices at 512."""
    made = plan(profile, "8x40GB", PlanOptions(num_microbatches=microbatches, recompute="auto"))
    validate(made, profile, "8x40GB")
    assert made.options.precision == "bf16_mixed"
    assert made.bytes_per_parameter.total == 18
    for before, stage, after in zip(
        [None, *made.boundaries], made.stages, [*made.boundaries, None], strict=True
    ):
        sizes = (before.forward_bytes if before else 0, after.backward_bytes if after else 0)
        assert stage.memory.receive_buffers_bytes == 2 * sum(sizes)
        usable = find_card_bytes(40) - stage.reserved.total_bytes
        assert stage.memory.total_bytes <= stage.memory_limit_bytes == usable


@pytest.mark.parametrize(
    ("devices", "recompute", "microbatches", "needed_gb"),
    [
        # Measured under ZeRO-2, which keeps 11.8 GB of weights more: 33.55 GB a device (FlagPerf).
        ("8xA100-40GB", "layers", 1024, (18, 22)),
        ("8xA100-80GB", "layers", 1024, (18, 22)),
        ("4xA100-40GB", "layers", 64, (32, 36)),
        ("2xA100-80GB", "layers", 64, (62, 66)),  # said to run under FSDP
    ],
)
def test_it_fits_sharded_as_it_was_trained_by_others(
    profile, devices, recompute, microbatches, needed_gb
):
    """Whole weights and float32 gradients were counted, 50.6 GiB, and the first was refused."""
    options = PlanOptions(
        num_stages=1, max_replicas=None, strategies=("fully_shard",), recompute=recompute,
        num_microbatches=microbatches, precision="bf16_mixed",
    )  # fmt: skip
    made = plan(profile, devices, options)
    assert made.stages[0].strategy == "fully_shard"
    low, high = needed_gb
    assert low < made.stages[0].memory.total_bytes / 1e9 < high


def test_with_less_memory_it_says_by_how_much_it_does_not(profile):
    """18 bytes for each of 6.7 billion parameters are 121 GB, and eight devices of 16 have 128."""
    with pytest.raises(Infeasible) as caught:
        plan(profile, "8x16GB", PlanOptions(num_microbatches=512, recompute="auto"), deadline_s=20)
    error = caught.value
    assert error.required > error.available
    card = find_card_bytes(16)
    assert error.available == card - 666_632_192 - 688 * 2**20 - math.ceil(0.06 * card)
    assert f"({error.required} bytes)" in str(error)
    assert f"({error.available} bytes)" in str(error)
    assert "are reserved" in str(error)
