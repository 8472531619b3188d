"""`plan` from files to files."""

import inspect
import json
import shlex
from typing import get_args

import pytest

from stagewright.cli.commands.plan import build_options, command
from stagewright.cli.options.plan import parse_max_replicas, parse_tensor
from stagewright.core.cluster.reserves import MemoryReserves
from stagewright.core.errors import DeadlineExceeded, InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import Chosen, Objective, Pin, Plan, PlanOptions
from stagewright.core.plan.schedule import TrainingSchedule
from stagewright.view.option_flags import flags_of
from tests.builders import chain_profile


def test_table_on_stdout_and_the_way_on_on_stderr(run, profile_file):
    ran = run("plan", profile_file, "--devices", "2x1GiB", "-o", "plan.json")
    assert ran.code == 0, ran.stderr
    plan = Plan.read("plan.json")
    assert ran.stdout == f"{plan}\n"
    assert ran.stderr.splitlines() == [
        "wrote plan.json",
        f"next: stagewright explain plan.json {profile_file} -d 2x1GiB",
        "next: stagewright show plan.json --svg plan.svg",
    ]


def test_what_is_next_can_be_pasted(run, profile_file):
    """Cause: prose stood behind the commands, and a shell took it for arguments."""
    words = ["plan", profile_file, "--devices", "2x1GiB", "--pin", "rung.0=@1GiB"]
    hints = [run(*words).stderr]
    for _ in range(3):
        line = hints[-1].splitlines()[-1].removeprefix("next: stagewright ")
        ran = run(*shlex.split(line))
        assert ran.code == 0, line
        hints.append(ran.stderr)
    assert hints[0].endswith(f"next: stagewright {shlex.join(map(str, words))} -o plan.json\n")
    followed = [hint.splitlines()[-1].split(maxsplit=2)[2] for hint in hints if hint]
    assert followed[1:] == ["show plan.json --svg plan.svg", "explain --help"]


def test_json_is_the_plan_and_nothing_else(run, profile_file, cluster_file):
    ran = run("plan", profile_file, "--devices", cluster_file, "--json", "--stages", "2")
    assert (ran.code, ran.stderr) == (0, "")
    plan = Plan.from_json(ran.stdout)
    assert sum(plan.balance) == 4
    assert plan.num_stages == 2


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["-m", "4", "--schedule", "gpipe"], {"num_microbatches": 4, "schedule": "gpipe"}),
        (["--schedule", "interleaved_1f1b", "--chunks", "2"],
         {"schedule": "interleaved_1f1b", "chunks": 2}),
        (["--batch-size", "8"], {"batch_size": 8}),
        (["--extra-in-flight", "1"], {"max_extra_in_flight": 1}),
        (["--objective", "throughput"], {"objective": "throughput"}),
        (["--max-stages", "1"], {"max_stages": 1}),
        (["--max-replicas", "any"], {"max_replicas": None}),
        (["--max-replicas", "2"], {"max_replicas": 2}),
        (["--recompute", "auto"], {"recompute": "auto"}),
        (["--order", "any"], {"layer_order": "any"}),
        (["--skips", "direct"], {"skips": "direct"}),
        (["--together", "rung.0:rung.1", "--together", "rung.2:rung.3"],
         {"together": (("rung.0", "rung.1"), ("rung.2", "rung.3"))}),
        (["--no-cut-after", "rung.1"], {"no_cut_after": ("rung.1",)}),
        (["--pin", "rung.0=0", "--pin", "rung.3=@cpu"],
         {"pins": (Pin(layer="rung.0", stage=0), Pin(layer="rung.3", kind="cpu"))}),
        (["--tied", "together"], {"tied": "together"}),
        (["--optimizer", "sgd", "--memory-fraction", "0.5"],
         {"optimizer": "sgd", "memory_fraction": 0.5}),
        (["--gap", "0.01"], {"gap": 0.01}),
    ],
)  # fmt: skip
def test_options_reach_the_plan(run, profile_file, words, fields):
    ran = run("plan", profile_file, "-d", "2xcpu", *words, "--json")
    assert ran.code == 0, ran.stderr
    options = Plan.from_json(ran.stdout).options
    assert {name: getattr(options, name) for name in fields} == fields
    chosen = {"num_microbatches", "schedule", "precision", "reserves"}
    unasked = PlanOptions.model_fields.keys() - fields.keys() - chosen
    assert (options.precision, options.reserves) == ("fp32", MemoryReserves())
    assert all(getattr(options, name) == getattr(PlanOptions(), name) for name in unasked)


def test_of_a_batch_the_size_of_micro_batches_is_chosen(run, tmp_path):
    """Cause: the command sent its default of 8 micro-batches along, which fixed their size."""
    inputs = (TensorSpec(name="x", shape=(4, 8), dtype="float32"),)
    profile = chain_profile([0.1] * 4).model_copy(update={"inputs": inputs})
    profile.write(tmp_path / "profile.json")
    words = ("plan", tmp_path / "profile.json", "-d", "2xcpu", "--schedule", "1f1b", "--json")
    made = Plan.from_json(run(*words, "--batch-size", "16").stdout)
    assert made.num_microbatches == 4  # of the four samples measured
    made = Plan.from_json(run(*words, "--batch-size", "16", "-m", "8").stdout)
    assert made.num_microbatches == 8


