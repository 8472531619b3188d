"""Profiles of several micro-batch sizes as one: against lines that are known."""

from itertools import combinations

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.merge import merge
from stagewright.core.profile.pool import pool_profiles, pool_timings
from stagewright.core.profile.profile import Profile, Timing
from stagewright.planner.plan import plan
from tests.core.affine import LAYERS, affine_profile


def held_bytes(profile, first, last):
    """What autograd keeps for an interval of layers."""
    inside = set(range(first, last))
    return sum(entry.size_bytes for entry in profile.storages if inside & {*entry.layers})


@pytest.mark.parametrize("samples", [3, 4, 5, 7])
def test_between_two_sizes_lines_are_found_again_exactly(samples):
    found = merge([affine_profile(2), affine_profile(8)], samples=samples)
    exact = affine_profile(samples)
    assert found.inputs == exact.inputs
    assert found.boundaries == exact.boundaries
    assert found.edges == exact.edges
    for one, other in zip((*found.layers, found.loss), (*exact.layers, exact.loss), strict=True):
        assert one.forward.median_s == pytest.approx(other.forward.median_s)
        assert one.backward.median_s == pytest.approx(other.backward.median_s)
        assert one.saved_activation_bytes == other.saved_activation_bytes
    for one, other in zip(found.layers, exact.layers, strict=True):
        assert one.backward_input.median_s == pytest.approx(other.backward_input.median_s)
        assert one.backward_weight is None
        assert (one.output_bytes, one.workspace_bytes) == (
            other.output_bytes,
            other.workspace_bytes,
        )
    for first, last in combinations(range(LAYERS + 1), 2):
        assert held_bytes(found, first, last) == held_bytes(exact, first, last)


def test_what_was_not_measured_says_so():
    found = merge([affine_profile(2), affine_profile(8)], samples=4)
    assert found.provenance.source == "estimated"
    assert found.reconciliation is None
    assert found.notes[-1] == (
        "times and bytes are interpolated to 4 samples from profiles at 2 and 8"
    )
    assert Profile.from_json(found.to_json()) == found


def test_a_measured_size_stays_measured():
    profiles = [affine_profile(2), affine_profile(8)]
    assert merge(profiles, samples=8) == profiles[1]


def test_lines_go_through_the_nearest_sizes():
    """Three sizes with a kink at 4: each side has a line of its own."""
    kinked = affine_profile(4, scale=2.0)
    profiles = [affine_profile(8), affine_profile(2), kinked]
    below = merge(profiles, samples=3).layers[0].forward.median_s
    above = merge(profiles, samples=6).layers[0].forward.median_s
    two_s, four_s, eight_s = 2e-3, 6e-3, 5e-3
    assert below == pytest.approx((two_s + four_s) / 2)
    assert above == pytest.approx((four_s + eight_s) / 2)


def test_the_error_to_expect_is_measured_where_it_can_be():
    lines = [affine_profile(2), affine_profile(4), affine_profile(8)]
    assert merge(lines, samples=6).provenance.error_band == pytest.approx(0.0, abs=1e-12)
    kinked = [affine_profile(2), affine_profile(4, scale=2.0), affine_profile(8)]
    # Interpolated between 2 and 8, a size of 4 takes half of what was measured.
    assert merge(kinked, samples=6).provenance.error_band == pytest.approx(0.5)
    assert merge([affine_profile(2), affine_profile(8)], samples=4).provenance.error_band is None


@pytest.mark.parametrize("samples", [1, 16])
def test_beyond_the_measured_sizes_is_labelled(samples):
    found = merge([affine_profile(2), affine_profile(4), affine_profile(8)], samples=samples)
    exact = affine_profile(samples)
    assert "EXTRAPOLATED" in found.notes[-1]
    assert found.provenance.error_band is None
    for one, other in zip(found.layers, exact.layers, strict=True):
        assert one.forward.median_s == pytest.approx(other.forward.median_s)
        assert one.saved_activation_bytes == other.saved_activation_bytes


