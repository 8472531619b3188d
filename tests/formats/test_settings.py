"""Settings of runtimes: what moves weights or changes times is read, or named in a note.

vLLM's, SGLang's and TensorRT-LLM's tensor parallelism, and llama.cpp's flags that move weights,
were dropped without a word, where Megatron's were listed as not read.
"""

import re

import pytest

import stagewright
from stagewright.core.errors import DeadlineExceeded, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import SplitLayer, TensorSplit
from stagewright.formats.check_cut import check_cut
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.formats.settings import KINDS, Settings
from stagewright.formats.target import ModelLayers
from stagewright.formats.target_tables import TARGET_NAMES, read_table
from tests.builders import chain_profile
from tests.formats.runtimes.test_rejections import make_plan

EIGHT = ModelLayers(("embed", *(f"layers.{index}" for index in range(8)), "norm", "head"))


TABLE = read_table("settings")
ROWS = [
    (name, kind, row)
    for name, table in TABLE.items()
    for kind in KINDS
    if kind != "harmless"
    for row in table.get(kind, [])
]


def split_profile(degree, num_layers=8):
    """A chain whose layers are split evenly over so many devices."""
    costs = chain_profile([1e-3] * num_layers, forward_bytes=1000, parameter_bytes=400)
    part = SplitLayer(
        compute_share=1 / degree, parameter_bytes=400 // degree, saved_activation_bytes=0
    )
    splits = (TensorSplit(degree=degree, layers=(part,) * num_layers),)
    return costs.model_copy(update={"splits": splits})


def test_names_in_help_texts_are_those_of_the_targets():
    assert tuple(TARGETS) == TARGET_NAMES


@pytest.mark.parametrize("runtime", TARGETS)
def test_every_runtime_has_a_table(runtime):
    assert runtime in TABLE
    assert not set(TABLE[runtime]) - {*KINDS, "keys", "prefix", "variables", "together"}


@pytest.mark.parametrize("table", TABLE.values(), ids=TABLE)
def test_a_name_is_in_one_row_of_its_runtime(table):
    rows = [row for kind in KINDS if kind != "harmless" for row in table.get(kind, [])]
    names = [name for row in rows for name in row.partition("|")[0].split()]
    names += table.get("harmless", "").split()
    assert [name for name in names if names.count(name) > 1] == []


@pytest.mark.parametrize(("runtime", "kind", "row"), ROWS)
def test_every_row_is_read_or_named_under_each_of_its_names(runtime, kind, row):
    names, _, values = row.partition("|")
    values = values.split()
    for name in names.split():
        name = name.replace("*", "x")
        value = values[0] if kind == "words" and values else "7"
        value = next((one for one in ("1", "CUDA1") if re.fullmatch(value, one)), value)
        flag = f"-{name}" if len(name) < 4 else f"--{name}"
        target = "vllm" if runtime == "every" else runtime
        found = Settings.read(f"{flag} {value}", target)
        first, *_ = names.split()
        is_read = (
            first in found.counts
            or first in found.words
            or (kind == "pipeline" and found.pipeline == 7)
            or (kind == "tensor" and found.tensor == 7)
        )
        assert is_read == (kind != "unread") or first in TABLE[runtime].get("together", ()), name
        if kind == "unread":
            assert f"not read, though the answer depends on it: {flag} {value}" in found.notes
            for neutral in (*values, "off", "None"):
                assert not Settings.read(f"{flag} {neutral}", target).notes


@pytest.mark.parametrize("value", ["false", "off", "no", "null", "None", "0"])
def test_a_switch_that_is_off_is_not_on(value):
    """Cause: only false and 0 were off, so a script's null counted a block for the loss."""
    found = Settings.read(f"account_for_loss_in_pipeline_split: {value}", "megatron")
    assert found.counts == {"account-for-loss-in-pipeline-split": 0}


def test_a_comment_may_have_an_apostrophe():
    """Cause: a comment with a quote was kept as part of a string, and its flags were read."""
    found = Settings.read("-ts 1,1 # don't use -sm row", "llama.cpp")
    assert found.words == {"tensor-split": "1,1"}
    assert Settings.read('-ts "1,1 # kept"', "llama.cpp").words == {"tensor-split": "1,1 # kept"}