NAMES = {
    "microbatches": "num_microbatches", "stages": "num_stages", "order": "layer_order",
    "extra_in_flight": "max_extra_in_flight", "pin": "pins",
}  # fmt: skip


OF_A_NAMED_MODEL = ("microbatch", "sequence", "estimate_for", "calibrate")
"""What is estimated where a model is named; no options of a plan."""


def test_every_option_has_a_flag_with_its_default():
    parameters = dict(inspect.signature(command).parameters)
    for name in (
        "context",
        "profiles",
        "devices",
        "target",
        "deadline",
        "output",
        "server",
        "token",
        "verbose",
        "no_cache",
        "as_json",
        *OF_A_NAMED_MODEL,
    ):
        del parameters[name]
    found = {NAMES.get(name, name): parameter.default for name, parameter in parameters.items()}
    defaults = {name: field.default for name, field in PlanOptions.model_fields.items()}
    del defaults["auto"]
    assert found.keys() == defaults.keys()
    for name in get_args(Chosen):  # the library has defaults where the command chooses
        assert found.pop(name) == "auto"
        del defaults[name]
    assert parse_max_replicas(found.pop("max_replicas")) == defaults.pop("max_replicas")
    assert parse_tensor(found.pop("tensor")) == defaults.pop("tensor")
    assert tuple(found.pop("strategies").split(",")) == defaults.pop("strategies")
    assert {name: value or defaults[name] for name, value in found.items()} == defaults


@pytest.mark.parametrize(
    "choices", [get_args(TrainingSchedule), get_args(Objective)], ids=["schedule", "objective"]
)
def test_help_names_every_choice(run, choices):
    text = run("plan", "--help-all").stdout
    assert all(name in text for name in choices)


def test_help_is_in_groups(run):
    lines = run("plan", "--help-all").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "Arguments:"
    assert titles[-2:] == ["Options:", "Examples:"]
    assert "Objective and options:" in titles


def test_replicas_of_a_node_are_planned_from_shorthand(run, profile_file):
    ran = run("plan", profile_file, "-d", "2x2x1GiB", "--max-replicas", "any", "--json")
    assert ran.code == 0, ran.stderr
    assert len({name for stage in Plan.from_json(ran.stdout).stages for name in stage.devices}) > 1


def test_no_plan_before_the_deadline_is_its_own_exit_code(run, profile_file, monkeypatch):
    def late(*_, deadline_s, **__):
        raise DeadlineExceeded(f"no plan was found in {deadline_s} s")

    monkeypatch.setattr("stagewright.planner.plan.plan", late)
    ran = run("plan", profile_file, "-d", "2xcpu", "--deadline", "1.5", "--json")
    assert (ran.code, ran.stdout) == (6, "")
    error = json.loads(ran.stderr)
    assert (error["error"], error["exit_code"]) == ("DeadlineExceeded", 6)
    assert error["detail"] == "no plan was found in 1.5 s"


def test_several_profiles_choose_the_size_of_microbatches(run, profile, profile_file, tmp_path):
    """Measured at 2 samples the model takes almost as long as at 8; so 8 it is."""
    inputs = (profile.inputs[0].model_copy(update={"shape": (2, 64)}),)
    small = profile.model_copy(update={"inputs": inputs})
    small.write(tmp_path / "small.json")
    words = ["plan", "small.json", profile_file, "-d", "2xcpu", "--batch-size", "64"]
    ran = run(*words, "-o", "plan.json")
    assert ran.code == 0, ran.stderr
    made = Plan.read("plan.json")
    assert (made.inputs[0].shape[0], made.profile_id) == (8, profile.content_id())
    assert "note: micro-batches of 8 were chosen; profiled were 2, 8" in ran.stdout
    assert f"stagewright explain plan.json {profile_file} -d 2xcpu" in ran.stderr
    fixed = run(*words, "-m", "32", "--json")
    assert Plan.from_json(fixed.stdout).inputs[0].shape[0] == 2


def test_too_little_memory_is_infeasible(run, profile_file):
    ran = run("plan", profile_file, "-d", "2x0.000001GiB", "-o", "plan.json", "--json")
    assert (ran.code, ran.stdout) == (3, "")
    error = json.loads(ran.stderr)
    assert error["error"] == "Infeasible"
    assert error["constraint"] == "memory"
    assert error["required"] > error["available"]