def with_band(profile, band):
    provenance = profile.provenance.model_copy(update={"source": "estimated", "error_band": band})
    return profile.model_copy(update={"provenance": provenance})


@pytest.mark.parametrize("samples", [1, 4, 6, 16])
def test_merged_estimates_keep_their_own_error(samples):
    """Interpolating three estimates once said 0 % for what is 45 % off: lines meet exactly."""
    estimates = [
        with_band(affine_profile(size), band) for size, band in ((2, 0.4), (4, 0.45), (8, 0.4))
    ]
    expected = 0.45 if samples != 4 else estimates[1].provenance.error_band
    merged = merge(estimates, samples=samples)
    assert merged.provenance.error_band == pytest.approx(expected)
    made = plan([merged], Cluster.parse("2x80GB"), PlanOptions(num_microbatches=4))
    assert "unsplit steps within 45%" in str(made)


def test_errors_of_estimates_and_of_lines_add_up():
    kinked = [affine_profile(2), affine_profile(4, scale=2.0), affine_profile(8)]
    merged = merge([with_band(entry, 0.3) for entry in kinked], samples=6)
    assert merged.provenance.error_band == pytest.approx(0.8)
    alone = merge([with_band(affine_profile(2), 0.3), with_band(affine_profile(2), 0.4)], samples=4)
    assert alone.provenance.error_band == pytest.approx(0.4)


def with_layer_bands(profile, *bands):
    layers = tuple(
        entry.model_copy(update={"error_band": band})
        for entry, band in zip(profile.layers, bands, strict=False)
    )
    return profile.model_copy(update={"layers": (*layers, *profile.layers[len(bands) :])})


def test_bands_of_layers_are_merged_like_the_whole_models():
    first = with_layer_bands(with_band(affine_profile(2), 0.3), 0.2, 0.1)
    other = with_layer_bands(with_band(affine_profile(2), 0.4), 0.5)
    pooled = merge([first, other], samples=2)
    # Of the second layer one band is not known, so that the model's holds, the larger of the two.
    assert [entry.error_band for entry in pooled.layers[:2]] == [0.5, None]
    assert pooled.provenance.error_band == 0.4
    kinked = [affine_profile(2), affine_profile(4, scale=2.0), affine_profile(8)]
    known = [with_layer_bands(with_band(entry, 0.3), 0.2) for entry in kinked]
    line = merge(known, samples=6).layers
    assert line[0].error_band == pytest.approx(0.2 + 0.5)
    assert line[1].error_band is None
    assert merge(known, samples=16).layers[0].error_band == 0.2


def quadratic(samples):
    """Storages of as many bytes as samples squared."""
    profile = affine_profile(samples)
    storages = tuple(
        entry.model_copy(update={"size_bytes": 16 * samples**2}) for entry in profile.storages
    )
    return profile.model_copy(update={"storages": storages})


def test_bytes_below_the_smallest_size_are_never_below_proportion():
    """The line through 8 and 16 samples of squared bytes is below zero at 1."""
    found = merge([quadratic(8), quadratic(16)], samples=1)
    assert [entry.size_bytes for entry in found.storages] == [16 * 8] * len(found.storages)


def test_superlinear_bytes_above_the_largest_size_are_said_to_be_too_few():
    for profiles in ([quadratic(8), quadratic(16)], [quadratic(16)]):
        assert "faster than the number of samples" in merge(profiles, samples=32).notes[-1]
    assert "faster" not in merge([quadratic(8), quadratic(16)], samples=4).notes[-1]


def test_no_time_shrinks_with_samples_nor_below_proportion():
    """Noise may make larger micro-batches look faster; extrapolated that would end below zero."""
    odd = [affine_profile(2, scale=3.0), affine_profile(4)]
    more = merge(odd, samples=16).layers[0].forward.median_s
    assert more == odd[1].layers[0].forward.median_s
    steep = [affine_profile(2), affine_profile(4, scale=5.0)]
    less = merge(steep, samples=1).layers[0].forward.median_s
    assert less == pytest.approx(steep[0].layers[0].forward.median_s / 2)


