"""Every layer of a profile has its own entry in every list of measurements."""

from types import SimpleNamespace

import pytest

from stagewright.core.graph.graph import Layer
from stagewright.profiler.measure.timed_passes import Samples
from stagewright.profiler.measure.to_profile import Measurements, build_profile
from tests.core.affine import CPU

ENTRIES = 3
"""Two layers and the loss behind them."""


def measurements(cost_classes):
    layers = [Layer(name=name, module_type="Linear", parameter_bytes=0) for name in ("a", "b")]
    samples = Samples()
    samples.device_s["forward"].append(1.0)
    samples.device_s["backward"].append(2.0)
    return Measurements(
        captured=SimpleNamespace(graph=SimpleNamespace(layers=layers)),
        runs=[SimpleNamespace(saved_bytes=1)] * ENTRIES,
        first=SimpleNamespace(output_bytes=[1] * ENTRIES, workspace_bytes=[1] * ENTRIES),
        samples=[samples] * ENTRIES,
        cost_classes=cost_classes,
        whole=SimpleNamespace(forward_s=[]),
        notes=(),
        on_its_own=False,
    )


@pytest.mark.parametrize("cost_classes", [["one"], ["one", "two", "three"]])
def test_layers_and_cost_classes_must_be_equally_many(cost_classes):
    """Cause: pairing stopped at the shortest list, so a layer without a class was left out."""
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is"):
        build_profile(measurements(cost_classes), None, CPU)
