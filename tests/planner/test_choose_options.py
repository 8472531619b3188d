"""Schedule and micro-batches, where the request leaves them open."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.choose_options import SCHEDULES, choose_options
from stagewright.planner.plan import plan
from tests.builders import chain_profile, random_profile

EVEN = chain_profile([0.01] * 32, parameter_bytes=4096, forward_bytes=2048, saved_bytes=2**20)


def test_micro_batches_are_the_fewest_whose_bubble_is_small():
    chosen = choose_options(EVEN, "4xcpu", schedule=False).options
    assert chosen.schedule == "1f1b"
    bubbles = {
        count: plan(EVEN, "4xcpu", num_microbatches=count).bubble_fraction
        for count in (chosen.num_microbatches // 2, chosen.num_microbatches)
    }
    assert bubbles[chosen.num_microbatches] < 0.1 < bubbles[chosen.num_microbatches // 2]


def test_the_schedule_chosen_is_about_the_fastest():
    for count in (8, 32):
        given = PlanOptions(num_microbatches=count)
        chosen = choose_options(EVEN, "4xcpu", given, num_microbatches=False)
        assert chosen.options.num_microbatches == count
        steps = {
            name: plan(EVEN, "4xcpu", given.model_copy(update={"schedule": name})).step_time_s
            for name in SCHEDULES
        }
        assert steps[chosen.options.schedule] < min(steps.values()) * 1.03
        assert steps[chosen.options.schedule] < steps["1f1b"] * 0.98
        assert chosen.reasons[0].startswith(f"schedule {chosen.options.schedule} chosen: about")


def test_1f1b_stays_where_no_other_is_faster():
    assert choose_options(EVEN, "1xcpu").options.schedule == "1f1b"


def test_more_micro_batches_that_save_little_are_not_taken():
    """The sum of a tied weight over slow links is idle time that no micro-batch fills."""
    skewed = chain_profile([0.001, 0.2, 0.001, 0.001])
    found = choose_options(skewed, "4xcpu")
    assert found.options.num_microbatches == 8
    assert "more would shrink it little" in found.reasons[0]


def test_a_schedule_that_does_not_fit_is_not_chosen():
    roomy = choose_options(EVEN, "4xcpu", num_microbatches=False).options
    peak = max(
        sum(stage.memory.total_bytes for stage in made.stages if stage.devices == device)
        for made in (plan(EVEN, "4xcpu", roomy),)
        for device in {stage.devices for stage in made.stages}
    )
    tight = Cluster.uniform(4, memory_bytes=peak - 1)
    chosen = choose_options(EVEN, tight, num_microbatches=False).options
    held = plan(EVEN, tight, chosen)
    assert held.schedule == chosen.schedule


def test_where_nothing_fits_planning_says_why():
    options = choose_options(EVEN, Cluster.uniform(4, memory_bytes=1024)).options
    assert (options.schedule, options.num_microbatches) == ("1f1b", 8)


def test_other_objectives_are_left_alone():
    given = PlanOptions(objective="throughput", num_microbatches=5)
    assert choose_options(EVEN, "4xcpu", given).options == given


def test_of_a_batch_only_the_schedule_is_chosen():
    given = PlanOptions(batch_size=64)
    chosen = choose_options(EVEN, "4xcpu", given).options
    assert chosen.batch_size == 64
    assert "num_microbatches" not in chosen.model_fields_set
    assert chosen.schedule != "1f1b"


def test_the_choice_is_the_same_every_time():
    found = {choose_options(random_profile(3, 24), "2x4xcpu").options for _ in range(3)}
    assert len(found) == 1


def test_a_path_is_refused():
    with pytest.raises(InvalidInput, match="read it first"):
        choose_options("profile.json", "4xcpu")  # type: ignore[arg-type]
