"""Across processes, any schedule: the same numbers as the unsplit model."""

import json

import pytest

from stagewright.core.plan.plan import Plan
from stagewright.core.plan.timeline import Timeline
from stagewright.runtime.compare import compare
from stagewright.schedules.plan_schedule import schedule_of
from tests.runtime.forked import run_as_on_nccl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]

V = {"chunks": 2, "stages": 4}
ON_TWO = [
    *({"model": "mlp", "schedule": name, "stages": 2} for name in ("gpipe", "1f1b", "zero_bubble")),
    *(
        {"model": "mlp", "schedule": name, **V}
        for name in (
            "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev",
        )
    ),
    {"model": "mlp", "schedule": "1f1b", "stages": 2, "dtype": "float32"},
    {"model": "mlp", "schedule": "gpipe", "stages": 2, "microbatches": 1},
    *(
        {
            "model": model, "schedule": "1f1b", "stages": 2, "dtype": "float32",
            "autocast": "bfloat16", "recompute": "always",
        }
        for model in ("mlp", "unet")
    ),
    {"model": "resnet", "schedule": "1f1b", "stages": 2, "recompute": "always"},
    {"model": "resnet", "schedule": "zbv", "recompute": "always", **V},
    {"model": "unet", "schedule": "1f1b", "stages": 2, "traced": True},
    {"model": "unet", "schedule": "interleaved_zero_bubble", **V},
    {"model": "gpt2", "schedule": "1f1b", "stages": 2},
    {"model": "gpt2", "schedule": "dualpipev", **V},
    {"model": "gpt2", "schedule": "zero_bubble", "stages": 2, "recompute": "always"},
]  # fmt: skip
UNEVEN_RANKS = {
    "name": "gpipe",
    "num_microbatches": 2,
    "stage_ranks": [[0], [1], [0], [2]],  # rank 0 holds two stages, the others one
    "ranks": [
        ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"],
        ["1F0", "1F1", "1I0", "1W0", "1B1"],
        ["3F0", "3B0", "3F1", "3B1"],
    ],
}
ON_THREE = [
    {"model": "mlp", "schedule": "1f1b", "stages": 2, "replicas": [2, 1], "traced": True},
    {"model": "mlp", "schedule": "1f1b", "stages": 2, "replicas": [1, 2], "recompute": "always"},
    {"model": "mlp", "schedule": "1f1b", "stages": 1, "replicas": [3], "microbatches": 5},
    {"model": "mlp", "schedule": "gpipe", "stages": 4, "microbatches": 2, "own": UNEVEN_RANKS},
    {"model": "gpt2", "schedule": "1f1b", "stages": 2, "replicas": [2, 1]},
    {"model": "gpt2", "schedule": "gpipe", "stages": 2, "replicas": [1, 2]},
    {"model": "gpt2", "schedule": "1f1b", "stages": 3},
    {"model": "unet", "schedule": "1f1b", "stages": 2, "replicas": [1, 2], "recompute": "always"},
    {"model": "resnet", "schedule": "gpipe", "stages": 2, "replicas": [2, 1], "microbatches": 5},
]
ON_THREE_BOUND = [
    {"model": "mlp", "schedule": "1f1b", "stages": 3, "traced": True},
    {"model": "mlp", "schedule": "interleaved_1f1b", "stages": 6, "chunks": 2},
    {"model": "unet", "schedule": "zero_bubble", "stages": 3},
    {"model": "mlp", "schedule": "1f1b", "stages": 2, "replicas": [1, 2]},
]
ON_FOUR = [
    {"model": "mlp", "schedule": "1f1b", "stages": 3, "replicas": [1, 2, 1], "traced": True},
    {"model": "gpt2", "schedule": "1f1b", "stages": 3, "replicas": [1, 2, 1]},
    {"model": "gpt2", "schedule": "zbv", "stages": 4, "chunks": 2, "replicas": [2] * 4},
    {"model": "unet", "schedule": "interleaved_1f1b", "stages": 8, "chunks": 2},
]
CASES = {
    "2 ranks": (2, ON_TWO, False),
    "2 bound ranks": (2, ON_TWO, True),
    "3 ranks": (3, ON_THREE, False),
    "3 bound ranks": (3, ON_THREE_BOUND, True),
    "4 ranks": (4, ON_FOUR, False),
}


@pytest.fixture(scope="module", params=CASES)
def results(request, tmp_path_factory, forking_executable):
    """Every rank's account of every variant, from one run."""
    ranks, variants, is_bound = CASES[request.param]
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("equality")
    (folder / "variants.json").write_text(json.dumps(variants), encoding="utf-8")
    arguments = ("tests.runtime.equality_worker", str(folder), str(ranks))
    run_as_on_nccl(forking_executable, *arguments, timeout_s=240, is_bound=is_bound)
    found = [
        json.loads(line)
        for rank in range(ranks)
        for line in (folder / f"{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(found) == ranks * len(variants)
    return found


def test_double_precision_is_exact(results):
    for entry in results:
        if entry["variant"].get("dtype") != "float32":
            assert entry["gradient"] <= 1e-9, entry
            assert max(entry["norm"], entry["clipped"]) <= 1e-9, entry
            assert entry["buffer"] <= 1e-9, entry


def test_losses_agree(results):
    losses = [entry for entry in results if entry["loss"] is not None]
    assert losses
    for entry in losses:
        is_single = entry["variant"].get("dtype") == "float32"
        assert entry["loss"] <= (1e-5 if is_single else 1e-9), entry


def test_single_precision_is_close_under_autocast_too(results):
    for entry in results:
        if entry["variant"].get("dtype") == "float32":
            found = (entry["gradient"], entry["buffer"], entry["norm"], entry["clipped"])
            assert max(found) <= 1e-5, entry


def test_evaluation_gives_the_models_output(results):
    evaluated = [entry for entry in results if entry["evaluated"] is not None]
    assert evaluated
    for entry in evaluated:
        is_single = entry["variant"].get("dtype") == "float32"
        assert entry["evaluated"] <= (1e-5 if is_single else 1e-9), entry


def test_ranks_hold_every_name_between_them(results):
    runs = {}
    for entry in results:
        key = json.dumps(entry["variant"])
        runs.setdefault(key, (set(), set(entry["all_names"])))[0].update(entry["names"])
    assert all(held == wanted for held, wanted in runs.values())


def test_work_is_done_in_the_order_of_the_schedule(results):
    assert all(entry["order"] for entry in results)


def test_a_recorded_step_holds_every_action_once_and_after_what_it_reads(results):
    traced = [entry for entry in results if entry["timeline"] is not None]
    assert traced
    for entry in traced:
        plan, timeline = (
            Plan.model_validate(entry["plan"]), Timeline.model_validate(entry["timeline"]),
        )  # fmt: skip
        found = [f"{e.rank}: {e.stage}{e.kind.value}{e.microbatch}" for e in timeline.events]
        ranks = enumerate(schedule_of(plan).ranks)
        assert sorted(found) == sorted(f"{r}: {action}" for r, acts in ranks for action in acts)
        assert timeline.source == "measured"
        ends = {(e.stage, e.kind, e.microbatch): e.end_s for e in timeline.events}
        for event in timeline.events:
            before = ends.get((event.stage - 1, event.kind, event.microbatch))
            if event.kind == "F" and before is not None:
                assert event.start_s >= before - 5e-3  # clocks are read to about a barrier's time
        assert all(each.measured_s > 0 for each in compare(plan, timeline).stages)
