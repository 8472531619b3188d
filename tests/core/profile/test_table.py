"""A profile as text: its modules, bars, marks and provenance."""

import pytest

from stagewright.core.graph.graph import Boundary, Layer, Parameter
from stagewright.core.profile.profile import (
    Clocks,
    LayerProfile,
    Profile,
    Provenance,
    SavedStorage,
    Timing,
)
from stagewright.core.profile.table import format_profile
from stagewright.core.profile.totals import ProfileTotals

NAMES = ("embed", "body.0", "body.1", "body.2", "head")
CLASSES = ("e", "b", "b", "b", "h")


@pytest.fixture
def profile():
    """Blocks of 20 ms forward and 40 ms backward between 5 ms ends; a tied and shared storage."""

    def entry(name, kind):
        time_s = 0.02 if kind == "b" else 0.005
        return LayerProfile(
            layer=Layer(
                name=name,
                cost_class=kind,
                parameter_bytes=1024,
                opaque="branches on data" if name == "head" else "",
            ),
            forward=Timing(median_s=time_s, spread_s=time_s / 10, repeats=7),
            backward=Timing(median_s=2 * time_s, spread_s=time_s / 10, repeats=9),
            saved_activation_bytes=2048,
        )

    return Profile(
        model="Blocks",
        layers=tuple(map(entry, NAMES, CLASSES)),
        boundaries=tuple(Boundary(after=index) for index in range(4)),
        parameters=(
            Parameter(names=("embed.weight", "head.weight"), size_bytes=1024, layers=(0, 4)),
            *(
                Parameter(names=(f"body.{index}.weight",), size_bytes=1024, layers=(index + 1,))
                for index in range(3)
            ),
        ),
        storages=(
            SavedStorage(size_bytes=1024, layers=(1, 2, 3)),
            SavedStorage(size_bytes=1024, layers=(1,)),
        ),
    )


def rows(text):
    """Cells of each row of the table, without its rule."""
    lines = text.split("\n\n")[0].splitlines()
    return [" ".join(line.split()) for line in (lines[0], *lines[2:])]


def test_layers_are_folded_by_module_with_sums_and_shares(profile):
    assert rows(format_profile(profile)) == [
        "layer forward backward time parameters activations memory",
        "embed 5 ms 10 ms 7.1% # 1.0 KiB 0 B 16.7% ##",
        "body.0..2 60 ms 120 ms 85.7% ########## 3.0 KiB 2.0 KiB 83.3% ########## x3",
        "head 5 ms 10 ms 7.1% # 1.0 KiB 0 B 16.7% ## OPAQUE: branches on data",
        "5 layers 70 ms 140 ms 100.0% 4.0 KiB 2.0 KiB 100.0%",
    ]


def test_flat_has_a_row_a_layer_and_says_how_many_are_equal(profile):
    found = rows(format_profile(profile, tree=False))
    assert [row.split()[0] for row in found[1:-1]] == list(NAMES)
    assert found[2].endswith("x3")
    assert not found[1].endswith("x1")


def test_depth_folds_what_is_below(profile):
    deep = profile.model_copy(
        update={
            "layers": tuple(
                entry.model_copy(
                    update={
                        "layer": entry.layer.model_copy(update={"name": name, "cost_class": ""})
                    }
                )
                for entry, name in zip(
                    profile.layers, ("a.x", "a.y.0", "a.y.1", "b", "c"), strict=True
                )
            )
        }
    )

    def names(text):
        return [row.split()[0] for row in rows(text)[1:-1]]

    assert names(format_profile(deep)) == ["a", "x", "y", "0", "1", "b", "c"]
    assert names(format_profile(deep, depth=2)) == ["a", "x", "y", "b", "c"]
    assert names(format_profile(deep, depth=1)) == ["a", "b", "c"]
    assert "45 ms" in rows(format_profile(deep, depth=1))[1]


def test_shared_storages_and_tied_weights_count_once_in_every_sum(profile):
    sums = ProfileTotals(profile)
    assert sums.of([1]).activation_bytes == 2048
    assert sums.of([1, 2, 3]).activation_bytes == 2048
    assert sums.of([2, 3]).activation_bytes == 1024
    assert sums.of([0, 4]).parameter_bytes == 1024


def test_summary_says_where_the_numbers_come_from(profile):
    told = profile.model_copy(
        update={
            "provenance": Provenance(
                source="estimated",
                device="cuda:0",
                device_name="Fast GPU",
                torch_version="2.13.0",
                cuda_version="13.0",
                driver="580.1",
                num_threads=1,
                busy_neighbours=2,
                autocast="bfloat16",
                compiled=True,
                clocks=Clocks(before_mhz=1980, after_mhz=1200, throttled_by=("power cap",)),
                calibrated_by=("profile_1",),
                error_band=0.123,
            ),
            "notes": ("a note",),
        }
    )
    assert format_profile(told).split("\n\n")[1].splitlines() == [
        "ESTIMATED Blocks on Fast GPU, one micro-batch",
        "expected error 12.3%",
        "profile quality: fair (the GPU was held back by power cap; estimated, within 12% on the "
        "devices that were measured)",
        "torch 2.13.0, CUDA 13.0, driver 580.1, 1 thread, 2 busy neighbours, autocast to "
        "bfloat16, compiled",
        "7 to 9 repeats per layer; interquartile range 7.5% of the median, at most 10.0%",
        "clock 1980 MHz before, 1200 MHz after; THROTTLED by power cap",
        "calibrated by profile_1",
        f"id {told.content_id()}",
        "a note",
    ]


def test_summary_says_how_bands_differ_by_layer(profile):
    layers = (
        profile.layers[0].model_copy(update={"error_band": 0.08}),
        profile.layers[1].model_copy(update={"error_band": 0.2}),
        *profile.layers[2:],
    )
    provenance = Provenance(source="estimated", error_band=0.123)
    told = profile.model_copy(update={"provenance": provenance, "layers": layers})
    assert "expected error 12.3% (8.0% to 20.0% by layer)" in format_profile(told).splitlines()


def test_equal_documents_have_equal_ids(profile):
    def id_line(document):
        return next(
            line for line in format_profile(document).splitlines() if line.startswith("id ")
        )

    assert id_line(profile) == id_line(Profile.from_json(profile.to_json()))
    assert id_line(profile) != id_line(profile.model_copy(update={"model": "Other"}))
