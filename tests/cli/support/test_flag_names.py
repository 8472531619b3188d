"""What the library says of options, in the words of the command line."""

import pytest

from stagewright.cli.support.flag_names import in_flags, plan_text
from stagewright.core.cluster.reserves import MemoryReserves
from stagewright.core.plan.plan import Pin, Plan, PlanOptions
from stagewright.planner.plan import plan
from stagewright.view.option_flags import FLAGS, flags_of, flags_of_options
from tests.builders import chain_profile


def test_every_option_has_the_flag_that_the_command_takes(run):
    text = run("plan", "--help-all").stdout
    assert flags_of_options().keys() == PlanOptions.model_fields.keys() - {"auto"}
    assert all(flag in text for flag in flags_of_options().values())
    assert FLAGS["deadline_s"] in text
    profiling = run("profile", "--help-all").stdout
    assert all(FLAGS[name] in profiling for name in ("budget_s", "num_threads", "busy_neighbours"))


@pytest.mark.parametrize(
    ("said", "printed"),
    [
        ("it fits with recompute='auto': 2 s", "it fits with --recompute auto: 2 s"),
        ("num_microbatches=8, or 4 devices", "--microbatches 8, or 4 devices"),
        ("more than num_stages=2; ask", "more than --stages 2; ask"),
        ("plan with max_replicas=None", "plan with --max-replicas any"),
        ("plan with num_stages=None.", "plan with no --stages."),
        ("memory_fraction=1.0: 3 s", "--memory-fraction 1.0: 3 s"),
        ("name a batch_size", "name a --batch-size"),
        ("the schedule has no effect, and num_microbatches neither",
         "the schedule has no effect, and --microbatches neither"),
        ("a layer called 'num_stages' at /options/num_stages",
         "a layer called 'num_stages' at /options/num_stages"),
        ("my_num_stages=3 PlanOptions(num_stages=4)", "my_num_stages=3 PlanOptions(--stages 4)"),
    ],
)  # fmt: skip
def test_fields_become_flags(said, printed):
    """Cause: errors of the command line offered `num_microbatches=8`, which it does not take."""
    assert in_flags(said) == printed


def test_a_plan_s_table_is_left_alone():
    made = plan(chain_profile([1, 1]), "2xcpu", num_microbatches=4)
    noted = made.model_copy(update={"notes": ("gap=0.5 was kept",)})
    assert plan_text(noted) == str(noted).replace("gap=0.5", "--gap 0.5")


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(),
        PlanOptions(num_microbatches=16, max_replicas=None, recompute="auto", gap=0.5),
        PlanOptions(schedule="interleaved_1f1b", chunks=4, num_stages=4, optimizer="sgd"),
        PlanOptions(
            together=(("rung.0", "rung.1"),),
            no_cut_after=("rung.1", "rung.2"),
            pins=(Pin(layer="rung.0", stage=0, kind="cpu"), Pin(layer="rung.3", kind="cpu")),
        ),
    ],
)
def test_flags_of_options_ask_for_them_again(run, profile_file, options):
    ran = run("plan", profile_file, "-d", "2xcpu", *flags_of(options), "--json")
    assert ran.code == 0, ran.stderr
    pins = tuple(
        Pin(layer=pin.layer, **{name: value})
        for pin in options.pins
        for name, value in (("stage", pin.stage), ("kind", pin.kind))
        if value is not None
    )
    named = {"pins": pins, "precision": "fp32", "reserves": MemoryReserves()}
    assert Plan.from_json(ran.stdout).options == options.model_copy(update=named)