def test_one_size_alone_is_scaled_in_proportion():
    found = merge([affine_profile(4)], samples=8)
    assert found.layers[0].forward.median_s == pytest.approx(
        2 * affine_profile(4).layers[0].forward.median_s
    )
    assert "EXTRAPOLATED" in found.notes[-1]
    assert found.provenance.source == "estimated"


def test_repeated_profiles_are_pooled_to_medians():
    repeated = [affine_profile(4, scale=scale) for scale in (1.0, 1.2, 9.0)]
    found = merge(repeated)
    for one, exact in zip(found.layers, repeated[1].layers, strict=True):
        assert one.forward.median_s == exact.forward.median_s
        assert one.forward.repeats == 15
        assert one.forward.spread_s > 0
    assert found.provenance.source == "measured"
    assert found.notes[-1] == "pooled from 3 profiles"
    assert found.reconciliation is not None
    whole_s = sum(
        part.median_s
        for part in (found.reconciliation.whole_forward, found.reconciliation.whole_backward)
    )
    layers_s = sum(entry.forward.median_s + entry.backward.median_s for entry in found.layers)
    layers_s += found.loss.forward.median_s + found.loss.backward.median_s
    assert found.reconciliation.relative_error == pytest.approx(layers_s / whole_s - 1)


def test_repeats_at_several_sizes_are_pooled_first():
    found = merge(
        [
            affine_profile(2),
            *(affine_profile(8, scale=scale, repeats=3) for scale in (0.5, 1.0, 1.5)),
        ],
        samples=5,
    )
    exact = affine_profile(5)
    assert found.layers[2].forward.median_s == pytest.approx(exact.layers[2].forward.median_s)


def test_a_profile_given_twice_is_refused():
    """Cause: `merge a.json a.json` said "pooled from 2 profiles" of one measurement."""
    with pytest.raises(
        InvalidInput, match=r"a\.json and copy\.json are the same profile \(profile_"
    ):
        merge(
            [affine_profile(4), affine_profile(4, scale=2.0), affine_profile(4)],
            names=["a.json", "b.json", "copy.json"],
        )


@pytest.mark.parametrize("samples", [4, 8])
def test_a_profile_of_a_graph_is_not_merged_with_one_of_the_model(samples):
    """A graph is measured with made-up weights and values, and never as a whole."""
    of_graph = affine_profile(samples, scale=1.1).model_copy(update={"reconciliation": None})
    with pytest.raises(InvalidInput, match=r"run of the whole model \(a graph has none\): timed"):
        merge([affine_profile(4), of_graph], samples=4)
    another = affine_profile(samples).model_copy(update={"reconciliation": None})
    assert merge([of_graph, another]).provenance.source == "measured"


def test_one_profile_pools_to_itself():
    profile = affine_profile(3)
    assert pool_profiles([profile]) is profile
    assert merge([profile]) is profile


@pytest.mark.parametrize("odd", [1, 2])
def test_profiles_with_other_numbers_of_edges_are_not_pooled(odd):
    """Only the first and the last were compared; the middle one of three ended in a ValueError."""
    profiles = [affine_profile(4, scale=scale) for scale in (1.0, 1.1, 1.2)]
    profiles[odd] = profiles[odd].model_copy(update={"edges": profiles[odd].edges[1:]})
    said = f"at 4 samples the first has 3 edges, number {odd + 1} has 2; .* from run to run"
    with pytest.raises(InvalidInput, match=said):
        pool_profiles(profiles)


def test_a_pooled_spread_covers_both_kinds():
    within = [Timing(median_s=1.0, spread_s=0.2, repeats=3)] * 2
    assert pool_timings(within).spread_s == pytest.approx(0.2)
    between = [Timing(median_s=time_s, spread_s=0.01) for time_s in (1.0, 2.0, 3.0)]
    assert pool_timings(between).spread_s == pytest.approx(1.0)