FORMS = (
    "VLLM_PP_LAYER_PARTITION=5,3 vllm serve M -pp 2 -tp 4 --quantization awq",
    "VLLM_PP_LAYER_PARTITION='5,3' vllm serve M --pipeline-parallel-size=2 "
    "--tensor-parallel-size=4 -q awq",
    'VLLM_PP_LAYER_PARTITION=5,3\n{"pipeline_parallel_size": 2, "tensor_parallel_size": 4, '
    '"quantization": "awq"}',
    "env:\n- name: VLLM_PP_LAYER_PARTITION\n  value: '5,3'\nargs:\n- --pipeline-parallel-size\n"
    '- "2"\n- --tensor-parallel-size=4\n- --quantization\n- awq',
    "docker run --gpus all -e VLLM_PP_LAYER_PARTITION=5,3 -p 8000:8000 vllm/vllm-openai:latest "
    "--model M -pp 2 -tp 4 --quantization awq",
    "export VLLM_PP_LAYER_PARTITION=5,3\nTP=${TP:-4}\nvllm serve M -pp 2 \\\n  -tp $TP \\\n"
    "  --quantization awq  # -tp 8 before",
    'os.environ["X"]\nVLLM_PP_LAYER_PARTITION="5,3"\nllm = LLM(model="M", '
    'pipeline_parallel_size=2, tensor_parallel_size=4, quantization="awq")',
    'os.environ["VLLM_PP_LAYER_PARTITION"] = "5,3"\nllm = LLM(model="M", '
    'pipeline_parallel_size=2, tensor_parallel_size=4, quantization="awq")',
    "from os import environ\nenviron.setdefault('VLLM_PP_LAYER_PARTITION', '5,3')\n"
    "LLM(model='M', pipeline_parallel_size=2, tensor_parallel_size=4, quantization='awq')",
    "os.putenv('VLLM_PP_LAYER_PARTITION', '5,3')\n"
    "LLM(model='M', pipeline_parallel_size=2, tensor_parallel_size=4, quantization='awq')",
    'command: ["vllm", "serve", "M", "-pp", "2", "-tp", "4", "--quantization", "awq"]\n'
    "environment:\n  - VLLM_PP_LAYER_PARTITION=5,3",
    "VLLM_PP_LAYER_PARTITION: 5,3\nparallel-config.pipeline_parallel_size: 2\n"
    "parallel-config.tensor_parallel_size: 4\nquantization: awq",
)


@pytest.mark.parametrize("text", FORMS)
def test_settings_are_those_of_a_command_in_every_form(text):
    cut = import_cut(text, "vllm", EIGHT)
    assert (cut.balance, cut.tensor) == ((6, 5), 4)
    assert "awq" in cut.notes[-1]
    assert [note for note in cut.notes if "not known" in note] == []


@pytest.mark.parametrize(
    ("runtime", "text", "named"),
    [
        ("llama.cpp", "-ngl 99 -ts 16,15 --n-cpu-moe 27", "--n-cpu-moe 27"),
        ("llama.cpp", "-ts 1,1 -ot blk.1.ffn_up.weight=CPU", "-ot blk.1.ffn_up.weight=CPU"),
        ("llama.cpp", "-ts 1,1 -ot 'blk.(1|2).ffn=CPU'", "-ot blk.(1|2).ffn=CPU"),
        ("llama.cpp", "-ts 1,1 --cpu-moe -fit on -ctk q8_0", "--cpu-moe, -fit on, -ctk q8_0"),
        ("llama.cpp", "LLAMA_ARG_N_CPU_MOE=3 llama-server -ts 1,1", "LLAMA_ARG_N_CPU_MOE=3"),
        ("llama.cpp", "CUDA_VISIBLE_DEVICES=GPU-5a x -ts 1,1", "CUDA_VISIBLE_DEVICES=GPU-5a"),
        ("llama.cpp", "-ts 1,1 -dev RPC0,CUDA0", "-dev RPC0,CUDA0"),
        ("llama.cpp", "-ts 1,1 --device CUDA0,Vulkan0", "--device CUDA0,Vulkan0"),
        ("sglang", "SGLANG_PP_LAYER_PARTITION=4,4 --dp 2 --ep-size 4", "--dp 2, --ep-size 4"),
        ("tensorrt-llm", "pp_partition: [4, 4]\nmoe_expert_parallel_size: 8\nkv_cache_config:\n"
         "  free_gpu_memory_fraction: 0.8", "moe_expert_parallel_size=8, kv_cache_config, free_"),
        ("colossalai", "Plugin(num_layers_per_stage=[4, 4], zero_stage=1)", "zero_stage=1"),
        ("maxtext", "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=4 "
         "ici_fsdp_parallelism=4", "ici_fsdp_parallelism=4"),
        ("megatron", "--pipeline-model-parallel-layout Et*4|t*4L "
         "--context-parallel-size 2 --use-distributed-optimizer",
         "--context-parallel-size 2, --use-distributed-optimizer"),
        ("torchtitan", '[parallelism]\ndata_parallel_shard_degree = 4\nmodule_fqns_per_model_part'
         ' = [["layers.0", "layers.1"]]', "data_parallel_shard_degree=4"),
        ("deepspeed", 'PARTS = [0, 5, 11]\nconfig = {"zero_optimization": {"stage": 1}}', "zero_"),
        ("accelerate", 'device_map = {"": 0}\nload_in_8bit=True', "load_in_8bit=True"),
    ],
)  # fmt: skip
def test_what_moves_weights_and_is_not_read_is_named(runtime, text, named):
    notes = import_cut(text, runtime, EIGHT).notes
    assert any(f"not read, though the answer depends on it: {named}" in note for note in notes)


