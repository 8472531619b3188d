"""The GPU check runs here too, on the CPU and on tiny models, by the path it takes on a GPU."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec

import pytest
import torch

from benchmarks.gpu_check.driver import Driver
from benchmarks.gpu_check.models.registry import MODELS
from benchmarks.gpu_check.order import MODEL, MODEL_NAMES, STAGES, Stage, choose
from benchmarks.gpu_check.program import LACKING
from benchmarks.gpu_check.records import Record, Setting
from benchmarks.gpu_check.rehearsal import CARD, rehearsed_on_card
from benchmarks.gpu_check.report import faults, make_report, missing, page, verdict
from stagewright.core.models.families import MLPSpec
from stagewright.core.profile.profile import Profile
from stagewright.profiler.estimates.calibration_table import CalibrationTable
from stagewright.profiler.estimates.estimate import estimate_spec

ON_CPU = Setting("cpu", "cpu", torch.__version__, small=True)

WRITES = "import json, sys; out = sys.argv[sys.argv.index('--output') + 1]; "
"""Beginning of a stand-in for a stage, which knows where its result belongs."""

PASSES = WRITES + "open(out, 'w').write(json.dumps({'found': 1}))"


def stand_in(name, code, limit_s=30.0):
    return Stage(name, limit_s, ("-c", code))


class Runs:
    """Runs of the driver in one folder, with the lines it says."""

    def __init__(self, folder, setting=ON_CPU):
        self.folder, self.setting, self.lines = folder, setting, []

    def __call__(self, *stages, seconds=60.0, again=()):
        self.lines = []
        driver = Driver(self.setting, self.folder, seconds, self.lines.append)
        found = driver.run(stages, again)
        return {name: record.status for name, record in found.items()}

    def read(self, name):
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_a_stage_that_fails_or_hangs_ends_no_other(runs):
    found = runs(
        stand_in("fails", "raise SystemExit('no memory')"),
        stand_in("hangs", "import time; time.sleep(100)", 1.0),
        stand_in("lacks", f"{WRITES}print('needs x'); sys.exit({LACKING})"),
        stand_in("passes", PASSES),
    )
    assert found == {
        "fails": "failed", "hangs": "over its limit", "lacks": "lacking", "passes": "passed",
    }  # fmt: skip
    assert runs.read("fails")["error"] == "no memory"
    assert runs.read("hangs")["error"] == "took longer than 1 s"
    assert runs.read("passes")["result"] == {"found": 1}


def test_a_stage_without_a_result_has_not_passed(runs):
    assert runs(stand_in("silent", "pass")) == {"silent": "failed"}


def test_a_second_run_goes_on_with_what_has_not_passed(runs, tmp_path):
    count = WRITES + f"open({str(tmp_path / 'count')!r}, 'a').write('x'); "
    one = stand_in("one", count + "open(out, 'w').write('{}')")
    two = stand_in("two", "raise SystemExit(1)")
    assert runs(one, two) == {"one": "passed", "two": "failed"}
    assert runs(one, stand_in("two", PASSES)) == {"one": "passed", "two": "passed"}
    assert (tmp_path / "count").read_text() == "x"
    runs(one, again=["one"])
    assert (tmp_path / "count").read_text() == "xx"


@pytest.mark.parametrize("written", ['{"result": null}', '{"status": "fine"}', "[]", "{"])
def test_a_record_that_something_else_wrote_does_not_count(runs, written):
    assert runs(stand_in("one", PASSES)) == {"one": "passed"}
    path = runs.folder / "one.json"
    known = json.loads(path.read_text()) if written.endswith("}") else {}
    path.write_text(json.dumps(known | json.loads(written)) if known else written)
    assert runs(stand_in("one", "raise SystemExit(1)")) == {"one": "failed"}


def test_results_of_another_device_do_not_count(runs, tmp_path):
    assert runs(stand_in("one", PASSES)) == {"one": "passed"}
    other = Runs(tmp_path, Setting("cpu", "another", torch.__version__, small=True))
    assert other(stand_in("one", "raise SystemExit(1)")) == {"one": "failed"}


def test_what_failed_before_comes_after_what_was_never_tried(runs):
    runs(stand_in("one", "raise SystemExit(1)"))
    runs(stand_in("one", "raise SystemExit(1)"), stand_in("two", PASSES))
    begun = [line.split()[3] for line in runs.lines if "at most" in line]
    assert begun == ["two", "one"]


def test_stages_for_which_no_time_is_left_are_named(runs):
    found = runs(
        stand_in("long", "import time; time.sleep(100)", 60.0), stand_in("late", PASSES), seconds=11
    )
    assert found == {"long": "cut off"}
    assert "late: not run, the minutes are over" in runs.lines[-1]


def test_an_unknown_stage_is_refused():
    assert [stage.name for stage in choose("models", STAGES)] == [MODEL + n for n in MODEL_NAMES]
    with pytest.raises(ValueError, match="no stage nonsense; there are smoke, two-stages"):
        choose("smoke,nonsense", STAGES)


def comparison(relative_error):
    return {"predicted": 1 + relative_error, "measured": 1.0, "relative_error": relative_error}


def report(device="cuda", *, time=0.01, memory=-0.02, small=False, **changed):
    """The report of a run in which every stage passed, but for those ``changed``."""
    setting = Setting(device, device, "2", small)
    stage = {
        "stages": 2, "stage": 0, "layers": 3, "in_flight": 2,
        "time": comparison(time), "memory": comparison(memory),
    }  # fmt: skip
    records = {}
    for each in STAGES:
        result = {}
        if each.name.startswith(MODEL):
            model = each.name.removeprefix(MODEL)
            result = {"model": model, "parameters": 10, "whole": comparison(0.0), "stages": [stage]}
        status = changed.get(each.name.replace("-", "_"), "passed")
        if status is not None:
            error = "" if status == "passed" else "its error"
            records[each.name] = Record(each.name, status, setting, 1.0, error, [], result)
    return make_report(setting, records)


def test_errors_above_five_per_cent_do_not_pass():
    assert faults(report()) == []
    assert "stage_time is 6.0%" in faults(report(time=0.06))[0]
    assert "stage_memory is 7.0%" in faults(report(memory=-0.07))[0]
    assert faults(report("cpu", time=0.5, memory=0.5)) == []


def test_the_whole_check_passes_and_a_part_of_it_does_not():
    """One model alone once wrote "Passed."."""
    assert verdict(report()) == "Passed."
    assert page(report()).endswith("\nPassed.\n")
    part = report(recording=None, smoke="cut off", marked_tests="lacking")
    assert missing(part) == ["smoke", "recording"]
    assert verdict(part).startswith(f"Incomplete: {len(STAGES) - 3} of {len(STAGES)} stages passed")
    assert "marked-tests (its error)" in verdict(part)
    assert "Passed" not in page(part)
    failed = report(two_stages="failed", model_unet="over its limit")
    assert faults(failed) == ["two-stages: its error", "model-unet: its error"]
    assert "Not measured: its error" in page(failed)
    assert verdict(report(small=True)) != "Passed."
    assert "not judged" in verdict(report("cpu"))


@pytest.fixture
def check(repository, forked_python):
    def run(*arguments):
        command = [forked_python, str(repository / "scripts/gpu_check"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_ends_with_3(check, tmp_path):
    done = check("--output", tmp_path)
    assert done.returncode == 3
    assert "GPU node" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_written_is_refused_before_any_stage(check, tmp_path):
    (tmp_path / "taken").touch()
    done = check("--rehearse", "--stages", "smoke", "--output", tmp_path / "taken")
    assert done.returncode == 2
    assert "cannot write to" in done.stderr
    assert "smoke ..." not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_stopped_leaves_no_stage_behind(repository, tmp_path, number):
    """It went on in a session of its own, and kept the GPU busy."""
    program = textwrap.dedent(
        f"""
        import signal, sys
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        sys.path.insert(0, {str(repository)!r})
        from benchmarks.gpu_check import check
        from benchmarks.gpu_check.order import Stage
        code = "import os, time; print(os.getpid(), file=open('{tmp_path}/begun', 'w'), flush=True)"
        check.STAGES = [Stage("long", 90.0, ("-c", code + "; time.sleep(90)"))]
        sys.argv[1:] = ["--rehearse", "--output", {str(tmp_path)!r}]
        sys.exit(check.main(""))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    begun = tmp_path / "begun"
    while not (begun.exists() and begun.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


@pytest.mark.distributed
@pytest.mark.timeout(280)
def test_stages_go_all_the_way(check, tmp_path):
    stages = "smoke,two-stages,recording,killed-rank,model-gpt2-medium,device-table"
    done = check("--rehearse", "--stages", stages, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert json.loads(done.stdout) == found
    assert [stage["status"] for stage in found["stages"]] == ["passed"] * 6
    both = found["results"]["two-stages"]["ways"]
    assert {way: len(told["ranks"]) for way, told in both.items()} == {"emulated": 2, "relay": 2}
    assert found["results"]["killed-rank"]["way"] == "emulated"
    (model,) = found["models"]
    assert [(row["stages"], row["stage"]) for row in model["stages"]] == [
        (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3),
    ]  # fmt: skip
    assert all(abs(row["memory"]["relative_error"]) < 0.1 for row in model["stages"])
    assert all(row["time"]["measured"] > 0 for row in model["stages"])
    profile = Profile.read(tmp_path / "gpt2-medium-small-cpu.json")
    assert len(profile.layers) == model["layers"]
    text = (tmp_path / "gpu_check.md").read_text()
    assert "## gpt2-medium" in text
    assert "Incomplete: 6 of" in text


@pytest.mark.timeout(280)
def test_the_devices_tables_are_written_and_reported(check, tmp_path):
    done = check("--rehearse", "--stages", "calibration", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    (row,) = found["results"]["calibration"]["tables"]
    table = CalibrationTable.read(tmp_path / row["file"])
    assert row["operations"] == len(table.operations)
    words = f"wrote {row['file']} (fitted to {table.median_error:.0%})"
    assert words in (tmp_path / "gpu_check.md").read_text()
    assert row["bands"] == table.bands
    made = estimate_spec(MLPSpec(family="mlp"), device="CPU", num_threads=1, table=table)
    assert "calibrated on" in made.provenance.rests_on[0]


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (("empty_cache", "reset_peak", "read_peak"), None),
        (("reset_peak", "read_peak"), "a peak was read that did not begin with an empty cache"),
        (("empty_cache", "read_peak"), "a peak was read that did not begin with an empty cache"),
        ((), "nothing was asked of torch.cuda"),
    ],
)
def test_a_rehearsal_on_a_card_judges_what_is_asked_of_it(calls, said):
    words = pytest.raises(RuntimeError, match=said) if said else contextlib.nullcontext()
    with words, rehearsed_on_card() as stub:
        for name in calls:
            stub.say(name, None if name == "empty_cache" else CARD)


def test_a_rehearsal_refuses_calls_to_the_current_card():
    refused = pytest.raises(RuntimeError, match="record was asked of card 0, not of 1")
    with refused, rehearsed_on_card():
        torch.cuda.Event(enable_timing=True).record()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_has_a_program(stage):
    option, module, *_ = stage.arguments
    assert option == "-m"
    assert find_spec(module) is not None


@pytest.mark.parametrize("name", sorted(MODELS))
def test_small_models_are_the_shape_of_the_large_ones(name):
    with torch.device("meta"):
        large = MODELS[name](False).model
    millions = {
        "gpt2-medium": 355, "resnet50": 25.6, "llama-1b": 1236, "vit-large": 304,
        "bert-large": 335, "efficientnet-b4": 19.3, "unet": 31.0, "switch-base": 308,
    }  # fmt: skip
    parameters = sum(parameter.numel() for parameter in large.parameters())
    assert parameters / 1e6 == pytest.approx(millions[name], rel=0.01)
    small = MODELS[name](True).model
    kinds = {type(module) for module in large.modules()}
    assert {type(module) for module in small.modules()} == kinds
