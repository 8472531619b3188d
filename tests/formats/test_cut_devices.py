"""Devices of exported and imported stages: numbers of GPUs, not of stages."""

import re
from dataclasses import replace

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.forward_only import for_serving
from stagewright.formats.check_cut import check, import_
from stagewright.formats.runtimes.registry import TARGETS, export
from stagewright.planner.price_split import plan_from_balance
from tests.formats.unlike_clusters import BLOCKS, LAYER_BYTES, NAMES, build_profile

PROFILE = build_profile()
FORWARD = for_serving(PROFILE, last_position=False)
ONE = PlanOptions(num_microbatches=2)


def build_cluster(*layers, nodes=()):
    """Devices that hold so many layers without optimizer state, of the given machines."""
    devices = tuple(
        Device(
            name=f"gpu{index}",
            kind=f"{count}",
            memory_bytes=int((count + 0.5) * LAYER_BYTES),
            place={"node": str(nodes[index])} if nodes else {},
        )
        for index, count in enumerate(layers)
    )
    levels = (LinkLevel(name="node"), LinkLevel(name="network"))
    return Cluster(devices=devices, levels=levels if nodes else levels[:1])


def write_map(first, second, count, **more):
    """A map of the first blocks to one device and the others to another."""
    blocks = {f"layers.{block}": first if block < count else second for block in range(BLOCKS)}
    return str({"embed": first, **blocks, "norm": second, "head": second, **more})


def write_torch(first, second, form):
    """The map of the first block apart with devices as Python shows and writes those of torch."""
    form = form.replace("{}", r"\1")
    return re.sub(r": (\d)", rf": {form}", write_map(first, second, 1))


ORDERS = {
    "accelerate": '"layers.0": 1',
    "llama.cpp": "--device CUDA1,CUDA0 --split-mode layer --tensor-split 3,4",
    "vllm": "\nexport CUDA_VISIBLE_DEVICES=1,0\n",
    "sglang": "\nexport CUDA_VISIBLE_DEVICES=1,0\n",
    "torchgpipe": "\ndevices = [1, 0]\n",
    "pipedream": '"stage_to_rank_map": {\n    "0": [\n      1\n    ],\n    "1": [\n      0',
}
"""What says that stage 0 is on GPU 1; elsewhere a comment gives the order of ranks."""


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("devices", [((0,), (1,)), ((1,), (0,))])
def test_an_export_has_the_numbers_of_the_plan_s_gpus(name, devices):
    target = TARGETS[name]
    profile = FORWARD if target.rules.inference else PROFILE
    schedule = (target.rules.schedules or ("1f1b",))[0]
    options = PlanOptions(schedule=schedule, num_microbatches=2)
    made = plan_from_balance(profile, build_cluster(90, 80), options, (4, 5), devices=devices)
    text = export(made, name).text
    order = ORDERS.get(name, "# node 0: CUDA_VISIBLE_DEVICES=1,0\n")
    assert (order in text) == (devices[0] == (1,))
    assert ("stage 0 on gpu1 (GPU 1)" in text) == (devices[0] == (1,))
    assert "VISIBLE" not in text or devices[0] == (1,)


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [
        ("accelerate", write_map(0, 1, 1), write_map(1, 0, 1)),
        ("accelerate", write_map("cuda:0", "cuda:1", 1), write_map("cuda:1", "cuda:0", 1)),
        ("accelerate", f"CUDA_VISIBLE_DEVICES=1,0\n{write_map(1, 0, 1)}",
         f"CUDA_VISIBLE_DEVICES=1,0\ndevice_map = {write_map(0, 1, 1)}"),
        ("accelerate", f"os.environ['CUDA_VISIBLE_DEVICES'] = '1,0'\nm = {write_map(1, 0, 1)}",
         f"environ.setdefault('CUDA_VISIBLE_DEVICES', '1,0')\nm = {write_map(0, 1, 1)}"),
        ("accelerate", write_torch(0, 1, "device(type='cuda', index={})"),
         write_torch(1, 0, "torch.device('cuda:{}')")),
        ("llama.cpp", "-ts 0,1,0", "-ts 1,0,0"),
        ("llama.cpp", "-ts 1,6 -ngl all", "--device CUDA1,CUDA0 -ts 1,6 -ngl all"),
        ("llama.cpp", "-sm none -mg 1 -ts 1,1", "-sm none -mg 0 -ts 1,1"),
        ("llama.cpp", "-dev ROCm0,ROCm1 -ts 1,6", "HIP_VISIBLE_DEVICES=1,0 llama-server -ts 1,6"),
        ("vllm", "VLLM_PP_LAYER_PARTITION=1,5",
         "CUDA_VISIBLE_DEVICES=1,0 VLLM_PP_LAYER_PARTITION=1,5"),
        ("sglang", "SGLANG_PP_LAYER_PARTITION=1,5",
         "export SGLANG_PP_LAYER_PARTITION=1,5\nexport CUDA_VISIBLE_DEVICES=1,0\n"),
        ("tensorrt-llm", "pp_partition: [1, 5]",
         "# node 0: CUDA_VISIBLE_DEVICES=1,0\npp_partition: [1, 5]"),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_device_a_cut_names(name, small, large):
    """One layer of two fits on GPU 1, nearly all of them on GPU 0."""
    cluster = build_cluster(20, 3, 3)
    refused = check(small, name, PROFILE, cluster, ONE)
    assert "device 'gpu1' allows" in refused.reasons[0]
    assert check(large, name, PROFILE, cluster, ONE).reasons == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("megatron", "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers {}"),
        ("megatron", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {layout}"),
        ("deepspeed", "PARTS = [0, {end}, 9]"),
    ],
)
def test_ranks_are_dealt_machine_by_machine(name, text):
    """With two stages on four GPUs the second stage is on the second machine, as two replicas."""
    cluster = build_cluster(90, 90, 12, 12, nodes=(0, 0, 1, 1))
    for first, fits in ((1, False), (5, True)):
        layout = f"Et*{first}|t*{BLOCKS - first}L"
        given = text.format(first, layout=layout, end=1 + first)
        report = check(given, name, PROFILE, cluster, ONE)
        assert (report.reasons == ()) == fits
        priced = report.plan or report.unlimited
        assert [stage.devices for stage in priced.stages] == [("gpu0", "gpu1"), ("gpu2", "gpu3")]


