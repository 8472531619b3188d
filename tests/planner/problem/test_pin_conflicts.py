"""Pins that nothing could keep are refused by name; all others are kept."""

import itertools
import random

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import Pin, PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.problem.pin_conflicts import check_pins
from tests.builders import boundary, chain_profile

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
        ([at(3, stage=4)], {}, "pins[0] ('layer.3' in stage 4) cannot be kept: 4 cuts are needed "
         "before the layer, but only 3 are allowed; pin it to stage 3 or lower"),
        ([at(1, kind="c")], {}, "pins[0] ('layer.1' on a 'c') needs a kind of device that the "
         "cluster does not have; choose 'a' or 'b'"),
        ([at(3, stage=2)], {"num_stages": 2}, "pins[0] ('layer.3' in stage 2) needs at least 3 "
         "stages, but num_stages=2 allows 2; pin it to a lower stage or allow more stages"),
        ([at(3, stage=2)], {"max_stages": 2}, "max_stages=2 allows 2"),
        ([at(2, stage=0)], {"num_stages": 3}, "pins[0] ('layer.2' in stage 0) cannot be kept "
         "with num_stages=3: 2 cuts are needed after the layer, but only 1 are allowed"),
        ([at(0, kind="a"), at(2, stage=0), at(2, stage=1)], {},
         "pins[1] ('layer.2' in stage 0) and pins[2] ('layer.2' in stage 1) cannot both be kept: "
         "a layer belongs to one stage; change or drop one of them"),
        ([at(3, stage=1), at(2, stage=2)], {},
         "'layer.2' comes before 'layer.3', and stages follow the layers"),
        ([at(1, stage=0), at(2, stage=2)], {},
         "2 cuts are needed between 'layer.1' and 'layer.2', but only 1 are allowed"),
        ([at(1, kind="a"), at(1, kind="b")], {}, "cannot both be kept: a stage runs on"),
        ([at(0, kind="a"), at(2, stage=0), at(1, kind="b")], {}, "cannot all be kept: "),
        ([at(0, kind="a"), at(1, kind="b"), at(2, kind="a")], {"max_stages": 2},
         "pins[2] ('layer.2' on a 'a') cannot all be kept with max_stages=2: "),
    ],
)  # fmt: skip
def test_the_pins_and_both_numbers_are_named(pins, options, said):
    assert said in refused(*pins, **options)


def test_a_cut_that_is_not_legal_is_not_counted():
    profile = chain_profile([1] * 4)
    gaps = (boundary(0), boundary(1, legal=False), boundary(2))
    profile = type(profile).model_validate({**dict(profile), "boundaries": gaps})
    said = refused(at(2, stage=2), profile=profile)
    assert "2 cuts are needed before the layer, but only 1 are allowed" in said


def test_more_devices_help_where_there_are_too_few():
    profile, pins = chain_profile([1] * 4), (at(3, stage=3),)
    with pytest.raises(Infeasible, match=r"pins\[0\] .* needs 4 devices, but the") as got:
        plan(profile, "2xcpu", PlanOptions(pins=pins))
    assert (got.value.required, got.value.available) == (4, 2)
    assert {entry.text for entry in got.value.remedies} == {"4 devices", "no pins"}


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


def contradict(options, num_layers, positions, kinds):
    try:
        check_pins(options, lambda name: int(name[-1]), positions, kinds)
    except InvalidInput:
        return True
    return False


def any_cuts_keep(options, positions, kinds):
    """By trying all cuts and kinds."""
    last, inner = positions[-1], positions[1:-1]
    for count in range(len(inner) + 1):
        num_stages = count + 1
        if options.num_stages not in (None, num_stages) or num_stages > (options.max_stages or 99):
            continue
        for chosen in itertools.combinations(inner, count):
            stage_of = [sum(cut <= layer for cut in chosen) for layer in range(last)]
            for of_stage in itertools.product(kinds, repeat=num_stages):
                if all(
                    pin.stage in (None, stage_of[int(pin.layer[-1])])
                    and pin.kind in (None, of_stage[stage_of[int(pin.layer[-1])]])
                    for pin in options.pins
                ):
                    return True
    return False


def test_exactly_the_pins_that_no_cuts_keep_are_refused():
    """Brute force over cuts and kinds of devices, with as many devices as there are stages."""
    draw, refusals = random.Random(0), 0
    for _ in range(1500):
        num_layers = draw.randrange(1, 6)
        inner = [cut for cut in range(1, num_layers) if draw.random() < 0.8]
        positions = (0, *inner, num_layers)
        pins = []
        for _ in range(draw.randrange(1, 4)):
            stage, kind = draw.randrange(4), draw.choice("ab")
            where = draw.choice([{"stage": stage}, {"kind": kind}, {"stage": stage, "kind": kind}])
            pins.append(at(draw.randrange(num_layers), **where))
        options = PlanOptions(
            pins=tuple(pins),
            num_stages=draw.choice([None, None, draw.randrange(1, len(inner) + 2)]),
            max_stages=draw.choice([None, None, draw.randrange(1, 6)]),
            num_microbatches=draw.choice([8, 8, draw.randrange(1, 5)]),
        )
        if (options.num_stages or 0) > min(options.max_stages or 99, options.num_microbatches):
            continue
        found = contradict(options, num_layers, positions, "ab")
        assert found != any_cuts_keep(options, positions, "ab"), options
        refusals += found
    assert 400 < refusals < 1300


def test_a_hundred_pins_on_ten_thousand_layers_are_checked_at_once():
    profile = chain_profile([1.0] * 10_000)
    pins = [at(100 * index, stage=index) for index in range(100)]
    pins[50] = at(5000, stage=9)
    options = PlanOptions(pins=tuple(pins), num_microbatches=1000)
    with pytest.raises(InvalidInput, match=r"pins\[\d+\] .* and pins\[50\]|pins\[50\] .* and"):
        plan(profile, "128xcpu", options)
