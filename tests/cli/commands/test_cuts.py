"""``export --to``, ``import``, ``check`` and ``plan --for``."""

import json
import re

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.forward_only import for_inference
from stagewright.core.profile.profile import Profile
from stagewright.formats.check_cut import check_cut, import_plan
from stagewright.formats.runtimes.registry import import_cut
from tests.builders import chain_profile


@pytest.fixture
def call(run):
    """Run a command; return its exit code, standard output and standard error."""

    def call(*words):
        ran = run(*words)
        return ran.code, ran.stdout, ran.stderr

    return call


@pytest.fixture
def profile(tmp_path):
    """Eight blocks of layer.0 to layer.7, the last one slow."""
    file = tmp_path / "profile.json"
    times = [1e-3] * 7 + [3e-3]
    costs = chain_profile(times, forward_bytes=1000, parameter_bytes=400, saved_bytes=100)
    file.write_text(costs.to_json())
    return file


def test_a_plan_under_a_target_s_rules_is_exported_and_read_back(call, profile, tmp_path):
    plan, layout = tmp_path / "plan.json", tmp_path / "layout.sh"
    words = ("plan", profile, "-d", "3xcpu", "--microbatches", "6", "-o", plan)
    code, out, err = call(*words, "--for", "megatron")
    assert code == 0
    assert f"next: stagewright export {plan} --to megatron" in err
    assert "under the rules of Megatron-Core, as fast as the free plan" in out
    assert call("export", plan, "--to", "megatron", "-o", layout)[0] == 0
    assert "--pipeline-model-parallel-layout 'Et*" in layout.read_text()
    again = tmp_path / "again.json"
    words = (layout, "--from", "megatron", "--model", profile, "-d", "3xcpu", "-o", again)
    assert call("import", *words, "--microbatches", "6")[0] == 0
    made, read = (Plan.from_json(path.read_text()) for path in (plan, again))
    assert (read.balance, read.step_time_s) == (made.balance, made.step_time_s)


def test_files_that_a_form_reads_are_written_beside_it(call, profile, tmp_path):
    plan, script = tmp_path / "plan.json", tmp_path / "out" / "torch_pipeline.py"
    script.parent.mkdir()
    call("plan", profile, "-d", "2xcpu", "--schedule", "1f1b", "--microbatches", "4", "-o", plan)
    assert call("export", plan, "--to", "torch", "-o", script)[0] == 0
    assert {path.name for path in script.parent.iterdir()} == {
        "torch_pipeline.py",
        "torch_pipeline.schedule.csv",
        "torch_pipeline.schedule_comms.csv",
    }
    code, out, _ = call("export", plan, "--to", "torch", "-o", script, "--json")
    assert code == 0
    assert json.loads(out)["torch_pipeline.py"] == script.read_text()


@pytest.mark.parametrize(("name", "ending"), [("torch", "py"), ("torchtitan", "toml")])
def test_two_exports_in_one_folder_keep_their_own_schedules(call, profile, tmp_path, name, ending):
    plan = tmp_path / "plan.json"
    words = ("plan", profile, "-d", "2xcpu", "--schedule", "1f1b", "-o", plan, "--microbatches")
    for number in (4, 9):
        assert call(*words, number)[0] == 0
        assert call("export", plan, "--to", name, "-o", tmp_path / f"m{number}.{ending}")[0] == 0
    for number in (4, 9):
        script = (tmp_path / f"m{number}.{ending}").read_text()
        [read] = re.findall(r'"([^"]*schedule\.csv)"', script)
        assert (tmp_path / read).read_text().count("F") == 2 * number


def test_a_folder_that_is_not_there_is_made(call, profile, tmp_path):
    plan = tmp_path / "plan.json"
    call("plan", profile, "-d", "2xcpu", "-o", plan, "--for", "megatron")
    assert call("export", plan, "--to", "megatron", "-o", f"{tmp_path}/a/b/")[0] == 0
    assert "Et*" in (tmp_path / "a" / "b" / "megatron-layout.sh").read_text()


