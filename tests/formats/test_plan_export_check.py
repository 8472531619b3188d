"""A plan that is exported, imported and checked is the same plan, on the same devices.

Exports once numbered stages where runtimes count GPUs, and imported cuts were priced as if stage i
were on device i: on unlike cards neither is true.
"""

import random
import re
from collections import Counter

import pytest

from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import PlanOptions
from stagewright.formats.check_cut import check_cut
from stagewright.formats.expressible import Inexpressible
from stagewright.formats.plan_for import plan_for
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.planner.cost.device_classes import usable_bytes
from tests.formats.unlike_clusters import (
    build_profile,
    draw_cluster,
    draw_placed_plan,
    without_memory_limits,
)

NUM_CLUSTERS = 300
FEATURES = {"several nodes", "order of nodes", "unequal nodes"}
"""Features of placement that a runtime may lack."""

PROFILE = build_profile()


def list_stages(plan):
    return [(stage.layer_names, stage.devices) for stage in plan.stages]


def check_again(made, name, cluster):
    """Export a plan, import the text, and judge the cut on a cluster."""
    cut = import_cut(export(made, name).text, name, PROFILE)
    return check_cut(cut, PROFILE, cluster, made.options, search=lambda *_: made)


@pytest.mark.parametrize("name", TARGETS)
def test_stages_anywhere_keep_their_devices(name):
    draw, seen = random.Random(name), Counter()
    for _ in range(NUM_CLUSTERS):
        cluster = draw_cluster(draw, inference=TARGETS[name].rules.inference)
        made = draw_placed_plan(draw, TARGETS[name], PROFILE, without_memory_limits(cluster))
        try:
            report = check_again(made, name, cluster)
        except Inexpressible as error:
            seen.update(each.feature for each in error.rejections)
            continue
        seen["exported"] += 1
        assert list_stages(report.plan or report.unlimited) == list_stages(made)
        limits = {
            each.name: usable_bytes(each.memory_bytes, made.options) for each in cluster.devices
        }
        held = made.memory_by_device()
        if any(held[name] > limits[name] for name in held):
            seen["too large"] += 1
            assert re.search(r"needs .*, device '.*' allows", report.reasons[0])
        else:
            seen["fits"] += 1
            assert report.reasons == ()
    assert seen.keys() <= {"exported", "fits", "too large", *FEATURES}
    assert min(seen["exported"], 3 * seen["fits"], 10 * seen["too large"]) > NUM_CLUSTERS / 3, seen
    told = TARGETS[name].rules.devices
    assert seen["several nodes"] == 0 or told == "numbers"
    refused = {
        "numbers": "several nodes",
        "nodes": "order of nodes",
        "equal_nodes": "unequal nodes",
    }
    assert told == "ranks" or seen[refused[told]] > 0


@pytest.mark.parametrize("name", TARGETS)
def test_the_planner_s_own_plans_run(name):
    draw, exported, moved, refused = random.Random(name), 0, 0, set[str]()
    target = TARGETS[name]
    schedule = (target.rules.schedules or ("1f1b",))[0]
    replicas = 1 if target.rules.replicas == "none" else None
    options = PlanOptions(schedule=schedule, num_microbatches=12, max_replicas=replicas)
    for _ in range(NUM_CLUSTERS // len(TARGETS) + 1):
        cluster = draw_cluster(draw, inference=TARGETS[name].rules.inference)
        try:
            made = plan_for(target, PROFILE, cluster, options).plan
        except Infeasible:
            continue
        except Inexpressible as error:
            refused.update(each.feature for each in error.rejections)
            continue
        report = check_again(made, name, cluster)
        assert report.reasons == ()
        assert list_stages(report.plan) == list_stages(made)
        assert report.plan.step_time_s == pytest.approx(made.step_time_s)
        exported += 1
        moved += bool(made.ranks)
    assert refused <= FEATURES
    assert exported >= 8
    assert moved >= 3