@pytest.mark.parametrize(("name", "text"), [("llama.cpp", "-ts 1,1"), ("accelerate", None)])
def test_one_process_has_the_gpus_of_one_machine(name, text):
    """The number after a machine's last was taken for the first GPU of the next machine."""
    cluster = build_cluster(90, 90, nodes=(0, 1))
    with pytest.raises(InvalidInput, match="GPU 1, but there are 1"):
        check(text or write_map(0, 1, 3), name, PROFILE, cluster, ONE)


def test_gpus_that_the_machine_does_not_have_are_refused():
    with pytest.raises(InvalidInput, match="GPU 5, but there are 2"):
        check(write_map(0, 5, 3), "accelerate", PROFILE, build_cluster(90, 90))
    with pytest.raises(InvalidInput, match="GPU 2 of node 0, which has 2"):
        check(
            "CUDA_VISIBLE_DEVICES=2,0 VLLM_PP_LAYER_PARTITION=3,3",
            "vllm",
            PROFILE,
            build_cluster(90, 90),
        )
    with pytest.raises(InvalidInput, match="--device CUDA0 has 1 devices, but number 1"):
        check("--device CUDA0 -ts 1,1", "llama.cpp", PROFILE, build_cluster(90, 90))
    with pytest.raises(InvalidInput, match="write a GPU's number"):
        check(write_map(0, "tpu:1", 3), "accelerate", PROFILE, build_cluster(90, 90))


def test_a_plan_numbers_each_device_once():
    made = plan_from_balance(PROFILE, build_cluster(90, 80), ONE, (4, 5), devices=((1,), (0,)))
    assert made.ranks == (1, 0)
    for ranks in ([1, 0, 1], [1], [1, 1]):
        with pytest.raises(ValueError, match="not one number for each of 2 devices"):
            Plan.model_validate({**made.model_dump(), "ranks": ranks})


def with_weightless(profile, *names):
    """The profile with some layers that have no weights."""
    layers = tuple(
        entry.model_copy(update={"layer": entry.layer.model_copy(update={"parameter_bytes": 0})})
        if entry.layer.name in names
        else entry
        for entry in profile.layers
    )
    return profile.model_copy(update={"layers": layers, "parameters": ()})