def test_an_input_is_not_written_over(call, profile, tmp_path):
    plan, cluster = tmp_path / "plan.json", tmp_path / "cluster.json"
    cluster.write_text(Cluster.parse("2xcpu").to_json())
    call("plan", profile, "-d", "2xcpu", "--schedule", "1f1b", "-o", plan)
    (tmp_path / "folder").mkdir()
    other = tmp_path / "folder" / ".." / "profile.json"
    words = ("--from", "megatron", "--model", profile, "-d", "2xcpu", "-o", profile)
    before = {path: path.read_text() for path in (plan, profile, cluster)}
    for command in (
        ("plan", profile, "-d", "2xcpu", "-o", other),
        ("plan", profile, "-d", cluster, "-o", cluster),
        ("export", plan, "--to", "torch", "-o", plan),
        ("export", profile, "-o", profile),
        ("import", "Et*4|t*4L", *words),
        ("merge", profile, profile, "-o", profile),
        ("show", plan, "--html", plan),
        ("show", plan, "--html", profile, "--profile", profile),
    ):
        code, _, err = call(*command)
        assert code == 2, command
        assert "it is an input; give another file" in err
    assert {path: path.read_text() for path in before} == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--to", "vllm"), "vLLM only runs inference (stagewright plan --for vllm reduces"),
        ((), "name a runtime for the plan with --to: torch, torchtitan, megatron"),
        (("--to", "megatrn"), "did you mean 'megatron'?"),
    ],
)
def test_what_cannot_be_exported_says_what_to_do(call, profile, tmp_path, words, expected):
    plan = tmp_path / "plan.json"
    call("plan", profile, "-d", "2xcpu", "-o", plan)
    code, _, err = call("export", plan, *words)
    assert code == 2
    assert expected in err


def test_a_cut_in_use_is_judged(call, profile):
    words = ("--from", "megatron", "--model", profile, "-d", "2xcpu", "--microbatches", "8")
    code, out, _ = call("check", "Et*4|t*4L", *words)
    assert code == 0
    assert "2 stages of 4, 4 layers" in out
    assert "memory: at most" in out
    assert "best: " in out
    # 12 + 18 + 7 x 18 = 156 ms against 15 + 15 + 7 x 15 = 135 ms, and what travels.
    assert "this cut is 15." in out


def test_lost_layers_are_named(call, profile):
    words = ("--from", "vllm", "--model", profile, "-d", "2xcpu")
    code, out, _ = call("check", "4,3", *words)
    assert code == 3
    assert "missing from every stage: layer.7" in out
    code, out, _ = call("check", "4,3", *words, "--json")
    assert json.loads(out)["missing"] == ["layer.7"]
    code, _, err = call("import", "4,3", *words)
    assert code == 2
    assert "missing from every stage: layer.7" in err


def test_too_many_layers_and_too_few_end_alike(call, profile):
    words = ("--from", "vllm", "--model", profile, "-d", "2xcpu")
    for text, said in (("4,3", "layer.7"), ("4,5", "9 blocks, but the model has 8")):
        code, out, _ = call("check", text, *words)
        assert (code, said in out) == (3, True)
        code, _, err = call("import", text, *words)
        assert (code, said in err) == (2, True)


def test_a_plan_is_no_cut(call, profile, tmp_path):
    plan = tmp_path / "plan.json"
    call("plan", profile, "-d", "2xcpu", "-o", plan)
    for command in ("check", "import"):
        code, _, err = call(command, plan, "--from", "vllm", "--model", profile, "-d", "2xcpu")
        assert code == 2
        assert "this is a plan of Stagewright, no cut in the form of vLLM" in err


