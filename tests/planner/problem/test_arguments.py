"""What is no profile, cluster, plan, options or deadline is refused in words, by every function."""

import pytest

import stagewright
from stagewright.core.errors import InvalidInput
from tests.builders import chain_profile

PROFILE = chain_profile([1, 1])
PLAN = stagewright.plan(PROFILE, "2xcpu")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stagewright.plan("p.json", "2xcpu"), "Profile.read.'p.json'"),
        (lambda: stagewright.plan(["p.json"], "2xcpu"), "Profile.read.'p.json'"),
        (lambda: stagewright.plan(None, "2xcpu"), "the profile is a NoneType"),
        (lambda: stagewright.plan([], "2xcpu"), "at least one profile"),
        (lambda: stagewright.plan(PROFILE, None), "the cluster is a NoneType"),
        (lambda: stagewright.plan(PROFILE, ["2xcpu"]), "the cluster is a list"),
        (lambda: stagewright.plan(PROFILE, "2xcpu", {}), "the options are a dict"),
        (lambda: stagewright.plan(PROFILE, "2xcpu", progress=3), "progress is 3"),
        (lambda: stagewright.validate("p.json", PROFILE, "2xcpu"), "Plan.read.'p.json'"),
        (lambda: stagewright.validate(PLAN, "p.json", "2xcpu"), "Profile.read.'p.json'"),
        (lambda: stagewright.validate(PLAN, PROFILE, None), "the cluster is a NoneType"),
        (lambda: stagewright.explain(PLAN, None, "2xcpu"), "the profile is a NoneType"),
        (lambda: stagewright.balance_by_time("2", None, None), "partitions is '2'"),
        (lambda: stagewright.balance_by_time(0, None, None), "partitions is 0"),
        (lambda: stagewright.balance_by_size(2, None, None), "a NoneType, not a torch.nn.Module"),
        *[
            (lambda d=d: stagewright.plan(PROFILE, "2xcpu", deadline_s=d), "deadline_s is ")
            for d in (float("nan"), -1, "1", True, [1])
        ],
    ],
)
def test_refused_in_words(call, said):
    with pytest.raises(InvalidInput, match=said):
        call()


def test_shorthand_will_do_for_a_cluster_everywhere():
    stagewright.validate(PLAN, PROFILE, "2xcpu")
    assert stagewright.explain(PLAN, PROFILE, "2xcpu").step_time_s == PLAN.step_time_s
    assert stagewright.plan(PROFILE, "2xcpu", deadline_s=float("inf")) == PLAN
