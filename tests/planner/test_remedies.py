"""What an error offers is true, and nothing that would help is left out."""

import random
import time
from types import SimpleNamespace

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import DeadlineExceeded, Infeasible, InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.units import format_time
from stagewright.planner import remedies
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate
from tests.builders import chain_profile, random_profile
from tests.planner.instances import instance
from tests.planner.oracle import least

SEVERAL = ("interleaved_1f1b", "zbv", "dualpipev")


@pytest.fixture
def ample(monkeypatch):
    """Time to finish every plan, however busy the machine."""
    monkeypatch.setattr(remedies, "BUDGET_S", 50)


def refusal(profile, cluster, options):
    """The error, or `None` where there is a plan."""
    try:
        plan(profile, cluster, options)
    except Infeasible as error:
        return error
    except InvalidInput:  # of a request drawn at random
        return None
    return None


def check_offers(error, profile):
    for offer in error.remedies:
        found = plan(profile, offer.cluster, offer.options)
        validate(found, profile, offer.cluster)
        assert offer.is_settled
        assert offer.step_time_s == found.step_time_s
        assert f"{offer.text}: {format_time(offer.step_time_s)} per step" in str(error)


@pytest.mark.usefixtures("ample")
@pytest.mark.parametrize("seed", range(12))
def test_every_way_out_works_and_takes_the_time_it_says(seed):
    given = instance(seed, memory_fraction=0.9)
    needed = least(given.limited(None), "memory")
    if needed is None:
        return
    given = given.limited(int(needed.rank[0] / 0.9) - 2)
    error = refusal(given.profile, given.cluster, given.options)
    check_offers(error, given.profile)
    if all(device.memory_bytes for device in given.cluster.devices):
        assert "memory_fraction=1.0" in [offer.text for offer in error.remedies]


def small(seed):
    """A request of every kind that is likely to be too large for its devices."""
    draw = random.Random(seed)
    profile = random_profile(seed, draw.randrange(2, 5), ties=draw.choice([0, 1]))
    whole = sum(entry.size_bytes for entry in profile.parameters if entry.layers)
    memory_bytes = int(whole * draw.choice([0.5, 1, 2, 3, 4])) + 2000 * draw.randrange(4)
    names = [entry.layer.name for entry in profile.layers]
    schedule = draw.choice(["1f1b", "1f1b", "gpipe", "zero_bubble", *SEVERAL])
    closed = schedule in ("1f1b", "gpipe")
    objectives = ["step_time", "throughput", "memory", "devices", "balance_time", "latency"]
    return (
        profile,
        Cluster.uniform(draw.randrange(1, 4), memory_bytes=memory_bytes),
        PlanOptions(
            num_microbatches=draw.choice([1, 2, 3, 4, 6]),
            schedule=schedule,
            objective=draw.choice(objectives) if closed else "step_time",
            max_stages=draw.choice([None, None, 2]),
            max_replicas=draw.choice([1, 1, 2, None]),
            recompute=draw.choice(["never", "never", "always", "auto"]),
            optimizer=draw.choice(["adam", "momentum", "sgd"]),
            memory_fraction=draw.choice([1.0, 0.8]),
            together=((names[0], names[1]),) if draw.random() < 0.2 else (),
            no_cut_after=(names[0],) if draw.random() < 0.2 else (),
            tied=draw.choice(["priced", "together"]),
        ),
    )


def single_changes(profile, options):
    """The list of `docs/concepts/planner.md`: each option changed, and its new values."""
    if options.objective != "latency":
        yield (
            "num_microbatches",
            [
                {"num_microbatches": count}
                for count in range(1, max(options.num_microbatches, len(profile.layers)) + 1)
                if count < options.num_microbatches or options.schedule == "1f1b"
            ],
        )
        for name in {"1f1b", "gpipe"} - {options.schedule}:
            yield f"schedule={name!r}", [{"schedule": name}]
    for name, value in (
        ("recompute", "auto"), ("max_replicas", None), ("max_stages", None), ("optimizer", "sgd"),
        ("memory_fraction", 1.0), ("tied", "priced"), ("together", ()), ("no_cut_after", ()),
    ):  # fmt: skip
        yield name, [{name: value}]
    if options.objective == "balance_time":
        yield "objective", [{"objective": "step_time"}]


