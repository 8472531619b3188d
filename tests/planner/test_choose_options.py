"""Schedule, chunks and micro-batches, where the request leaves them open."""

import re

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import Provenance, Reconciliation, Timing
from stagewright.planner import choose_options
from stagewright.planner.choose_options import CHUNKS, SCHEDULES
from stagewright.planner.plan import plan
from stagewright.schedules.traits import FOLDED, SEVERAL_STAGES
from tests.builders import chain_profile, random_profile

EVEN = chain_profile([0.01] * 32, parameter_bytes=4096, forward_bytes=2048, saved_bytes=2**20)
AUTO = {"schedule": "auto", "chunks": "auto", "num_microbatches": "auto"}


def test_micro_batches_are_the_fewest_whose_bubble_is_small():
    made = plan(EVEN, "4xcpu", num_microbatches="auto")
    assert (made.schedule, made.options.auto) == ("1f1b", ())
    assert made.options.num_microbatches == made.num_microbatches
    half = plan(EVEN, "4xcpu", num_microbatches=made.num_microbatches // 2)
    assert made.bubble_fraction < 0.1 < half.bubble_fraction


@pytest.mark.parametrize("count", [8, 32])
def test_schedule_and_chunks_chosen_are_about_the_fastest(count):
    made = plan(EVEN, "4xcpu", schedule="auto", chunks="auto", num_microbatches=count)
    assert made.num_microbatches == count
    steps = {}
    for name in SCHEDULES:
        has_chunks = name in SEVERAL_STAGES and name not in FOLDED
        for chunks in CHUNKS if has_chunks else (2,):
            options = PlanOptions(schedule=name, chunks=chunks, num_microbatches=count)
            steps[name, chunks] = plan(EVEN, "4xcpu", options).step_time_s
    assert made.step_time_s < min(steps.values()) * 1.03
    assert made.step_time_s < steps["1f1b", 2] * 0.98
    assert made.notes[0].startswith(f"schedule {made.schedule} chosen: about")


def test_more_chunks_are_taken_where_they_are_faster():
    """Few micro-batches: the bubble shrinks with every chunk."""
    made = plan(EVEN, "4xcpu", schedule="interleaved_1f1b", chunks="auto", num_microbatches=8)
    two = plan(EVEN, "4xcpu", schedule="interleaved_1f1b", chunks=2, num_microbatches=8)
    assert made.chunks > 2
    assert made.step_time_s < two.step_time_s
    assert f"{made.chunks} chunks chosen with it" in made.notes


def test_a_schedule_is_chosen_where_the_fastest_shapes_do_not_fit():
    """All replicas of few stages need too much memory; only the longest pipelines fit."""
    made = plan(
        chain_profile([0.01] * 32, parameter_bytes=2**20, forward_bytes=2048, saved_bytes=2**20),
        "8x60MB",
        PlanOptions(max_replicas=None, num_microbatches=8, auto=("schedule", "chunks")),
    )
    assert made.schedule != "1f1b"
    assert made.notes[0].startswith(f"schedule {made.schedule} chosen: ")


def test_1f1b_stays_where_no_other_is_faster():
    assert plan(EVEN, "1xcpu", **AUTO).schedule == "1f1b"


def test_1f1b_stays_where_forwards_are_too_short_for_what_each_costs_besides():
    """Sixteen stages of 0.3 ms in interleaved_zero_bubble took twice what 1f1b took."""
    short = chain_profile([0.0003] * 16)
    made = plan(short, "2xcpu", schedule="auto", chunks="auto", num_microbatches=4)
    assert made.schedule == "1f1b"
    assert re.search(r"would save \d+% if starting its forwards of .* cost nothing", made.notes[0])


@pytest.mark.parametrize(
    ("provenance", "share", "chosen"),
    [
        (Provenance(), None, "another"),
        (Provenance(), -0.5, "1f1b"),
        (Provenance(), 0.03, "another"),
        (Provenance(source="estimated", error_band=0.5), None, "1f1b"),
        (Provenance(source="estimated", error_band=0.03), None, "another"),
        (Provenance(source="estimated"), None, "1f1b"),
    ],
)
def test_another_schedule_has_to_gain_more_than_the_error_of_the_profile(provenance, share, chosen):
    whole = Timing(median_s=1)
    sums = share and Reconciliation(whole_forward=whole, whole_backward=whole, relative_error=share)
    profile = EVEN.model_copy(update={"provenance": provenance, "reconciliation": sums})
    made = plan(profile, "4xcpu", schedule="auto", chunks="auto", num_microbatches=8)
    assert (made.schedule == "1f1b") == (chosen == "1f1b")
    assert ("within the error of the profile" in made.notes[0]) == (chosen == "1f1b")


@pytest.mark.parametrize("devices", ["1xcpu", "2xcpu"])
def test_stages_asked_for_are_not_all_put_on_one_device(devices):
    expected = f"3 stages need 3 devices, but the cluster has {devices[0]}"
    with pytest.raises(Infeasible, match=expected):
        plan(EVEN, devices, PlanOptions(num_stages=3, auto=tuple(AUTO)))
    made = plan(EVEN, "2xcpu", PlanOptions(num_stages=4, auto=tuple(AUTO)))
    assert made.chunks == 2
    assert "1f1b does not fit" not in " ".join(made.notes)


def test_more_micro_batches_that_save_little_are_not_taken():
    """The sum of a tied weight over slow links is idle time that no micro-batch fills."""
    made = plan(chain_profile([0.001, 0.2, 0.001, 0.001]), "4xcpu", **AUTO)
    assert made.num_microbatches == 8
    assert "twice as many save less than 2% of the time" in made.notes[0]


def test_micro_batches_are_chosen_by_time_where_plans_use_other_numbers_of_devices(monkeypatch):
    """The bubble of a plan that leaves devices idle is of the others, and so no measure."""
    quick = {8: (0.177, 0.244), 16: (0.291, 0.253), 32: (0.557, 0.2), 64: (1.1, 0.199)}

    def quick_plans(study, count):
        step_s, bubble = quick[count]
        return [choose_options._QuickPlan("1f1b", 1, step_s, bubble, 0, 0.01)]

    monkeypatch.setattr(choose_options._Study, "quick_plans", quick_plans)
    made = plan(EVEN, "8xcpu", num_microbatches="auto")
    assert made.num_microbatches == 32


def test_a_schedule_that_does_not_fit_is_not_chosen():
    roomy = plan(EVEN, "4xcpu", schedule="auto", chunks="auto")
    tight = Cluster.uniform(4, memory_bytes=max(roomy.memory_by_device().values()) - 1)
    made = plan(EVEN, tight, schedule="auto", chunks="auto")
    assert max(made.memory_by_device().values()) < max(roomy.memory_by_device().values())


def test_other_objectives_are_left_alone():
    made = plan(EVEN, "4xcpu", PlanOptions(objective="throughput", auto=("schedule",)))
    assert (made.schedule, made.num_microbatches) == ("1f1b", 8)


def test_of_a_batch_only_the_schedule_is_chosen():
    profile = EVEN.model_copy(update={"inputs": random_profile(3, 4).inputs})
    size = profile.inputs[0].shape[0]
    made = plan(profile, "4xcpu", PlanOptions(batch_size=64 * size), **AUTO)
    assert made.options.batch_size == 64 * size
    assert made.num_microbatches * made.microbatch_size == 64 * size
    assert made.schedule != "1f1b"


def test_what_is_given_is_not_chosen():
    given = PlanOptions(auto=("schedule", "chunks", "num_microbatches"))
    made = plan(EVEN, "4xcpu", given, schedule="gpipe", num_microbatches=5)
    assert (made.schedule, made.num_microbatches) == ("gpipe", 5)


def test_the_choice_is_the_same_every_time():
    found = {plan(random_profile(3, 24), "2x4xcpu", **AUTO).options for _ in range(3)}
    assert len(found) == 1


def test_a_wrong_schedule_is_refused():
    with pytest.raises(InvalidInput, match="schedule"):
        plan(EVEN, "4xcpu", schedule="automatic")
