"""Forms that people write by hand; each was once misread, or ended in an error of Python."""

import json
import random

import pytest

import stagewright
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.graph import Parameter
from stagewright.core.plan.plan import PlanOptions
from stagewright.formats.check_cut import check_cut, import_plan, merge_options
from stagewright.formats.expressible import Inexpressible
from stagewright.formats.plan_for import plan_for
from stagewright.formats.runtimes.registry import TARGETS, export, import_cut
from stagewright.formats.target import ModelLayers
from tests.builders import chain_profile
from tests.formats.runtimes.test_own_parsers import ask, needs_runtimes
from tests.formats.runtimes.test_rejections import NAMES, change, every_stage, make_plan

TITAN_COUNT = """[parallelism]
num_pp_microbatches = "x"
module_fqns_per_model_part = [["layers.0"]]
"""
PIPEDREAM_GAP = """{"_layers": [["embed"], ["norm"]], "module_to_stage_map": [0, 2, 2],
"stage_to_rank_map": {"0": [0], "2": [1]}}"""
EIGHT = ModelLayers(("embed", *(f"layers.{index}" for index in range(8)), "norm", "head"))


def test_virtual_stages_of_megatron():
    layout = "Et|t|t|t|t|t|t|tL"
    for text in (
        "virtual_pipeline_model_parallel_size=2\npipeline_model_parallel_size=4\n"
        f'pipeline_model_parallel_layout="{layout}"',
        f'pipeline_model_parallel_size: 4\npipeline_model_parallel_layout: "{layout}"',
        f"# --pipeline-model-parallel-size 2\n--pipeline-model-parallel-size 4 "
        f"--pipeline-model-parallel-layout {layout}",
    ):
        cut = import_cut(text, "megatron", EIGHT)
        assert (cut.chunks, cut.schedule, len(cut.stages)) == (2, "interleaved_1f1b", 8)
    sizes = "--micro-batch-size 2 --global-batch-size 64 --pipeline-model-parallel-layout"
    cut = import_cut(f"{sizes} {layout}", "megatron", EIGHT)
    assert cut.num_microbatches == 32


@pytest.mark.parametrize("layout", ["Et*4|t*4L|", "|Et*4|t*4L", "t*4E|t*4L"])
def test_layouts_whose_ends_are_no_ends(layout):
    with pytest.raises(InvalidInput, match="begins with its only E"):
        import_cut(layout, "megatron", EIGHT)


def test_cuts_keep_the_schedule_of_their_runtime():
    equal = "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=4"
    assert import_cut(equal, "maxtext", EIGHT).schedule == "gpipe"
    repeated = "ici_pipeline_parallelism: 2\nnum_layers_per_pipeline_stage: 2\n"
    cut = import_cut(repeated + "num_pipeline_repeats: -1", "maxtext", EIGHT)
    assert (cut.schedule, cut.chunks, cut.missing) == ("looped_bfs", 2, ())
    plugin = 'pp_style="zbv", num_model_chunks=2, num_layers_per_stage=[2, 2, 2, 2]'
    assert import_cut(plugin, "colossalai", EIGHT).schedule == "zbv"
    parts = '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "lm_head"]]'
    titan = (
        f'[parallelism]\npipeline_parallel_schedule = "gpipe"\nmodule_fqns_per_model_part = {parts}'
    )
    assert (
        import_cut(
            titan, "torchtitan", ModelLayers(("e", "layers.0", "layers.1", "norm", "h"))
        ).schedule
        == "gpipe"
    )
    assert import_cut("balance = [5, 6]", "torchgpipe", EIGHT).recompute == "except_last"