def test_numbers_for_inference_say_their_phase(call, profile):
    """Of a prompt's logits servers compute the last, which was priced as all of them."""
    costs = Profile.from_json(profile.read_text())
    ids = TensorSpec(name="ids", shape=(2, 100), dtype="int64")
    head = costs.layers[-1].model_copy(
        update={"layer": costs.layers[-1].layer.model_copy(update={"module_type": "Linear"})}
    )
    costs = costs.model_copy(update={"inputs": (ids,), "layers": (*costs.layers[:-1], head)})
    profile.write_text(costs.to_json())
    words = ("--model", profile, "-d", "2xcpu", "--json")
    found = {}
    for name, text in (
        ("vllm", "6,1"),
        ("llama.cpp", "llama-server -ts 6,2"),
        ("accelerate", str({f"layer.{at}": int(at > 5) for at in range(8)})),
    ):
        code, out, _ = call("check", text, "--from", name, *words)
        assert code == 0
        notes = json.loads(out)["notes"]
        assert "prefill: times are of forwards over all 100 tokens of a sample" in str(notes)
        assert ("layer.7 is priced at the last position alone" in str(notes)) == (
            name != "accelerate"
        )
        found[name] = json.loads(out)["step_time_s"]
    # Six blocks of 1 ms, then one and a head of 3 ms: 6 + 4 + 7 x 6, or 0.03 ms in place of 3.
    assert found["accelerate"] == pytest.approx(52e-3, rel=1e-2)
    assert found["vllm"] == found["llama.cpp"] == pytest.approx(49.03e-3, rel=1e-2)
    plan = profile.with_name("plan.json")
    code, out, _ = call("plan", profile, "-d", "2xcpu", "--for", "vllm", "-o", plan)
    assert (code, "note: prefill: times" in out, "last position alone" in out) == (0, True, True)
    assert call("explain", plan, profile, "-d", "2xcpu")[0] == 0


def test_recomputation_is_an_option_of_check(call, profile):
    words = ("check", "Et*4|t*4L", "--from", "megatron", "--model", profile, "-d", "2xcpu")
    found = [
        json.loads(call(*words, "--json", "--recompute", each)[1]) for each in ("never", "always")
    ]
    assert found[0]["step_time_s"] < found[1]["step_time_s"]
    code, _, err = call(*words, "--recompute", "some")
    assert (code, "recompute" in err) == (2, True)


def test_doubled_layers_are_named(call, profile):
    parts = '[["layer.0", "layer.1", "layer.2", "layer.3"], ["layer.3", "layer.4", "layer.5", '
    parts += '"layer.6", "layer.7"]]'
    words = ("--from", "torchtitan", "--model", profile, "-d", "2xcpu")
    code, out, _ = call("check", parts, *words)
    assert code == 3
    assert "duplicated in several stages: layer.3" in out


def test_memory_that_does_not_suffice_is_said_with_both_numbers(call, profile, tmp_path):
    cluster = tmp_path / "cluster.json"
    whole = Cluster.parse("2xcpu")
    limited = tuple(each.model_copy(update={"memory_bytes": 7000}) for each in whole.devices)
    cluster.write_text(whole.model_copy(update={"devices": limited}).to_json())
    words = ("--from", "megatron", "--model", profile, "-d", cluster, "--microbatches", "4")
    code, out, _ = call("check", "Et*6|t*2L", *words)
    assert code == 3
    assert "needs" in out
    assert "7000 bytes" in out
    assert "if memory had no limit" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--for", "deepspeed", "--schedule", "zbv"), "DeepSpeed has no schedule zbv"),
        (("--for", "vllm", "--max-replicas", "2"), "vLLM has one device a stage"),
        (("--for", "torch", "--recompute", "always"), "cannot recompute whole stages"),
        (("--for", "vllm", "--schedule", "zbv"), "of forward passes; choose 1f1b or gpipe\n"),
        (("--for", "torchtitan", "--skips", "direct"), "to the next stage; set --skips relay"),
        (("--for", "nobody"), "no target is called 'nobody'"),
        (("--for", "vllm", "--server", "http://127.0.0.1:1"), "--for plans here"),
    ],
)
def test_options_against_a_target_s_rules_are_refused(call, profile, words, expected):
    code, _, err = call("plan", profile, "-d", "2xcpu", *words)
    assert code == 2
    assert expected in err


def test_a_profile_is_still_exported_as_rows(call, profile):
    code, out, _ = call("export", profile)
    assert code == 0
    assert len(out.splitlines()) == 9
    assert call("export", profile, "--to", "megatron")[0] == 2
    assert Profile.from_json(profile.read_text()).layers