def is_possible(profile, cluster, options, changes):
    try:
        plan(profile, cluster, PlanOptions.model_validate({**dict(options), **changes}))
    except (Infeasible, InvalidInput):
        return False
    return True


def is_offered(error, name, options):
    if name == "devices":
        return any(" devices" in offer.text for offer in error.remedies)
    if name.startswith("schedule"):
        return any(offer.text == name for offer in error.remedies)
    return any(
        getattr(offer.options, name) != getattr(options, name) and "devices" not in offer.text
        for offer in error.remedies
    )


@pytest.mark.usefixtures("ample")
@pytest.mark.parametrize("seed", range(12))
def test_any_single_change_that_helps_is_offered(seed):
    profile, cluster, options = small(seed)
    error = refusal(profile, cluster, options)
    if error is None:
        return
    check_offers(error, profile)
    for name, values in single_changes(profile, options):
        if any(is_possible(profile, cluster, options, value) for value in values):
            assert is_offered(error, name, options), (name, str(error))
    for count in range(len(cluster.devices) + 1, len(profile.layers) + 1):
        if is_possible(profile, remedies.with_devices(cluster, count), options, {}):
            (offer,) = [entry for entry in error.remedies if " devices" in entry.text]
            assert len(offer.cluster.devices) <= count
            break