def test_split_points_in_comments_are_none():
    text = (
        'split_spec = {"layers.2": SplitPoint.BEGINNING,\n # "layers.5": SplitPoint.BEGINNING,\n}'
    )
    assert len(import_cut(text, "torch", EIGHT).stages) == 2
    text += "\nfrom x import _PipelineScheduleRuntime, ScheduleGPipe"
    assert import_cut(text, "torch", EIGHT).schedule == "gpipe"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("megatron", "--pipeline-model-parallel-size 0 --pipeline-model-parallel-layout Et*8L"),
        ("maxtext", "ici_pipeline_parallelism: 0\nnum_layers_per_pipeline_stage: 2"),
        ("maxtext", "ici_pipeline_parallelism: 999999\nnum_layers_per_pipeline_stage: 999999"),
        ("megatron", "--pipeline-model-parallel-size 3"),
        ("llama.cpp", "-ts 1.2.3,1"),
        ("llama.cpp", "-ts .,1"),
        ("llama.cpp", "-ngl 4 -ts 1,1"),
        ("llama.cpp", "-ts 1e3,1"),
        ("torchtitan", "parallelism = 3"),
        ("torchtitan", TITAN_COUNT),
        ("pipedream", PIPEDREAM_GAP),
        ("pipedream", "[" * 100_000),
        ("accelerate", '{"typo": 0, "other": 1}'),
        ("vllm", "4,,4"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_an_error_with_words(name, text):
    with pytest.raises(InvalidInput):
        import_cut(text, name, EIGHT)


def test_a_module_called_again_is_no_place_to_cut():
    names = ("a", "act", "b", "act@1", "c")
    with pytest.raises(Inexpressible, match="called again behind the cut"):
        export(make_plan("torch", (0, 1, 5), names), "torch")
    names = ("drop", "layers.0", "layers.1", "drop@1", "out")
    for name in ("torchtitan", "accelerate"):
        with pytest.raises(Inexpressible, match="call 'drop'"):
            export(make_plan(name, (0, 2, 5), names), name)


def test_names_of_a_numbered_sequential():
    plan = make_plan("torchtitan", (0, 3, 6), tuple(map(str, range(6))))
    assert '["0", "1", "2"]' in export(plan, "torchtitan").text


def test_replicas_take_their_share_and_sharded_ones_are_refused():
    two = every_stage({"replicas": 2, "devices": ("a", "b")})
    plan = change(make_plan("deepspeed"), two, num_microbatches=8)
    assert "GRADIENT_ACCUMULATION_STEPS = 4" in export(plan, "deepspeed").text
    sharded = change(make_plan("megatron"), every_stage({"strategy": "fully_shard"}))
    with pytest.raises(Inexpressible, match="sharded replicas"):
        export(sharded, "megatron")
    for name in ("torchtitan", "colossalai", "maxtext"):
        with pytest.raises(Inexpressible, match="one device a stage"):
            export(change(make_plan(name, names=NAMES), two, num_microbatches=8), name)


def test_megatron_takes_lists_of_names():
    rows = [["embedding", "decoder", "decoder", "decoder"], ["decoder"] * 5 + ["loss"]]
    for text in (json.dumps(rows), f"pipeline_model_parallel_layout = {rows!r}  # by hand"):
        cut = import_cut(text, "megatron", EIGHT)
        assert cut.balance == (4, 7)
    with pytest.raises(InvalidInput, match="name embedding, decoder, mtp, loss alone"):
        import_cut('[["embedding", "encoder"], ["loss"]]', "megatron", EIGHT)


def test_layers_that_predict_further_tokens_are_left_out_with_a_note():
    cut = import_cut("Et*4|t*4mL", "megatron", EIGHT)
    assert (cut.balance, cut.missing) == ((5, 6), ())
    assert "multi-token-prediction layers (m) are in no profile" in cut.notes[0]


def is_read(text, layers):
    try:
        import_cut(text, "megatron", layers)
    except InvalidInput:
        return False
    return True


@needs_runtimes
def test_places_of_m_are_those_of_megatron():
    """By megatron-core's own validation, of layouts at random."""
    draw, cases = random.Random(5), []
    while len(cases) < 300:
        ranks, stages = draw.choice([1, 2, 3]), draw.choice([2, 3, 4, 6])
        if stages % ranks:
            continue
        parts = ["t" * draw.randint(0, 2) for _ in range(stages)]
        parts[draw.randrange(stages)] += "m" * draw.randint(0, 2)
        if draw.random() < 0.3:
            parts[draw.randrange(stages)] += "m"
        layout = "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "L"])
        cases.append({"layout": layout, "ranks": ranks})
    answers = ask("megatron accepts", cases)
    for case, accepted in zip(cases, answers, strict=True):
        blocks = max(1, case["layout"].count("t"))
        layers = ModelLayers(("e", *(f"layers.{index}" for index in range(blocks)), "h"))
        text = f"--pipeline-model-parallel-size {case['ranks']} "
        text += f"--pipeline-model-parallel-layout {case['layout']}"
        assert is_read(text, layers) == accepted, case
    assert 30 < sum(answers) < 270


YAML = """backend: pytorch
pp_partition:
  - 5
  - 3
pipeline_parallel_size: 2
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tensorrt-llm", '{"pipeline_parallel_size": 2, "pp_partition": [5, 3]}'),
        ("tensorrt-llm", YAML),
        ("tensorrt-llm", "LLM(model=MODEL, pp_partition=[5, 3], pipeline_parallel_size=2)"),
        ("vllm", 'VLLM_PP_LAYER_PARTITION="5,3" vllm serve MODEL --pipeline-parallel-size 2'),
        ("sglang", "# 4,4 before\nexport SGLANG_PP_LAYER_PARTITION=5,3\n"),
        ("colossalai", "HybridParallelPlugin(pp_size=2, num_layers_per_stage=[5, 3])"),
        ("megatron", "--num-layers 8 --pipeline-model-parallel-size 2 "
         "--decoder-first-pipeline-num-layers 5"),
        ("megatron", "PP=2\nLAST=3\n--pipeline-model-parallel-size ${PP} "
         "--decoder-last-pipeline-num-layers ${LAST:-4}"),
        ("megatron", '{"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 3}'),
        ("megatron", "cfg.model.pipeline_model_parallel_size=2\n"
         "cfg.model.num_layers_in_first_pipeline_stage=5"),
    ],
)  # fmt: skip
def test_settings_of_a_whole_file(name, text):
    cut = import_cut(text, name, EIGHT)
    assert cut.balance == (6, 5)
    assert not cut.missing


def test_what_deepspeed_splits_itself_is_said():
    for text in (
        '{"pipeline": {"stages": 4, "partition": "parameters"}}',
        "net = PipelineModule(layers=net.join_layers(), num_stages=4)",
    ):
        with pytest.raises(InvalidInput, match=r"read from PARTS = .*print\(engine.module.parts"):
            import_cut(text, "deepspeed", EIGHT)


def test_deepspeed_counts_the_profile_s_trained_parameters():
    profile = chain_profile([1e-3] * 6, parameter_bytes=400)
    parameters = tuple(
        Parameter(names=(f"w{index}",), size_bytes=4 * numel, numel=numel, layers=layers, **kind)
        for index, (numel, layers, kind) in enumerate(
            [
                (100, (0, 5), {}),
                (30, (1,), {}),
                (10, (2,), {}),
                (20, (3,), {}),
                (900, (4,), {"trainable": False}),
                (900, (4,), {"kind": "buffer"}),
            ]
        )
    )
    given = profile.model_copy(update={"parameters": parameters})
    text = 'PipelineModule(layers, num_stages=2, partition_method="{}")'
    assert import_cut(text.format("parameters"), "deepspeed", given).balance == (2, 4)
    assert import_cut(text.format("uniform"), "deepspeed", given).balance == (3, 3)
    for method, reason in (("type:[", "is no pattern"), ("profile", "no partition_method")):
        with pytest.raises(InvalidInput, match=reason):
            import_cut(text.format(method), "deepspeed", given)


def test_exports_of_inference_say_what_is_not_priced():
    for name in TARGETS:
        said = "without decoding or its cache" in export(make_plan(name), name).text
        assert said == TARGETS[name].rules.inference, name


@pytest.mark.parametrize(
    ("name", "text", "listed"),
    [
        ("vllm", "4,5", "9 blocks, but the model has 8"),
        ("megatron", "Et*4|t*5L", "9 blocks, but the model has 8"),
        ("colossalai", "num_layers_per_stage=[4, 5]", "9 blocks, but the model has 8"),
        ("maxtext", "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=5", "10 blocks"),
        ("deepspeed", "PARTS = [0, 5, 12]", "12 layers, but the model has 11"),
        ("torchgpipe", "balance = [5, 7]", "12 layers, but the model has 11"),
        ("torchtitan", '[["embed", "layers.0"], ["layers.8", "norm", "head"]]', "'layers.8' is"),
    ],
)
def test_more_layers_than_the_model_has_are_a_fault_of_the_cut(name, text, listed):
    """They ended as wrong input, where too few were a cut that cannot run."""
    cut = import_cut(text, name, EIGHT)
    assert listed in cut.describe_faults(EIGHT.names)[0]
    assert not cut.is_ordered


def test_own_documents_are_no_cuts(tmp_path):
    plan = make_plan("vllm")
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(indent=2))
    for given in (plan.to_json(), file, str(file)):
        with pytest.raises(InvalidInput, match="this is a plan of Stagewright, no cut in the form"):
            import_cut(given, "vllm", EIGHT)


def test_cuts_are_read_from_files(tmp_path):
    file = tmp_path / "partition.sh"
    file.write_text("export VLLM_PP_LAYER_PARTITION=5,3\n")
    for given in (file, str(file)):
        assert import_cut(given, "vllm", EIGHT).balance == (6, 5)
    for missing in (tmp_path / "other", "missing.sh"):
        with pytest.raises(InvalidInput, match=r"cannot read .*: No such file or directory"):
            import_cut(missing, "vllm", EIGHT)
    # Names of files have at most 255 characters, texts may have more.
    long = "Et*8" + "," * 300 + "L"
    assert import_cut(long, "megatron", EIGHT).balance == (11,)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda costs: stagewright.export("plan.json", "vllm"), "Plan.read('plan.json')"),
        (lambda costs: stagewright.export(None, "vllm"), "the plan is a NoneType"),
        (lambda costs: stagewright.export(make_plan("vllm"), None), "target is of type NoneType"),
        (lambda costs: stagewright.check("4,4", "vllm", "profile.json", "2xcpu"), "Profile.read"),
        (lambda costs: stagewright.check([4, 4], "vllm", costs, "2xcpu"), "cut is of type list"),
        (lambda costs: stagewright.check("x.sh", "vllm", costs, "2xcpu"), "cannot read x.sh"),
        (lambda costs: stagewright.import_("4,4", 3, costs, "2xcpu"), "target is of type int"),
        (lambda costs: check_cut("4,4", costs, "2xcpu"), "read it first: import_cut("),
        (lambda costs: import_plan("4,4", costs, "2xcpu"), "read it first: import_cut("),
        (lambda costs: plan_for("vllm", "profile.json", "2xcpu"), "Profile.read('profile.json')"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(call, expected):
    with pytest.raises(stagewright.StagewrightError) as error:
        call(chain_profile([1e-3] * 8))
    assert expected in str(error.value)


def test_cuts_are_judged_and_imported_in_one_call():
    costs = chain_profile([1e-3] * 8)
    report = stagewright.check("4,4", "vllm", costs, "2xcpu")
    assert (report.missing, report.slowdown) == ((), pytest.approx(0, abs=1e-9))
    assert stagewright.import_("4,4", "vllm", costs, "2xcpu").balance == (4, 4)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("vllm", "VLLM_PP_LAYER_PARTITION=17,20,3"),
        ("sglang", "SGLANG_PP_LAYER_PARTITION=17,20,3"),
        ("tensorrt-llm", "pp_partition: [17, 20, 3]"),
        ("colossalai", "num_layers_per_stage=[17, 20, 3]"),
        ("deepspeed", "PARTS = [0, 3, 8]"),
        ("torchgpipe", "balance = [3, 5]"),
        ("llama.cpp", "--tensor-split 17,20,4 or 0.5,0.5"),
    ],
)
def test_errors_show_the_target_s_own_form(name, form):
    with pytest.raises(InvalidInput) as error:
        import_cut("nothing of the kind", name, EIGHT)
    assert f"such as {form}" in str(error.value)


def test_shares_of_llama_cpp_without_a_flag_may_be_fractions():
    assert import_cut("0.5,0.5", "llama.cpp", EIGHT).balance == (6, 5)
    assert import_cut("3/1", "llama.cpp", EIGHT).balance == (8, 3)


def test_stages_are_dealt_to_the_devices_where_the_form_does_not_say_how():
    options = PlanOptions()
    cut = import_cut("Et|t|t|t|t|t|t|tL", "megatron", EIGHT)
    assert merge_options(cut, options, 8).schedule == "1f1b"
    dealt = merge_options(cut, options, 4)
    assert (dealt.schedule, dealt.chunks) == ("interleaved_1f1b", 2)
    with pytest.raises(InvalidInput, match=r"8 stages .* 3 devices; give --pipeline-model-par"):
        merge_options(cut, options, 3)
    flags = "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout"
    said = import_cut(f"{flags} Et|t|t|t|t|t|t|tL", "megatron", EIGHT)
    assert merge_options(said, options, 4).schedule == "1f1b"
    parts = [[f"layers.{index}"] for index in range(8)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    assert merge_options(import_cut(repr(parts), "torchtitan", EIGHT), options, 4).chunks == 2
    points = repr([f"layers.{index}" for index in range(1, 8)])
    assert merge_options(import_cut(points, "torch", EIGHT), options, 2).chunks == 4


def test_a_module_that_runs_between_blocks_is_in_one_part_of_torchtitan():
    names = ("embed", "layers.0", "act", "layers.1", "act@1", "head")
    plan = make_plan("torchtitan", (0, 6), names)
    text = export(plan, "torchtitan").text
    assert import_cut(text, "torchtitan", ModelLayers(names)).balance == (6,)