def test_an_order_of_work_in_torch_s_csv_is_simulated_and_drawn(call, tmp_path):
    rows, svg = tmp_path / "schedule.csv", tmp_path / "schedule.svg"
    rows.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    code, out, _ = call("show", rows, "--svg", svg, "--trace", tmp_path / "trace.json")
    assert code == 0
    assert "2 stages on 2 ranks, 2 micro-batches" in out
    # F0 on 0, F0 B0 F1 B1 on 1 with 1 + 2 + 1 + 2 s, B1 on 0: nine seconds.
    assert "step 9 s" in out
    assert "<svg" in svg.read_text()
    assert call("show", rows, "--gantt")[0] == 2
    assert json.loads(call("show", rows, "--json")[1])["step_time_s"] == 9.0


def test_a_cut_with_replicas_is_judged_beside_plans_with_replicas(call, profile, tmp_path):
    """The best had none, so that any cut with replicas was said to be the best itself."""
    cut = tmp_path / "conf.json"
    names = [f"layer.{index}" for index in range(8)]
    stages = {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1], "1": [2]}}
    cut.write_text(json.dumps({**stages, "_layers": [names[:2], names[2:]]}))
    words = ("--from", "pipedream", "--model", profile, "-d", "3xcpu", "--json")
    code, out, _ = call("check", cut, *words)
    assert code == 0
    assert json.loads(out)["slowdown"] > 0.1


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "accelerate"])
def test_a_plan_for_inference_is_explained_and_shown_with_its_profile(
    call, profile, tmp_path, name
):
    """Its profile's id is that of the reduced profile: KeyError, and then not the plan's."""
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    words = ("plan", profile, "-d", "2xcpu", "-o", plan, "--for", name)
    code, out, err = call(*words)
    assert code == 0
    assert f"next: stagewright explain {plan} {profile} -d 2xcpu" in err
    assert out.count("note: forward only") == 1
    code, out, err = call("explain", plan, profile, "-d", "2xcpu")
    assert code == 0
    assert "stagewright plan" not in err, "that would plan training"
    assert call("show", plan, "--html", page, "--profile", profile)[0] == 0
    cut = ("import", "4,4", "--from", "vllm", "--model", profile, "-d", "2xcpu", "-o", plan)
    assert call(*cut)[0] == 0
    assert call("explain", plan, profile, "-d", "2xcpu")[0] == 0


def test_the_price_of_rules_is_against_every_free_plan(call, profile):
    words = ("plan", profile, "-d", "2xcpu", "--microbatches", "8")
    code, out, _ = call(*words, "--for", "maxtext")
    assert code == 0
    assert "the free plan of the same schedule, " in out
    assert "% slower than the free plan of any, " in out
    assert "1f1b does not fit" not in out
    code, out, _ = call(*words, "--for", "deepspeed")
    assert code == 0
    assert "schedule 1f1b chosen" not in out, "DeepSpeed has no other"
    code, out, _ = call(*words, "--for", "megatron")
    assert "no other is 2% faster" not in out


def test_a_model_without_repeated_blocks_is_not_counted_in_blocks(call, tmp_path):
    times = chain_profile([1e-3] * 6)
    kinds = ("Conv2d", "ReLU") * 3
    layers = tuple(
        entry.model_copy(
            update={
                "layer": entry.layer.model_copy(update={"name": str(index), "module_type": kind})
            }
        )
        for (index, kind), entry in zip(enumerate(kinds), times.layers, strict=True)
    )
    file = tmp_path / "cnn.json"
    file.write_text(times.model_copy(update={"layers": layers}).to_json())
    words = ("--model", file, "-d", "2xcpu")
    for command in (
        ("check", "Et*3|t*3L", "--from", "megatron", *words),
        ("import", "3,3", "--from", "vllm", *words),
        ("plan", file, "-d", "2xcpu", "--for", "sglang"),
    ):
        code, _, err = call(*command)
        assert code == 2
        assert "no repeated blocks: '0' is Conv2d, '1' ReLU" in err


