"""Robust plans: the least worst case within the bands, by all splits there are."""

from itertools import combinations, pairwise

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import LossProfile, Timing
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.solvers.robust import slow_down
from stagewright.planner.validation.validate import validate
from tests.builders import boundary, chain_profile

TIMES = [3e-3] * 6
SENT = [1_000, 3_000_000, 1_000, 3_000_000, 1_000]
"""Bytes behind each layer: the even cuts send much, uneven ones little."""


def problem(layer_band, link_band):
    profile = chain_profile(TIMES)
    provenance = profile.provenance.model_copy(update={"error_band": layer_band})
    gaps = tuple(boundary(after, forward_bytes=size) for after, size in enumerate(SENT))
    profile = profile.model_copy(update={"boundaries": gaps, "provenance": provenance})
    level = LinkLevel(group_size=3, bandwidth_bytes_per_s=1e9, error_band=link_band)
    devices = tuple(Device(name=f"gpu:{index}", kind="gpu") for index in range(3))
    return profile, Cluster(devices=devices, levels=(level,))


def step_of(profile, cluster, balance):
    return plan_from_balance(profile, cluster, PlanOptions(), balance).step_time_s


def splits():
    for count in range(3):
        for inner in combinations(range(1, len(TIMES)), count):
            yield tuple(end - start for start, end in pairwise((0, *inner, len(TIMES))))


@pytest.mark.parametrize("layer_band", [None, 0.1, 0.4])
@pytest.mark.parametrize("link_band", [None, 0.5, 0.8])
def test_no_split_has_a_better_worst_case(layer_band, link_band):
    profile, cluster = problem(layer_band, link_band)
    made = plan(profile, cluster, PlanOptions(robust=True))
    validate(made, profile, cluster)
    worst = slow_down(profile, cluster)
    best = min(step_of(*worst, balance) for balance in splits())
    assert step_of(*worst, made.balance) == pytest.approx(best)
    # Its own figures are those of the times expected, and its bound is of all plans at these.
    assert made.step_time_s == pytest.approx(step_of(profile, cluster, made.balance))
    usual = plan(profile, cluster, PlanOptions())
    assert made.proof.lower_bound == pytest.approx(usual.proof.lower_bound)
    assert made.step_time_s >= usual.step_time_s
    assert any(note.startswith("robust: ") for note in made.notes)


def test_links_that_may_be_slow_are_used_less():
    profile, cluster = problem(None, 0.8)
    usual, robust = (plan(profile, cluster, PlanOptions(robust=flag)) for flag in (False, True))
    assert robust.balance != usual.balance
    assert robust.step_time_s > usual.step_time_s
    worst = slow_down(profile, cluster)
    assert step_of(*worst, robust.balance) < step_of(*worst, usual.balance)
    assert any("at worst" in note and "against" in note for note in robust.notes)


def test_a_case_within_the_band_is_no_worse_than_its_corner():
    profile, cluster = problem(0.4, 0.8)
    worst = slow_down(profile, cluster)
    for layer_band, link_band in ((0.4, 0.5), (0.1, 0.8), (0.0, 0.6)):
        within = slow_down(*problem(layer_band or None, link_band))
        for balance in splits():
            assert step_of(*within, balance) <= step_of(*worst, balance) + 1e-12


def test_layers_that_may_be_slow_share_a_stage_with_fewer_others():
    """Of six equal layers the first two may take twice as long: at worst 2 + 4 is even."""
    level = LinkLevel(group_size=2, bandwidth_bytes_per_s=1e12)
    devices = tuple(Device(name=f"gpu:{index}", kind="gpu") for index in range(2))
    cluster = Cluster(devices=devices, levels=(level,))
    profile, _ = problem(0.2, None)
    assert plan(profile, cluster, PlanOptions(robust=True)).balance == (3, 3)
    layers = tuple(
        entry.model_copy(update={"error_band": 0.5 if index < 2 else 0.0})
        for index, entry in enumerate(profile.layers)
    )
    uneven = profile.model_copy(update={"layers": layers})
    made = plan(uneven, cluster, PlanOptions(robust=True))
    validate(made, uneven, cluster)
    assert made.balance == (2, 4)
    assert plan(uneven, cluster, PlanOptions()).balance == (3, 3)
    # Without a band of its own, a layer has the profile's.
    known = (*layers[:2], *profile.layers[2:])
    slowed = slow_down(profile.model_copy(update={"layers": known}), cluster)[0]
    expected = [2 * 3e-3] * 2 + [1.25 * 3e-3] * 4
    assert [entry.forward.median_s for entry in slowed.layers] == pytest.approx(expected)


def test_a_loss_may_be_slow_by_itself():
    timing = Timing(median_s=1.0)
    loss = LossProfile(forward=timing, backward=timing, error_band=0.5)
    profile = chain_profile([1.0, 1.0]).model_copy(update={"loss": loss})
    slowed = slow_down(profile, Cluster.uniform(2))[0]
    assert slowed.loss.forward.median_s == 2.0
    assert slowed.layers == profile.layers


@pytest.mark.parametrize("objective", ["memory", "devices", "balance_time", "balance_size"])
def test_objectives_that_no_error_of_times_changes_refuse(objective):
    with pytest.raises(InvalidInput, match="robust has no effect") as found:
        plan(*problem(0.1, 0.5), PlanOptions(robust=True, objective=objective))
    assert found.value.field == "/options/robust"


def test_devices_of_the_catalogue_bring_their_links_band():
    band = Cluster.parse("4xA100-80GB").levels[0].error_band
    assert band is not None
    assert 0 < band < 1
    assert Cluster.parse("4x24GB").levels[0].error_band is None


def test_a_worst_case_is_one_whose_prediction_is_off_by_the_band():
    """Half of what is measured was predicted: an error of a half. More than 0.9 says nothing."""
    level = LinkLevel(bandwidth_bytes_per_s=1e9, error_band=0.71)
    cluster = Cluster.uniform(2).model_copy(update={"levels": (level,)})
    profile, _ = problem(None, None)
    measured_s = slow_down(profile, cluster)[1].levels[0].all_reduce_time_s(10**9, 2)
    assert level.all_reduce_time_s(10**9, 2) / measured_s - 1 == pytest.approx(-0.71)
    wide = cluster.model_copy(update={"levels": (level.model_copy(update={"error_band": 25}),)})
    worst = slow_down(profile, wide)[1].levels[0]
    assert worst.bandwidth_bytes_per_s == pytest.approx(1e8)