def test_what_is_not_known_is_named_and_a_program_s_own_names_are_not():
    def list_unknown(text, runtime="vllm"):
        notes = Settings.read(text, runtime).notes
        return [note.partition("here: ")[2] for note in notes if "not known" in note]

    assert list_unknown("4,4 --frobnicate 3 -zz") == ["--frobnicate 3, -zz"]
    assert list_unknown("frobnicate: 3\nVLLM_ODD=1\nMY_OWN=2") == ["frobnicate=3, VLLM_ODD=1"]
    assert list_unknown("import vllm\nfrobnicate = 3") == []
    assert list_unknown('{"model.layers.0": 0, "lm_head": 1}', "accelerate") == []
    many = " ".join(f"--frobnicate-{index} 1" for index in range(40))
    assert "and 28 more" in list_unknown(many)[0]


@pytest.mark.parametrize("runtime", TARGETS)
def test_an_export_sets_nothing_that_is_not_known(runtime):
    notes = Settings.read(export(make_plan(runtime), runtime).text, runtime).notes
    assert [note for note in notes if "not known" in note] == []


@pytest.mark.parametrize(
    ("runtime", "text", "says"),
    [
        ("vllm", "VLLM_PP_LAYER_PARTITION=4,4 vllm serve M -pp 4", "2 numbers, but .* of 4 stages"),
        ("vllm", "VLLM_PP_LAYER_PARTITION=2,2,2,2 vllm serve M -pp 2", "4 numbers, but .* of 2 st"),
        ("sglang", "SGLANG_PP_LAYER_PARTITION=4,4 sglang --pp-size 4", "give 4 numbers"),
        ("tensorrt-llm", "pipeline_parallel_size: 4\npp_partition: [4, 4]", "or a pipeline of 2"),
        ("colossalai", "pp_size=2, num_model_chunks=2, num_layers_per_stage=[4, 4]", "4 stages"),
        ("megatron", "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*4|t*4L",
         "2 stages are no multiple of 4 ranks"),
        ("llama.cpp", "-ts 1,1 -sm row", "-sm row splits every layer"),
        ("llama.cpp", "LLAMA_ARG_SPLIT_MODE=tensor llama-server -ts 1,1", "-sm tensor sp"),
        ("llama.cpp", "-ts 1,1 --device none", "--device none has 0 devices"),
        ("vllm", "vllm serve M -pp 0", "-pp 0 is no number of devices"),
        ("sglang", "sglang serve --tp -1 --pp-size 2", "--tp -1 is no number of devices"),
        ("vllm", "4,4 --tensor-parallel-size all", "--tensor-parallel-size all is no whole number"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_or_are_no_numbers_are_refused(runtime, text, says):
    with pytest.raises(InvalidInput, match=says):
        import_cut(text, runtime, EIGHT)


@pytest.mark.parametrize(
    ("runtime", "text"),
    [
        ("vllm", "5,3 --tensor-parallel-size 2"),
        ("vllm", "VLLM_PP_LAYER_PARTITION: 5, 3\ntensor_parallel_size: 2"),
        ("tensorrt-llm", "trtllm-serve M --pp-partition 5,3 --tp_size 2"),
        ("tensorrt-llm", "pp_partition:\n- 5\n- 3\ntp_size: 2"),
        ("sglang", "[5, 3] --tp 2"),
        ("colossalai", "Plugin(num_layers_per_stage=[5, 3], tp_size=2)"),
    ],
)
def test_a_partition_is_never_replaced_by_the_runtime_s_own(runtime, text):
    cut = import_cut(text, runtime, EIGHT)
    assert (cut.balance, cut.tensor) == ((6, 5), 2)


@pytest.mark.parametrize("empty", ["CUDA_VISIBLE_DEVICES=", "export CUDA_VISIBLE_DEVICES="])
def test_an_empty_variable_does_not_take_the_next_word_as_its_value(empty):
    text = f"{empty} LLAMA_ARG_TENSOR_SPLIT=3,8 llama-server"
    cut = import_cut(text, "llama.cpp", EIGHT)
    assert cut.balance == (4, 7)
    assert not any("VISIBLE" in note for note in cut.notes)


def test_the_last_of_two_values_counts_and_a_flag_replaces_a_variable():
    both = "LLAMA_ARG_TENSOR_SPLIT=1,1 llama-server -ts 3,1 -ts 1,3 -sm layer"
    assert import_cut(both, "llama.cpp", EIGHT).balance == (4, 7)
    for flags in ("-ts 1,1 -sm none", "-sm none -mg 1"):
        assert import_cut(flags, "llama.cpp", EIGHT).balance == (11,)


def test_no_note_of_an_inference_runtime_is_said_twice():
    report = check_cut(import_cut("4,4", "vllm", EIGHT), chain_profile([1e-3] * 11), "2x24GB")
    assert len(report.notes) == len({*report.notes})


@pytest.mark.parametrize(
    ("runtime", "text", "balance"),
    [
        ("vllm", "vllm serve M --pipeline-parallel-size 3", (4, 3, 4)),
        ("vllm", "vllm serve M -tp 4", (11,)),
        ("sglang", "sglang serve --pp-size 3", (3, 3, 5)),
        ("tensorrt-llm", "trtllm-serve M --pp_size 3 --tp_size 2", (4, 3, 4)),
        ("colossalai", "HybridParallelPlugin(pp_size=2, tp_size=2)", (5, 6)),
    ],
)
def test_a_command_without_a_partition_has_that_of_its_runtime(runtime, text, balance):
    assert import_cut(text, runtime, EIGHT).balance == balance


@pytest.mark.parametrize(
    ("runtime", "text"),
    [
        ("vllm", "VLLM_PP_LAYER_PARTITION=4,4 vllm serve M -pp 2 --tensor-parallel-size 4"),
        ("sglang", "SGLANG_PP_LAYER_PARTITION=4,4 sglang serve --tp-size=4 --pp-size=2"),
        ("tensorrt-llm", '{"pp_partition": [4, 4], "tensor_parallel_size": 4}'),
        ("tensorrt-llm", "Mapping(world_size=8, tp_size=4, pp_size=2)"),
        ("megatron", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 4"),
        ("colossalai", "HybridParallelPlugin(tp_size=4, pp_size=2, num_layers_per_stage=[4, 4])"),
        ("maxtext", "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=4 "
         "ici_tensor_parallelism=2 dcn_tensor_parallelism=2"),
        ("torchtitan", '[parallelism]\npipeline_parallel_degree = 2\ntensor_parallel_degree = 4\n'
         'module_fqns_per_model_part = [["layer.0", "layer.1", "layer.2", "layer.3"], '
         '["layer.4", "layer.5", "layer.6", "layer.7"]]'),
    ],
)  # fmt: skip
def test_groups_that_split_layers_are_priced(runtime, text):
    """They were priced as two stages on two of the eight devices, over 100 % slower."""
    costs = split_profile(4)
    plan = stagewright.import_(text, runtime, costs, "8xcpu")
    assert [len(stage.devices) for stage in plan.stages] == [4, 4]
    assert {stage.tensor for stage in plan.stages} == {4}
    report = stagewright.check(text, runtime, costs, "8xcpu")
    assert report.slowdown < 0.01
    assert {stage.tensor for stage in report.best.stages} == {4}
    alone = stagewright.check(text, runtime, chain_profile([1e-3] * 8), "8xcpu")
    assert "layers split over 4 devices are not read, since" in alone.to_dict()["notes"][-1]
    assert {stage.tensor for stage in alone.plan.stages} == {1}


@pytest.mark.parametrize(("devices", "groups"), [("8xcpu", 2), ("7xcpu", 1)])
def test_groups_need_as_many_devices_as_they_have(devices, groups):
    """Of seven devices, those in no group of four were not counted: "the cluster has 4"."""
    cut = import_cut("-pp 4 -tp 4", "vllm", split_profile(4))
    report = check_cut(cut, split_profile(4), devices, PlanOptions(num_microbatches=4))
    said = f"4 stages need 4 groups of 4 devices, but the cluster has {groups};"
    assert said in report.reasons[0]


def test_the_verdict_does_not_need_the_best_plan():
    """Cause: where the comparing search ran out of time, nothing was said of the cut."""

    def search(*_):
        raise DeadlineExceeded("no plan was found within 1 s")

    profile = chain_profile([1e-3] * 8)
    cut = import_cut("4,4", "vllm", profile)
    report = check_cut(cut, profile, "2xcpu", search=search)
    assert report.plan.balance == (4, 4)
    assert report.slowdown is None
    assert str(report).splitlines()[-1] == "best: no plan was found within 1 s"