def test_ways_out_are_told_with_their_step(run, profile_file):
    words = ["plan", profile_file, "-d", "1x12MiB", "--schedule", "gpipe", "--optimizer", "none"]
    ran = run(*words)
    assert ran.code == 3
    assert (
        "it would fit with --schedule 1f1b: 240 ms per step, or --recompute layers: 320 ms per "
        "step, or --microbatches 1: 30 ms per step of 0.125 times the samples, or 4 devices "
        "(4x12MiB, 8 micro-batches): 114 ms per step"
    ) in ran.stderr
    literal = [*words[:2], "-d", "4x12MiB", *words[4:], "-m", "8", "--json"]
    assert json.loads(run(*literal).stdout)["step_time_s"] == pytest.approx(0.114, rel=1e-3)
    ways_out = json.loads(run(*words, "--json").stderr)["ways_out"]
    assert {"text": "schedule='1f1b'", "step_time_s": 0.24} in ways_out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.json", "-d", "2xcpu"], "cannot read absent.json"),
        (["ladder.json", "-d", "many"], "cannot parse devices 'many'"),
        (["ladder.json", "-d", "absent.yaml"], "cannot read absent.yaml"),
        (["ladder.json", "-d", ""], "no devices given; write '4x24GB'"),
        (["ladder.json", "-d", "unjoined.json"], "give the links as 'levels', innermost first"),
        (["ladder.json", "-d", "2xcpu", "--deadline", "nan"], "--deadline"),
        (["ladder.json", "-d", "2xcpu", "--batch-size", "16", "-m", "3"], "choose a divisor"),
        (["ladder.json", "ladder.json", "-d", "2xcpu"], "give a --batch-size"),
        (["ladder.json", "-d", "absent.json"], "cannot read absent.json"),
        (["cluster.json", "-d", "2xcpu"], "cluster.json is stagewright.cluster/1"),
        (["ladder.json", "-d", "ladder.json"], "expected stagewright.cluster/1"),
        (
            ["ladder.json", "-d", "2xcpu", "--schedule", "fifo"],
            "'fifo' is none of 'gpipe'",
        ),
        (["ladder.json", "-d", "2xcpu", "--schedule", "1b1f"], "did you mean '1f1b'?"),
        (["ladder.json", "-d", "2xcpu", "-m", "0"], "--microbatches: 0 is too small: at least 1"),
        (["ladder.json", "-d", "2xcpu", "--objective", "fun"], "--objective: 'fun' is none of"),
        (["ladder.json", "-d", "2xcpu", "--max-replicas", "many"], "a number or 'any'"),
        (["ladder.json", "-d", "2xcpu", "--together", "rung.0"], "FIRST:LAST, not 'rung.0'"),
        (["ladder.json", "-d", "2xcpu", "--together", "a:b:c"], "FIRST:LAST"),
        (["ladder.json", "-d", "2xcpu", "--together", "rung.0:rung.9"], "rung.9"),
        (["ladder.json", "-d", "2xcpu", "--no-cut-after", "rung.9"], "rung.9"),
        (["ladder.json", "-d", "2xcpu", "--pin", "rung.0"], "LAYER=STAGE"),
        (["ladder.json", "-d", "2xcpu", "--pin", "rung.0=-1"], "LAYER=STAGE"),
        (["ladder.json", "-d", "2xcpu", "--pin", "rung.0=@"], "LAYER=@KIND"),
        (["ladder.json", "-d", "2xcpu", "--deadline", "-1"], "--deadline"),
        (["ladder.json", "-d", "2xcpu", "-o", "absent/plan.json"], "folder absent does not exist"),
        (["ladder.json", "-d", "2xcpu", "-o", "."], "not a regular file"),
        (["text.json", "-d", "2xcpu"], "text.json is not JSON"),
        (["other.json", "-d", "2xcpu"], "other.json is JSON without a schema_version"),
        (["broken.json", "-d", "2xcpu"], "/layers: is missing"),
    ],
)
@pytest.mark.usefixtures("profile_file", "cluster_file")
def test_wrong_requests_are_usage_errors(run, tmp_path, words, said):
    (tmp_path / "text.json").write_text("not JSON")
    (tmp_path / "other.json").write_text("[1, 2]")
    (tmp_path / "unjoined.json").write_text(
        '{"schema_version": "stagewright.cluster/1", "devices": [{"name": "a"}, {"name": "b"}]}'
    )
    (tmp_path / "broken.json").write_text('{"schema_version": "stagewright.profile/1"}')
    before = set(tmp_path.iterdir())
    ran = run("plan", *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert set(tmp_path.iterdir()) == before


def test_split_layers_and_shared_parameters_are_asked_for_by_flags():
    asked = {"tensor": "auto", "strategies": "replicate,zero1"}
    parameters = inspect.signature(command).parameters
    given = {name: each.default for name, each in parameters.items()} | asked
    options = build_options(given, is_model=False)
    assert (options.tensor, options.strategies) == ("auto", ("replicate", "zero1"))
    assert flags_of(options)[-4:] == ["--tensor", "auto", "--strategies", "replicate,zero1"]
    with pytest.raises(InvalidInput, match="--tensor takes a number or 'auto', not 'many'"):
        build_options(given | {"tensor": "many"}, is_model=False)
