"""A profile as CSV: read back, it holds every figure."""

import csv
import io

from stagewright.core.graph.graph import Layer
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.formats.profile_csv import profile_csv, profile_rows
from tests.builders import random_profile
from tests.core.affine import affine_profile


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_a_row_a_layer_with_every_figure_unrounded():
    profile = affine_profile(3, spread=0.01)
    rows = read(profile_csv(profile))
    assert [row["layer"] for row in rows] == [entry.layer.name for entry in profile.layers]
    for row, entry in zip(rows, profile.layers, strict=True):
        assert float(row["forward_s"]) == entry.forward.median_s
        assert float(row["forward_spread_s"]) == entry.forward.spread_s
        assert int(row["forward_repeats"]) == 5
        assert float(row["backward_s"]) == entry.backward.median_s
        assert float(row["backward_input_s"]) == entry.backward_input.median_s
        assert row["backward_weight_s"] == ""
        assert int(row["saved_activation_bytes"]) == entry.saved_activation_bytes
        assert int(row["workspace_bytes"]) == entry.workspace_bytes
        assert int(row["parameter_bytes"]) == 1000


def test_what_a_cut_sends_stands_behind_its_layer():
    profile = random_profile(5, 6)
    rows = read(profile_csv(profile))
    for row, cut in zip(rows, profile.boundaries, strict=False):
        assert row["cut_legal"] == str(cut.legal)
        assert int(row["cut_forward_bytes"]) == cut.forward_bytes
        assert int(row["cut_backward_bytes"]) == cut.backward_bytes
    assert rows[-1]["cut_forward_bytes"] == ""


def test_every_measured_column_names_its_unit():
    columns = profile_rows(affine_profile(2))[0]
    labels = {"index", "layer", "module_type", "cost_class", "opaque", "cut_legal"}
    assert all(name in labels or name.endswith(("_s", "_bytes", "_repeats")) for name in columns)


def test_odd_names_survive():
    name = 'a,"b"\nc'
    layer = LayerProfile(
        layer=Layer(name=name, opaque="branches, on data"),
        forward=Timing(median_s=1),
        backward=Timing(median_s=2),
    )
    (row,) = read(profile_csv(Profile(layers=(layer,), boundaries=())))
    assert (row["layer"], row["opaque"]) == (name, "branches, on data")


def test_a_name_that_a_spreadsheet_would_compute_is_quoted():
    """A layer named '=HYPERLINK(...)' became a link in the reader's spreadsheet."""
    profile = random_profile(1, 7)
    names = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "plain =1"]
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"name": name})})
        for entry, name in zip(profile.layers, names, strict=True)
    )
    text = profile_csv(profile.model_copy(update={"layers": layers}))
    found = [row["layer"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    assert found == [*(f"'{name}" for name in names[:-1]), names[-1]]
    assert float(read(text)[0]["forward_s"]) == profile.layers[0].forward.median_s
