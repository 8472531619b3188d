"""Bands of layers: by the classes of their kernels, and together the model's."""

from __future__ import annotations

import numpy as np
import pytest

from stagewright.core.models.families import GPT2Config, GPT2Spec, ResNetSpec
from stagewright.profiler.estimates.basis import describe_basis
from stagewright.profiler.estimates.device_table import load_gpu_table
from stagewright.profiler.estimates.error_band import kernel_bands, list_layer_bands
from stagewright.profiler.estimates.estimate import estimate_spec, target
from stagewright.profiler.estimates.flops import OPERATION_CLASSES, Cost
from stagewright.profiler.estimates.layer_costs import LayerWork
from stagewright.profiler.estimates.roofline import CostTable, default_rates


def by_class(**times_s: float) -> list[float]:
    return [times_s.get(kind, 0.0) for kind in OPERATION_CLASSES]


def test_layers_differ_as_their_classes_do_and_together_keep_the_models_band():
    parts = [by_class(matmul=3.0), by_class(attention=1.0), by_class(matmul=2.0, attention=2.0)]
    times = np.array([3.0, 1.0, 4.0])
    bands = list_layer_bands(times, np.array(parts), {"matmul": 0.2, "attention": 0.6}, 0.1)
    assert bands == [0.057, 0.171, 0.114]
    assert times @ np.array(bands) / times.sum() == pytest.approx(0.1, abs=1e-3)


def test_what_was_not_measured_is_as_wide_as_the_widest():
    parts = [by_class(embedding=1.0), by_class(attention=1.0), by_class(matmul=1.0), by_class()]
    times = np.array([1.0, 1.0, 1.0, 0.0])
    bands = list_layer_bands(times, np.array(parts), {"matmul": 0.2, "attention": 0.6}, 0.1)
    assert bands[0] == bands[1] == pytest.approx(3 * bands[2], rel=0.01)
    assert bands[3] is None
    # The last second of both is spent waiting for the host, of which nothing is known either.
    parts = [by_class(matmul=1.0), by_class(matmul=1.0, attention=1.0)]
    bands = list_layer_bands(
        np.array([2.0, 2.0]), np.array(parts), {"matmul": 1, "attention": 3}, 1
    )
    assert bands[0] == bands[1]


@pytest.mark.parametrize("bands", [{}, dict.fromkeys(OPERATION_CLASSES, 0.0)])
def test_without_bands_of_classes_the_models_holds(bands):
    assert list_layer_bands(np.ones(2), np.ones((2, 6)) / 6, bands, 0.1) == [None] * 2


@pytest.mark.parametrize(("device", "precision"), [("H100", "bfloat16"), ("T4", "float32")])
def test_estimated_layers_have_bands_around_the_models(device, precision):
    pytest.importorskip("transformers")
    spec = GPT2Spec(family="gpt2", config=GPT2Config(n_layer=2))
    found = estimate_spec(spec, device=device, precision=precision)
    parts = [*found.layers, found.loss]
    times = [part.forward.median_s + part.backward.median_s for part in parts]
    bands = [part.error_band for part in parts]
    mean = sum(t * band for t, band in zip(times, bands, strict=True)) / sum(times)
    assert mean == pytest.approx(found.provenance.error_band, abs=1e-3)
    assert len(set(bands)) > 2


def test_convolutions_on_a_core_are_less_certain_than_products():
    found = estimate_spec(ResNetSpec(family="resnet"), device="CPU", num_threads=1)
    bands = {entry.layer.name: entry.error_band for entry in found.layers}
    assert bands["conv1"] > 2 * bands["fc"]


def test_lists_run_as_long_as_their_classes_together():
    device = target("A100", "bfloat16").device
    costs = [Cost("matmul", 10**12, 10**8, (1, 8192, 8192, 8192)), Cost("elementwise", 0, 10**9)]
    table, rates = CostTable([costs, costs[1:]]), default_rates(device, "bfloat16")
    found = table.seconds_by_class(rates)
    assert found.sum(axis=1) == pytest.approx(table.seconds(rates))
    assert found[0, OPERATION_CLASSES.index("matmul")] > 0
    assert found[1, OPERATION_CLASSES.index("matmul")] == 0


def test_the_basis_says_which_bands_were_measured():
    work = [LayerWork(forward=(Cost("matmul", 1, 1), Cost("embedding", 0, 1)))]
    phrases = describe_basis(target("H100").device, "bfloat16", work)
    bands = kernel_bands(target("H100").device, "bfloat16")
    assert bands == load_gpu_table().kernel_bands["tensor"]
    assert "embedding" not in bands
    assert phrases[0] == f"matrix products: rule (kernels ±{bands['matmul']:.0%})"
    widest = max(bands.values())
    assert phrases[1] == f"embeddings: rule (kernels ±{widest:.0%}, not measured)"
