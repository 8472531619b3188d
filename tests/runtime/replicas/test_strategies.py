"""Replicas that share weights, or leave gradients to torch: the unsplit model's numbers."""

import json

import pytest

from tests.runtime.forked import run_as_on_nccl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(200)]

EACH_WAITS = {
    "name": "1f1b",
    "num_microbatches": 3,
    "stage_ranks": [[0], [1, 2, 3]],  # stage 0 goes on once each backward behind it is done
    "ranks": [
        ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"],
        ["1F0", "1B0"],
        ["1F1", "1B1"],
        ["1F2", "1B2"],
    ],
}
TWO, TWICE = {"stages": 1, "replicas": [2]}, {"stages": 2, "replicas": [2, 2]}
ON_TWO = [
    {"model": "mlp", "schedule": "1f1b", "strategy": "reduce", **TWO},
    {"model": "mlp", "schedule": "1f1b", "strategy": "fully_shard", "checkpoint": True, **TWO},
    {"model": "mlp", "schedule": "gpipe", "strategy": "fully_shard", "microbatches": 5, **TWO},
    {"model": "mlp", "schedule": "gpipe", "strategy": "ddp", "microbatches": 5, **TWO},
    *(
        {"model": "idle", "schedule": "1f1b", "strategy": strategy, **TWO}
        for strategy in ("reduce", "ddp", "fully_shard")
    ),
    {
        "model": "tied", "schedule": "zero_bubble", "strategy": "fully_shard",
        "recompute": "always", **TWO,
    },
]  # fmt: skip
ON_FOUR = [
    {"model": "tied", "schedule": "1f1b", "strategy": "fully_shard", **TWICE},
    {"model": "tied", "schedule": "zero_bubble", "strategy": "fully_shard", **TWICE},
    {
        "model": "tied", "schedule": "zbv", "strategy": "fully_shard",
        "stages": 4, "chunks": 2, "replicas": [2] * 4,
    },
    {"model": "mlp", "schedule": "1f1b", "strategy": {"0": "ddp", "1": "fully_shard"}, **TWICE},
    *(
        {
            "model": "mlp", "schedule": "1f1b", "strategy": strategy, "own": EACH_WAITS,
            "stages": 2, "replicas": [1, 3], "microbatches": 3,
        }
        for strategy in ("fully_shard", "ddp")
    ),
    {
        "model": "mlp", "schedule": "1f1b", "planned": "fully_shard",
        "stages": 2, "replicas": [3, 1], "microbatches": 6,
    },
]  # fmt: skip
VARIANTS = {2: ON_TWO, 4: ON_FOUR}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def results(folder, forking_executable):
    """Every rank's account of every variant, from one run."""
    variants = {
        ranks: [
            {**each, "checkpoint": str(folder)} if "checkpoint" in each else each for each in found
        ]
        for ranks, found in VARIANTS.items()
    }
    (folder / "variants.json").write_text(json.dumps(variants), encoding="utf-8")
    run_as_on_nccl(
        forking_executable, "tests.runtime.strategies_worker", str(folder), timeout_s=180
    )
    found = [
        json.loads(line)
        for path in sorted(folder.glob("*-*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert len(found) == 2 * len(ON_TWO) + 4 * len(ON_FOUR)
    return found


@pytest.fixture
def run(results):
    """Those that were not refused."""
    return [entry for entry in results if "refused" not in entry]


def test_three_steps_of_which_one_is_not_summed_have_the_gradients_of_the_model(run):
    assert run
    for entry in run:
        assert max(entry["loss"], entry["gradient"], entry["buffer"]) <= 1e-9, entry


def test_weights_without_gradient_get_none(run):
    """So that weight decay leaves them alone, as in the unsplit model."""
    idle = [entry for entry in run if entry["variant"]["model"] == "idle"]
    assert len(idle) == 6
    for entry in idle:
        wanted = ["backbone.weight", "backbone.bias", "spare.weight", "spare.bias"]
        assert entry["without_gradient"] == wanted, entry


def test_replicas_agree_which_weights_have_gradients(results, folder):
    """One has the first two, the other the second; none the third."""
    for rank in (0, 1):
        found = json.loads((folder / f"agreed-{rank}.json").read_text(encoding="utf-8"))
        assert found == [[1.0 - rank], [1.0], None]


def test_gradients_are_clipped_by_the_norm_of_the_whole_model(run):
    for entry in run:
        assert max(entry["norm"], entry["clipped"]) <= 1e-9, entry


def test_optimizers_make_the_weights_of_the_model_and_evaluation_its_outputs(run):
    for entry in run:
        assert max(entry["trained"], entry["evaluated"]) <= 1e-9, entry


def test_every_replica_holds_its_part_of_weights_gradients_and_momenta(run):
    """All of a stage but weights that another stage uses, split along the first dimension."""
    several = [entry for entry in run if entry["sharded"]]
    assert several
    for entry in several:
        replicas = max(entry["variant"]["replicas"])
        whole = entry["bytes"] - entry["of_parameters"] + entry["of_sharded"]
        assert entry["of_sharded"] <= 1.1 * whole / replicas, entry
        if entry["variant"]["model"] != "idle":  # of which a part is not used
            assert entry["of_gradients"] == entry["of_optimizer"] == entry["trainable"], entry
        if entry["variant"]["model"] == "mlp":  # of the others a part is used by several or none
            assert entry["of_sharded"] == entry["of_parameters"], entry


def test_stages_are_sharded_where_asked_or_planned(run):
    for entry in run:
        replicas = entry["variant"]["replicas"]
        ranks = [stage for stage, count in enumerate(replicas) for _ in range(count)]
        stage = ranks[entry["rank"]] if "chunks" not in entry["variant"] else 0
        asked = entry["variant"].get("strategy", entry["variant"].get("planned"))
        asked = asked[str(stage)] if isinstance(asked, dict) else asked
        wanted = asked not in ("reduce", "ddp") and replicas[stage] > 1
        assert bool(entry["sharded"]) == wanted, entry


def test_what_would_wait_for_ever_is_refused_by_every_rank(results):
    for entry in results:
        waits = "own" in entry["variant"]
        assert ("refused" in entry) == waits, entry
        if waits:
            assert "would deadlock" in entry["refused"]


def test_checkpoints_of_shards_load_whole_and_back(run):
    resumed = [entry["resumed"] for entry in run if "resumed" in entry]
    assert len(resumed) in (0, 2)
    assert max(resumed, default=0) <= 1e-9
