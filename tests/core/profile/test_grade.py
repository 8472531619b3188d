"""The verdict on a profile follows its worst aspect, and says which."""

import pytest

from stagewright.api.http.examples import example_profile
from stagewright.core.profile.grade import grade
from stagewright.core.profile.profile import Profile


def profile(*, spread=0.01, error=0.0, source="measured", band=None, throttled=()):
    raw = example_profile()
    for layer in raw["layers"]:
        for timing in (layer["forward"], layer["backward"]):
            timing["spread_s"] = spread * timing["median_s"]
    whole = {"median_s": 1.0}
    raw["reconciliation"] = {
        "whole_forward": whole, "whole_backward": whole, "relative_error": error,
    }  # fmt: skip
    raw["provenance"] = {"source": source, "error_band": band}
    if throttled:
        clocks = {"before_mhz": 1000, "after_mhz": 900, "throttled_by": throttled}
        raw["provenance"]["clocks"] = clocks
    return Profile.model_validate(raw)


@pytest.mark.parametrize(
    ("aspects", "verdict", "words"),
    [
        ({}, "good", ""),
        ({"error": 0.09, "spread": 0.09}, "good", ""),
        ({"error": -0.2}, "fair", "-20%"),
        ({"error": 0.3}, "poor", "+30%"),
        ({"spread": 0.2}, "fair", "20%"),
        ({"spread": 0.3, "error": 0.2}, "poor", "30%"),
        ({"throttled": ("thermal",)}, "fair", "thermal"),
        ({"source": "estimated", "band": 0.2}, "fair", "20%"),
        ({"source": "estimated", "band": 0.45}, "poor", "45%"),
        ({"source": "estimated"}, "poor", "not known"),
    ],
)
def test_the_worst_aspect_counts(aspects, verdict, words):
    found = grade(profile(**aspects))
    assert found.verdict == verdict
    assert words in str(found)
    assert f"profile quality: {verdict}" in str(found)