def test_check_takes_the_options_of_plan(call, profile, tmp_path):
    cut = ("check", "Et*4|t*4L", "--from", "megatron", "--model", profile, "-d", "2xcpu")
    for words in (("-m", "4"), ("--optimizer", "sgd"), ("--precision", "fp32")):
        assert call(*cut, *words)[0] == 0
    assert call(*cut, "--memory-fraction", "0.5")[0] == 0
    for words in (("--estimate-for", "H100"), ("--microbatch", "2")):
        code, _, err = call(*cut, *words)
        assert code == 2
        assert f"{words[0]} requires a model name" in err
    out = json.loads(call(*cut, "--json", "--optimizer", "none")[1])
    more = json.loads(call(*cut, "--json")[1])
    assert out["peak_bytes"] < more["peak_bytes"]


def test_a_cut_that_does_not_fit_is_compared_as_if_it_did(call, profile, tmp_path):
    """It was "0.0% slower" than the best where it would have been faster."""
    cluster = tmp_path / "cluster.json"
    whole = Cluster.parse("2xcpu")
    unequal = tuple(
        each.model_copy(update={"memory_bytes": size})
        for each, size in zip(whole.devices, (20000, 6000), strict=True)
    )
    cluster.write_text(whole.model_copy(update={"devices": unequal}).to_json())
    words = ("--from", "megatron", "--model", profile, "-d", cluster, "--microbatches", "4")
    code, out, _ = call("check", "Et*5|t*3L", *words)
    assert code == 3
    assert "faster if it fitted" in out
    assert json.loads(call("check", "Et*5|t*3L", *words, "--json")[1])["slowdown"] < 0
    small = tuple(each.model_copy(update={"memory_bytes": 1000}) for each in whole.devices)
    cluster.write_text(whole.model_copy(update={"devices": small}).to_json())
    code, out, _ = call("check", "Et*5|t*3L", *words)
    assert code == 3
    assert "best: nothing fits: no plan fits the devices' memory" in out


def test_an_imported_cut_has_the_proof_of_a_search(call, profile, tmp_path):
    plan = tmp_path / "plan.json"
    words = ("--from", "megatron", "--model", profile, "-d", "2xcpu", "-o", plan)
    for text, status in (("Et*5|t*3L", "optimal"), ("Et*4|t*4L", "feasible")):
        assert call("import", text, *words)[0] == 0
        made = Plan.from_json(plan.read_text())
        assert made.proof.status == status
        best = 0.0 if status == "optimal" else 0.13  # 156 ms against 135, as above
        assert made.proof.gap == pytest.approx(best, abs=0.02)


def test_stages_beyond_the_devices_are_virtual_ones(call, profile):
    words = ("--from", "megatron", "--model", profile)
    code, out, _ = call("check", "Et*2|t*2|t*2|t*2L", *words, "-d", "2xcpu")
    assert code == 0
    assert "4 stages of 2, 2, 2, 2 layers" in out
    code, _, err = call("check", "Et*2|t*2|t*2|t*2L", *words, "-d", "3xcpu")
    assert code == 2
    assert "give --pipeline-model-parallel-size" in err


def test_a_file_that_is_missing_is_no_text(call, profile, tmp_path):
    words = ("--from", "megatron", "--model", profile, "-d", "2xcpu")
    for name in ("layout.sh", tmp_path / "layout.txt"):
        code, _, err = call("check", name, *words)
        assert code == 2
        assert f"cannot read {name}: No such file or directory" in err


def test_an_export_goes_into_a_folder(call, profile, tmp_path):
    plan = tmp_path / "plan.json"
    call("plan", profile, "-d", "2xcpu", "-o", plan, "--for", "megatron")
    assert call("export", plan, "--to", "megatron", "-o", tmp_path)[0] == 0
    assert "Et*" in (tmp_path / "megatron-layout.sh").read_text()


def test_micro_batches_that_megatron_does_not_interleave_are_said(call, profile):
    words = ("check", "E" + "t|" * 7 + "tL", "--from", "megatron", "--model", profile)
    words += ("-d", "4xcpu")
    code, out, _ = call(*words, "-m", "6")
    assert code == 3
    assert "does not run 6 micro-batches in groups of 4 (--microbatches as a multiple" in out
    assert "if it ran" in out
    assert "no limit" not in out
    assert call(*words, "-m", "8")[0] == 0


