"""What a plan says it took for granted."""

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.plan.assumptions import list_assumptions
from stagewright.planner.plan import plan
from tests.builders import chain_profile
from tests.core.affine import affine_profile

MEASURED = LinkLevel(group_size=2, latency_s=21e-6, bandwidth_bytes_per_s=8e9)


def devices(kind, **fields):
    """Two of a kind on a measured link."""
    return Cluster(
        devices=tuple(Device(name=f"{kind}:{index}", kind=kind, **fields) for index in range(2)),
        levels=(MEASURED,),
    )


@pytest.mark.parametrize("kind", ["24GB", "1.5TB", "A100-80GB", "NVIDIA H100 80GB HBM3"])
def test_times_of_a_cpu_are_not_those_of_a_gpu(kind):
    """Cause: a profile of a laptop was planned for 4x24GB without a word."""
    (said,) = list_assumptions(affine_profile(2), devices(kind))
    assert said.startswith(
        f"the profile was measured for a CPU (Fast CPU), and {kind} devices are taken to be "
        "exactly as fast"
    )
    assert said in plan(affine_profile(2), devices(kind)).notes


@pytest.mark.parametrize(
    ("profiled", "kind", "differs"),
    [
        ("NVIDIA A100-SXM4-80GB", "H100", True),
        ("NVIDIA A100-SXM4-80GB", "cpu", True),
        ("NVIDIA A100-SXM4-80GB", "A100-40GB", False),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA A100-SXM4-80GB", "24GB", False),
        ("NVIDIA GeForce GT 710", "H100", False),
    ],
)
def test_only_devices_known_to_be_others_are_told(profiled, kind, differs):
    profile = affine_profile(2, device="cuda:0", device_name=profiled)
    assert bool(list_assumptions(profile, devices(kind))) == differs


def test_a_speed_that_was_given_is_no_assumption():
    assert list_assumptions(affine_profile(2), devices("24GB", speed=50.0)) == []
    assert list_assumptions(affine_profile(2), devices("cpu")) == []


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("2xcpu", "12 GB/s between devices"),
        ("2x8xcpu", "300 GB/s inside a node and 25 GB/s between nodes"),
        ("2x1xcpu", "25 GB/s between nodes"),
    ],
)
def test_links_of_shorthand_are_assumed_and_say_so(cluster, said):
    (found,) = list_assumptions(affine_profile(2), Cluster.parse(cluster))
    assert found.startswith(f"links are assumed to carry {said}: measure them with")


def test_links_that_were_given_or_carry_nothing_are_not():
    assert list_assumptions(affine_profile(2), devices("cpu")) == []
    assert list_assumptions(affine_profile(2), Cluster.parse("1xcpu")) == []
    assert list_assumptions(chain_profile([1, 1]), Cluster.parse("2xcpu")) == []


@pytest.mark.parametrize(("text", "noted"), [("4xL40S", True), ("4xH100", False)])
def test_links_whose_hosts_differ_are_said_to(text, noted):
    cluster = Cluster.parse(text)
    notes = list_assumptions(chain_profile([1], parameter_bytes=4), cluster)
    said = [note for note in notes if "hosts differ" in note]
    band = cluster.levels[0].error_band
    assert bool(said) == noted
    assert all(f"over {cluster.levels[0].name}" in note and f"{band:.0%}" in note for note in said)