def other_input(profile):
    inputs = (TensorSpec(name="x", shape=(8, 17), dtype="float32"),)
    return profile.model_copy(update={"inputs": inputs})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (affine_profile(8).model_copy(update={"model": "Other"}), "model: Affine and Other"),
        (affine_profile(8, layers=3), "layers: 4 and 3"),
        (affine_profile(8, device_name="Slow CPU"), "device: Fast CPU and Slow CPU"),
        (affine_profile(8, device="cuda:0"), "kind of device: cpu and cuda"),
        (affine_profile(8, num_threads=4), "CPU threads: 2 and 4"),
        (affine_profile(8, autocast="bfloat16"), "autocast: none and bfloat16"),
        (affine_profile(8, compiled=True), "compiled: False and True"),
        (affine_profile(8, torch_version="2.12.0"), "torch: 2.13.0 and 2.12.0"),
        (affine_profile(8, source="estimated"), "measured or estimated"),
        (affine_profile(8).model_copy(update={"loss": None}), "loss: one and none"),
        (other_input(affine_profile(8)), "inputs beside the samples"),
    ],
)
def test_profiles_of_other_things_are_refused_with_what_differs(other, said):
    with pytest.raises(InvalidInput, match=r"one\.json and other\.json cannot be merged") as caught:
        merge([affine_profile(2), other], samples=4, names=["one.json", "other.json"])
    assert said in str(caught.value)


def frozen(profile):
    kept = [entry.model_copy(update={"trainable": False}) for entry in profile.parameters]
    return profile.model_copy(update={"parameters": tuple(kept)})


def of_classes(profile, name):
    layers = [
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"cost_class": name})})
        for entry in profile.layers
    ]
    return profile.model_copy(update={"layers": tuple(layers)})


def another_boundary(profile):
    tensor = TensorSpec(name="hidden", shape=(8, 4, 4), dtype="float32")
    last = profile.boundaries[-1].model_copy(update={"tensors": (tensor,)})
    return profile.model_copy(update={"boundaries": (*profile.boundaries[:-1], last)})


def fewer_storages(profile):
    return profile.model_copy(update={"storages": profile.storages[1:]})


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (affine_profile(2), frozen(affine_profile(8)), "trainable parameters"),
        (affine_profile(2), another_boundary(affine_profile(8)), "tensors between layers"),
        (
            of_classes(affine_profile(2), "a"),
            of_classes(affine_profile(2), "b"),
            "operations of layers",
        ),
        (affine_profile(2), fewer_storages(affine_profile(2)), "layers that keep activations"),
    ],
)
def test_another_forward_with_the_same_weights_is_refused(one, other, said):
    with pytest.raises(InvalidInput, match=said):
        merge([one, other], samples=4)
    with pytest.raises(InvalidInput, match=said):
        merge([affine_profile(4), one, other], samples=4)


def test_other_classes_at_another_size_are_no_other_model():
    profiles = [of_classes(affine_profile(2), "a"), of_classes(affine_profile(8), "b")]
    assert merge(profiles, samples=4).inputs[0].shape == (4, 16)


def test_another_gpu_of_the_same_kind_is_the_same():
    profiles = [affine_profile(2, device="cuda:0"), affine_profile(8, device="cuda:1")]
    assert merge(profiles, samples=4).inputs[0].shape == (4, 16)


def test_a_size_has_to_be_said_where_there_are_several():
    with pytest.raises(InvalidInput, match="2 and 8 samples; give the size"):
        merge([affine_profile(2), affine_profile(8)])
    with pytest.raises(InvalidInput, match="at least one sample, not 0"):
        merge([affine_profile(2), affine_profile(8)], samples=0)
    with pytest.raises(InvalidInput, match="at least one profile"):
        merge([])


def test_models_that_do_something_else_at_another_size_are_refused():
    other = affine_profile(8)
    fewer = other.model_copy(update={"edges": other.edges[:-1]})
    with pytest.raises(InvalidInput, match="3 edges, the one at 8 has 2"):
        merge([affine_profile(2), fewer], samples=4)