def test_an_inference_cut_is_judged_alike_in_python(profile):
    costs = Profile.from_json(profile.read_text())
    cut = import_cut("4,4", "vllm", costs)
    for profile_given in (costs, for_inference(costs)):
        report = check_cut(cut, profile_given, "2xcpu", PlanOptions(num_microbatches=8))
        assert all(stage.backward_time_s == 0 for stage in report.plan.stages)
        made = import_plan(cut, profile_given, "2xcpu")
        assert all(stage.backward_time_s == 0 for stage in made.stages)


def test_the_best_cut_is_called_so(call, profile):
    words = ("--from", "megatron", "--model", profile, "-d", "2xcpu", "--microbatches", "8")
    assert "; this cut is the best" in call("check", "Et*5|t*3L", *words)[1]


def test_flags_of_a_script_that_change_the_answer_are_named(call, profile, tmp_path):
    costs = Profile.from_json(profile.read_text())
    ids = TensorSpec(name="ids", shape=(1, 8), dtype="int64")
    profile.write_text(costs.model_copy(update={"inputs": (ids,)}).to_json())
    script = tmp_path / "train.sh"
    words = ("check", script, "--from", "megatron", "--model", profile, "-d", "2xcpu")
    flags = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*4|t*4L' "
    flags += "--micro-batch-size {} --global-batch-size 16 --tensor-model-parallel-size {} {}"
    script.write_text(flags.format(4, 8, "--recompute-granularity full --bf16"))
    out = call(*words)[1]
    assert "your file has micro-batches of 4, these costs are of 1: estimate with" in out
    assert "it: --bf16, --recompute-granularity full\n" in out
    assert "layers split over 8 devices are not read, since the profile does not say how" in out
    assert "layers (1f1b, 4 micro-batches, MEASURED profile)" in out
    script.write_text(flags.format(1, 1, ""))
    [note] = re.findall("note: (.*)", call(*words)[1])
    assert note.startswith(
        "read --pipeline-model-parallel-size 2, --pipeline-model-parallel-layout Et"
    )


@pytest.mark.parametrize(
    ("text", "source", "said"),
    [
        ("-ts 1,1 -sm row", "llama.cpp", "-sm row splits every layer over the devices"),
        ("-ngl 99 -ts 1,1 --n-cpu-moe 27", "llama.cpp", "depends on it: --n-cpu-moe 27"),
        ("-ts 1,1 -ot blk.1.ffn=CPU --zork", "llama.cpp", "depends on it: -ot blk.1.ffn=CPU"),
        ("4,4 --cpu-offload-gb=4 -tp 2", "vllm", "layers split over 2 devices are not read"),
        ("SGLANG_PP_LAYER_PARTITION=4,4 sglang --pp-size 4", "sglang", "give 4 numbers"),
    ],
)
def test_flags_that_move_weights_are_named_or_refused(call, profile, text, source, said):
    words = ("--from", source, "--model", profile, "-d", "2xcpu", "-m", "4")
    code, out, err = call("check", text, *words)
    assert said in out + err
    if code == 0:
        assert said in str(json.loads(call("check", text, *words, "--json")[1])["notes"])


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("-ts 6,3", "llama.cpp"),
        ("-m MODEL.gguf --tensor-split 6,3", "llama.cpp"),
        ("--pipeline-model-parallel-layout 'Et*6|t*2L'", "megatron"),
    ],
)
def test_a_cut_may_be_flags_of_its_runtime(call, profile, text, source):
    """`-ts` was taken for an option: "No such option: -t"."""
    words = ("--from", source, "--model", profile, "-d", "2xcpu")
    code, out, _ = call("check", text, *words, "-m", "4")
    assert code == 0
    assert "2 stages of 6, 2 layers" in out
    assert call("check", *words, "-m", "4", "--", text)[1] == out
    code, _, err = call("check", "--tensor-split=6,3", *words)
    assert code == 2
    assert "a cut that begins with - goes last: -- '-ts 6,2'" in err
    assert "did you mean --devices?" in call("check", text, "--device", "2xcpu", *words[:4])[2]
