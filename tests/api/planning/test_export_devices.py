"""Plans on unlike devices, exported by the service, are the same plans when they are read back.

Exports are written in solver processes, as they are served; refusals have to come through them.
"""

import random
from collections import Counter

import pytest

from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.forward_only import for_serving
from stagewright.formats.check_cut import check_cut
from stagewright.formats.plan_for import apply_rules
from stagewright.formats.runtimes.registry import TARGETS, import_cut
from tests.formats.unlike_clusters import build_profile, draw_cluster, without_memory_limits

NUM_CLUSTERS = 300
PROFILE = build_profile()


def ask(client, path, request):
    answer = client.post(path, json=request)
    assert answer.status_code == 201, answer.text
    return answer.json()


@pytest.fixture
def served(make_client):
    """A service with as many processes as it has by default."""
    return make_client(plan_processes=2)


def test_every_export_is_the_plan_or_a_named_refusal(served):
    draw, exported, refused = random.Random(45), Counter(), Counter()
    names = [*TARGETS]
    for number in range(NUM_CLUSTERS):
        target = TARGETS[names[number % len(names)]]
        rules = target.rules
        costs = PROFILE
        if rules.inference:
            costs = for_serving(PROFILE, last_position=rules.last_position)
        schedule = (rules.schedules or ("1f1b",))[0]
        options = PlanOptions(schedule=schedule, num_microbatches=4, num_stages=2, gap=0.1)
        if draw.random() < 0.7:
            options = apply_rules(target, costs, options)
        cluster = without_memory_limits(draw_cluster(draw, inference=rules.inference))
        request = {
            "profile": costs.model_dump(mode="json"),
            "cluster": cluster.model_dump(mode="json"),
            "options": options.model_dump(mode="json"),
        }
        created = ask(served, "/v1/plans", request)
        made = Plan.model_validate(created["plan"])
        answer = served.get(f"/v1/plans/{created['id']}/exports/{target.name}")
        if answer.status_code != 200:
            assert answer.status_code == 422, answer.text
            assert f"{target.title} cannot express this plan" in answer.json()["detail"]
            refused[target.name] += 1
            continue
        exported[target.name] += 1
        cut = import_cut(answer.text, target.name, PROFILE)
        report = check_cut(cut, PROFILE, cluster, made.options, search=lambda *_, plan=made: plan)
        assert report.reasons == ()
        assert [(stage.layer_names, stage.devices) for stage in report.plan.stages] == [
            (stage.layer_names, stage.devices) for stage in made.stages
        ]
    assert min(exported[name] for name in TARGETS) >= 7, exported
    assert refused.total() >= 10
    assert len(refused) >= 4
