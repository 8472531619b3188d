"""The commands that follow, as words to paste."""

from pathlib import Path

import pytest

from stagewright.cli.support.next_steps import (
    command_line,
    devices_like,
    drop_flags,
    suggest_planning,
)
from tests.builders import chain_profile
from tests.core.affine import affine_profile


@pytest.mark.parametrize(
    ("device", "name", "devices"),
    [
        ("cpu", "AMD EPYC", "2xcpu"),
        ("cuda:0", "NVIDIA A100-SXM4-80GB", "4xA100-80GB"),
        ("cuda:0", "NVIDIA GeForce GT 710", "4x24GB"),
    ],
)
def test_devices_proposed_are_those_a_profile_is_of(device, name, devices):
    """Cause: after measuring on a CPU, four GPUs were proposed."""
    assert devices_like(affine_profile(2, device=device, device_name=name)) == devices
    assert devices_like(chain_profile([1])) == "2xcpu"


def test_names_are_quoted():
    found = suggest_planning(affine_profile(2), Path("my profile.json"))
    assert found == "stagewright plan 'my profile.json' --devices 2xcpu -o plan.json"
    assert command_line("show", "a;b") == "stagewright show 'a;b'"


def test_options_are_left_out_with_their_values():
    words = ["a", "-o", "x.json", "--output=y.json", "--json", "--input", "x=2", "--output", "z"]
    assert drop_flags(words, ["--json"], ["-o", "--output"]) == ["a", "--input", "x=2"]