def test_what_was_cut_short_is_said_to_be(monkeypatch):
    """Every plan takes ten seconds of a clock that allows two for all of them."""
    profile, options = chain_profile([1] * 4, parameter_bytes=400), PlanOptions(num_microbatches=4)
    now = [time.monotonic() + 100]  # ahead of the clock of the search for any plan

    def attempt(cluster, asked, deadline):
        now[0] += 10
        assert deadline < now[0]
        return plan(profile, cluster, asked)

    monkeypatch.setattr(remedies, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bare = Infeasible("no room", constraint="memory")
    cluster = Cluster.uniform(2, memory_bytes=3000)
    error = remedies.add_remedies(bare, profile, cluster, options, attempt)
    found = [(offer.text, offer.step_time_s, offer.is_settled) for offer in error.remedies]
    assert found == [("optimizer='adamw_8bit'", 30, False), ("4 devices", None, True)]
    assert str(error).endswith("with optimizer='adamw_8bit': at most 30 s per step, or 4 devices")


def is_on_more_devices(offer):
    return " devices" in offer.text


@pytest.mark.usefixtures("ample")
@pytest.mark.parametrize("seed", range(24))
def test_what_is_offered_without_a_plan_has_one(seed, monkeypatch):
    """What is offered where time is short rests on a quick check; new devices come last."""

    def no_time(*_):
        raise DeadlineExceeded("no time for plans")

    monkeypatch.setattr(remedies._Search, "_plan", no_time)
    profile, cluster, options = small(seed)
    error = refusal(profile, cluster, options)
    if error is None:
        return
    for offer in error.remedies:
        assert offer.step_time_s is None
        validate(plan(profile, offer.cluster, offer.options), profile, offer.cluster)
    where = [is_on_more_devices(offer) for offer in error.remedies]
    assert where == sorted(where)


def with_large_weights(profile):
    """The profile with weights of 16 bits that leave nothing else to count."""
    parameters = tuple(
        entry.model_copy(
            update={
                "numel": 1000 * entry.numel, "size_bytes": 2000 * entry.numel,
                "kind": "parameter", "trainable": True,
            }
        )
        for entry in profile.parameters
        if entry.layers
    )  # fmt: skip
    inputs = (TensorSpec(name="x", shape=(1, 8), dtype="bfloat16"),)
    gaps = tuple(gap.model_copy(update={"tensors": ()}) for gap in profile.boundaries)
    update = {"parameters": parameters, "inputs": inputs, "boundaries": gaps}
    return profile.model_copy(update=update)


def offers_of(options, memory_bytes, devices=1, **chain):
    profile = chain_profile([1] * 4, **chain)
    return refusal(profile, Cluster.uniform(devices, memory_bytes=memory_bytes), options)


def texts(error):
    return [offer.text for offer in error.remedies]


@pytest.mark.usefixtures("ample")
def test_where_weights_alone_do_not_fit_nothing_is_said_of_activations():
    """Cause: recomputation and smaller micro-batches were advised where weights did not fit.

    4 x 4 KB of weights, as much of gradients and twice that of Adam's moments: 64 KB.
    """
    heavy = {"parameter_bytes": 4000, "saved_bytes": 4000, "forward_bytes": 10}
    error = offers_of(PlanOptions(), 58_000, **heavy)
    assert texts(error) == ["optimizer='adamw_8bit'", "2 devices"]
    error = offers_of(PlanOptions(recompute="auto", optimizer="sgd"), 30_000, **heavy)
    assert texts(error) == ["2 devices"]
    assert "recompute" not in str(error)
    error = offers_of(PlanOptions(max_stages=1), 15_000, 4, **heavy)
    assert not any("micro" in text or "recompute" in text for text in texts(error))


@pytest.mark.usefixtures("ample")
def test_two_options_are_offered_before_more_devices():
    """Cause: 14 devices were advised where options would do on 8."""
    error = offers_of(
        PlanOptions(num_microbatches=4), 45_000, parameter_bytes=4000, saved_bytes=4000,
        forward_bytes=10,
    )  # fmt: skip
    assert texts(error)[0] == "recompute='layers' and optimizer='sgd'"
    assert is_on_more_devices(error.remedies[-1])


@pytest.mark.usefixtures("ample")
def test_sharding_is_offered_where_layers_cannot_be_cut():
    """Layers that stay together: stages cannot divide their state, replicas can."""
    profile = chain_profile([1] * 4, parameter_bytes=10_000, saved_bytes=10)
    names = [entry.layer.name for entry in profile.layers]
    options = PlanOptions(num_microbatches=4, together=((names[0], names[-1]),))
    error = refusal(profile, Cluster.uniform(4, memory_bytes=125_000), options)
    named = [text for text in texts(error) if text.startswith("strategies=")]
    assert named
    check_offers(error, profile)


@pytest.mark.usefixtures("ample")
def test_a_lighter_recipe_is_offered_from_the_mildest_up():
    """18 bytes a parameter in bf16_mixed, 16 with bf16 gradients, 8 in bf16 throughout."""
    profile = with_large_weights(random_profile(3, 3, ties=0))
    elements = sum(entry.numel for entry in profile.parameters)
    offered = {}
    for each in (17, 12):
        cluster = Cluster.uniform(1, memory_bytes=each * elements)
        error = refusal(profile, cluster, PlanOptions(num_microbatches=1))
        offered[each] = [text for text in texts(error) if "precision" in text]
    assert offered == {
        17: ["precision='bf16_mixed_bf16_gradients'"],
        12: ["precision='bf16'"],
    }


@pytest.mark.usefixtures("ample")
def test_remedies_are_found_where_layers_may_be_split_or_checkpointed():
    """Cause: requests with tensor parallelism or checkpoints of layers were told of no remedy."""
    for asked in ({"recompute": "layers"}, {"tensor": "auto"}):
        error = offers_of(PlanOptions(**asked), 52_000, parameter_bytes=4000, saved_bytes=10)
        assert "optimizer='adamw_8bit'" in texts(error)


def test_another_schedule_is_offered_without_what_only_the_first_takes():
    """Of interleaved 1F1B's three micro-batches in flight one is too many; 1F1B has two."""
    profile = chain_profile([1] * 4, parameter_bytes=400, saved_bytes=1000)
    cluster = Cluster.uniform(2, memory_bytes=7500)
    options = PlanOptions(schedule="interleaved_1f1b", num_microbatches=4, chunks=1)
    error = refusal(profile, cluster, options)
    offers = {offer.text: offer for offer in error.remedies}
    assert offers["schedule='1f1b'"].options.chunks == PlanOptions().chunks
