"""Two profiles side by side."""

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.profile.diff import diff, time_change
from stagewright.core.profile.profile import LossProfile, Timing
from tests.builders import chain_profile
from tests.core.affine import affine_profile


def test_every_layer_and_the_total_are_compared():
    before, after = affine_profile(4, spread=0.01), affine_profile(4, scale=1.5, spread=0.01)
    found = diff(before, after)
    assert [entry.name for entry in found.layers] == [entry.layer.name for entry in before.layers]
    for entry in (*found.layers, found.total):
        assert entry.forward.relative == pytest.approx(0.5)
        assert entry.backward.relative == pytest.approx(0.5)
        assert entry.time.relative == pytest.approx(0.5)
        assert entry.time.significant is True
        assert entry.activations.relative == 0
    assert found.total.activations.before_bytes == sum(one.size_bytes for one in before.storages)
    assert found.settings == ()
    assert (found.before_id, found.after_id) == (before.content_id(), after.content_id())


def test_within_the_spread_nothing_is_significant():
    found = diff(affine_profile(4, spread=0.2), affine_profile(4, scale=1.1, spread=0.2))
    assert all(entry.forward.significant is False for entry in found.layers)
    assert all(entry.time.significant is False for entry in found.layers)


@pytest.mark.parametrize(
    ("after", "spread", "significant"),
    [(1.1, 0.05, True), (1.1, 0.15, False), (0.9, 0.05, True), (1.1, 0.0, None), (1.0, 0.1, False)],
)
def test_significant_is_what_exceeds_the_larger_spread(after, spread, significant):
    found = time_change([Timing(median_s=1.0)], [Timing(median_s=after, spread_s=spread)])
    assert found.significant is significant


def test_spreads_of_a_sum_add_like_independent_errors():
    """Four layers of spread 0.1 each have 0.2 together, not 0.4."""
    four = [Timing(median_s=1.0, spread_s=0.1)] * 4
    assert time_change(four, [*four[1:], Timing(median_s=1.19, spread_s=0.1)]).significant is False
    assert time_change(four, [*four[1:], Timing(median_s=1.25, spread_s=0.1)]).significant is True


def test_layers_and_settings_of_one_alone_are_listed():
    found = diff(
        affine_profile(4), affine_profile(8, layers=3, device_name="Slow CPU", autocast="float16")
    )
    assert found.only_before == ("body.3",)
    assert found.only_after == ()
    assert len(found.layers) == 3
    assert found.settings == (
        ("first input", "4x16", "8x16"),
        ("device", "Fast CPU", "Slow CPU"),
        ("autocast", "none", "float16"),
    )
    back = diff(affine_profile(8, layers=3), affine_profile(4))
    assert back.only_after == ("body.3",)


def test_what_was_nothing_before_has_no_relative_change():
    found = time_change([Timing(median_s=0.0)], [Timing(median_s=1.0)])
    assert found.relative is None


def test_profiles_without_a_common_layer_are_refused():
    other = affine_profile(4)
    renamed = other.model_copy(
        update={
            "layers": tuple(
                entry.model_copy(
                    update={"layer": entry.layer.model_copy(update={"name": f"x{index}"})}
                )
                for index, entry in enumerate(other.layers)
            )
        }
    )
    with pytest.raises(InvalidInput, match="no layer name in common"):
        diff(other, renamed)


def test_nothing_before_and_after_is_the_same():
    profile = chain_profile([1.0, 2.0])
    found = diff(profile, profile)
    assert {entry.activations.relative for entry in (*found.layers, found.total)} == {0.0}


def test_a_loss_in_one_alone_is_told():
    profile = chain_profile([1.0, 2.0])
    second = Timing(median_s=1.0)
    lossy = profile.model_copy(update={"loss": LossProfile(forward=second, backward=second)})
    assert ("loss", "none", "measured") in diff(profile, lossy).settings
    assert not diff(lossy, lossy).settings
