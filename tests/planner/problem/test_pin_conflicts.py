"""Pins that nothing could keep are refused by name; all others are kept."""

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.planner.plan import plan
from tests.builders import chain_profile

LAYERS = [f"layer.{index}" for index in range(4)]
TWO_KINDS = Cluster(
    devices=tuple(Device(name=f"d{index}", kind="ab"[index % 2]) for index in range(8)),
    levels=(LinkLevel(group_size=8),),
)


def at(layer, stage=None, kind=None):
    return Pin(layer=f"layer.{layer}", stage=stage, kind=kind)


def refused(*pins, cluster=TWO_KINDS, profile=None, **options):
    with pytest.raises(InvalidInput) as caught:
        plan(profile or chain_profile([1] * 4), cluster, PlanOptions(pins=pins, **options))
    assert caught.value.field == "/options/pins"
    return str(caught.value)


@pytest.mark.parametrize(
    ("pins", "options", "said"),
    [
        ([at(1, kind="c")], {}, "pins[0] ('layer.1' on a 'c') needs a kind of device that the "
         "cluster does not have; choose 'a' or 'b'"),
        ([at(3, stage=2)], {"num_stages": 2}, "pins[0] ('layer.3' in stage 2) needs at least 3 "
         "stages, but num_stages=2 allows 2; pin it to a lower stage or allow more stages"),
        ([at(3, stage=2)], {"max_stages": 2}, "max_stages=2 allows 2"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_without_a_search(pins, options, said):
    assert said in refused(*pins, **options)


@pytest.mark.parametrize(
    ("pins", "options", "said"),
    [
        ([at(3, stage=4)], {}, "pins[0] ('layer.3' in stage 4)"),
        ([at(2, stage=0)], {"num_stages": 3}, "pins[0] ('layer.2' in stage 0)"),
        ([at(0, kind="a"), at(2, stage=0), at(2, stage=1)], {},
         "pins[1] ('layer.2' in stage 0) and pins[2] ('layer.2' in stage 1)"),
        ([at(3, stage=1), at(2, stage=2)], {},
         "pins[0] ('layer.3' in stage 1) and pins[1] ('layer.2' in stage 2)"),
        ([at(1, kind="a"), at(1, kind="b")], {}, "pins[0] ('layer.1' on a 'a') and pins[1] "),
        ([at(0, kind="a"), at(1, kind="b"), at(2, kind="a")], {"max_stages": 2}, "and pins[2]"),
    ],
)  # fmt: skip
def test_the_fewest_pins_that_contradict_each_other_are_named(pins, options, said):
    with pytest.raises(Infeasible) as caught:
        plan(chain_profile([1] * 4), TWO_KINDS, PlanOptions(pins=tuple(pins), **options))
    assert said in str(caught.value)
    kept = "cannot all be kept" if "and pins" in said else "cannot be kept"
    assert kept in str(caught.value)
    assert "add devices" not in str(caught.value)


def test_more_devices_help_where_there_are_too_few():
    profile, pins = chain_profile([1] * 4), (at(3, stage=3),)
    with pytest.raises(Infeasible, match=r"pins\[0\] .* needs 4 devices, but the") as got:
        plan(profile, "2xcpu", PlanOptions(pins=pins))
    assert (got.value.required, got.value.available) == (4, 2)
    texts = {entry.text for entry in got.value.remedies}
    assert texts == {"4 devices (4xcpu, 8 micro-batches)", "no pins"}


def test_pins_to_more_devices_of_a_kind_than_there_are_are_named():
    """Three stages, two of them on an 'a', of which the cluster has one."""
    one_of_each = Cluster(devices=TWO_KINDS.devices[:2], levels=(LinkLevel(group_size=2),))
    pins = (at(3, kind="b"), at(0, kind="a"), at(1, kind="b"), at(2, kind="a"))
    with pytest.raises(Infeasible) as caught:
        plan(chain_profile([1] * 4), one_of_each, PlanOptions(pins=pins[1:]))
    said = str(caught.value)
    assert "pins[0] ('layer.0' on a 'a') and pins[1] " in said
    assert "cannot all be kept on the cluster's 2 devices (1 'a' and 1 'b')" in said
    assert "or 3 devices, the new ones 'a'" in said
    with pytest.raises(Infeasible, match=r"^pins\[1\] .* and pins\[2\] .* and pins\[3\] "):
        plan(chain_profile([1] * 4), one_of_each, PlanOptions(pins=(*pins,)))