@pytest.mark.parametrize("bare", [("layers.1",), ("embed",), ("layers.1", "layers.2"), ("norm",)])
def test_modules_without_weights_run_where_their_neighbours_do(bare):
    """transformers itself puts ``rotary_emb`` on the last device, where its first users are not."""
    profile = with_weightless(PROFILE, *bare)
    far = dict.fromkeys(bare, 0 if bare == ("norm",) else 1)
    report = check(write_map(0, 1, 4, **far), "accelerate", profile, build_cluster(90, 90), ONE)
    assert report.reasons == ()
    assert report.plan.balance == (5, 4)
    assert any("without weights" in note and bare[0] in note for note in report.notes)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("accelerate", write_map(0, 1, 3, head=0), "stages 0, 2 are on one device, gpu0"),
        ("accelerate", write_map(0, 1, 3, head="cpu"), "stage 2 is on no GPU"),
        ("accelerate", write_map("disk", 1, 3), "stage 0 is on no GPU"),
        ("accelerate", write_map(0, 1, 3, **{"layers.5": 0}), "stages 0, 2 are on one device"),
        ("megatron", "Et*3||t*3|L", "stage 1 is without layers"),
        ("megatron", "Et*3|t*3|m|L", "stage 2 is without layers"),
        ("megatron",
         "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*3|m|L",
         "stage 2 is without layers, of 2 on each device"),
        ("deepspeed", "PARTS = [0, 4, 4, 9]", "stage 1 is without layers"),
    ],
)  # fmt: skip
def test_what_runs_without_a_price_is_not_refused(name, text, said):
    assert "cannot run" not in str(check(text, name, PROFILE, build_cluster(90, 90, 90, 90), ONE))
    report = check(text, name, PROFILE, build_cluster(90, 90, 90, 90), ONE)
    assert report.to_dict()["runs"]
    assert any(said in note for note in report.notes)


def test_memory_of_what_has_no_price_is_checked():
    head_first = write_map(0, 1, 3, head=0)
    assert check(head_first, "accelerate", PROFILE, build_cluster(6, 5), ONE).reasons == ()
    for layers in ((4, 9), (9, 3)):
        report = check(head_first, "accelerate", PROFILE, build_cluster(*layers), ONE)
        assert "allows" in report.reasons[0]
    with pytest.raises(InvalidInput, match="no plan: stages 0, 2 are on one device"):
        import_(head_first, "accelerate", PROFILE, build_cluster(90, 90), ONE)


def test_replicas_on_unlike_devices_have_no_price():
    report = check("PARTS = [0, 4, 9]", "deepspeed", PROFILE, build_cluster(90, 80, 70, 60), ONE)
    assert report.reasons == ()
    assert any("devices that differ" in note for note in report.notes)
    report = check("PARTS = [0, 4, 9]", "deepspeed", PROFILE, build_cluster(90, 80, 70, 2), ONE)
    assert "device 'gpu3' allows" in report.reasons[0]


def test_blocks_that_megatron_loses_on_one_rank_are_named():
    flags = (
        "--pipeline-model-parallel-size 1 --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 3"
    )
    report = check(flags, "megatron", PROFILE, build_cluster(90), ONE)
    assert report.missing == NAMES[1 + 3 : 1 + BLOCKS]


@pytest.mark.parametrize("first", [1, 2])
def test_blocks_that_megatron_loses_are_named(first):
    """With as many ranks as flags it builds what they say, whatever the model has."""
    flags = (
        f"--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers {first} "
        "--decoder-last-pipeline-num-layers 2"
    )
    report = check(flags, "megatron", PROFILE, build_cluster(90, 90), ONE)
    assert report.missing == NAMES[1 + first + 2 : 1 + BLOCKS]
    assert "missing from every stage" in report.reasons[0]
    more = check(
        flags.replace("-last-pipeline-num-layers 2", "-last-pipeline-num-layers 9"),
        "megatron",
        PROFILE,
        "2xcpu",
        ONE,
    )
    assert f"{first + 9} blocks" in more.reasons[0]


def test_the_best_plan_s_order_of_devices_is_said():
    cluster, options = build_cluster(90, 80), PlanOptions(num_microbatches=2)
    report = check("-ts 3,4 -ngl all", "llama.cpp", FORWARD, cluster, options)
    best = [
        plan_from_balance(FORWARD, cluster, options, (4, 5), devices=devices)
        for devices in (((0,), (1,)), ((1,), (0,)))
    ]
    same, swapped = (str(replace(report, best=each)) for each in best)
    assert " layers; this cut" in same
    assert " layers on gpu1, gpu0; this cut" in swapped
