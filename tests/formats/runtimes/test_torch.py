"""Exported scripts run under torch's own pipelining and train as the unsplit model."""

import os
import subprocess

import pytest
import torch

import stagewright
from stagewright.formats.runtimes.registry import export
from tests.formats.runtimes.small_models import BATCH, MODELS, loss_fn

CASES = [
    ("gpt", "1f1b", 3, {}, "compute_only"),
    ("gpt", "gpipe", 2, {}, "compute_comms"),
    ("gpt", "interleaved_1f1b", 2, {}, "compute_comms"),
    ("gpt", "zero_bubble", 3, {}, "compute_only"),
    ("gpt", "interleaved_zero_bubble", 2, {}, "compute_only"),
    ("gpt", "zbv", 2, {}, "compute_comms"),
    ("llama", "1f1b", 2, {}, "compute_comms"),
    ("cnn", "looped_bfs", 2, {}, "compute_only"),
    ("cnn", "dualpipev", 2, {"num_microbatches": 8}, "compute_only"),
    ("cnn", "1f1b", 4, {"max_extra_in_flight": 2, "num_microbatches": 8}, "compute_comms"),
]


@pytest.mark.parametrize(("name", "schedule", "ranks", "options", "form"), CASES)
def test_gradients_are_those_of_the_unsplit_model(
    name, schedule, ranks, options, form, tmp_path, forking_executable
):
    build, sample, target = MODELS[name]
    options = stagewright.PlanOptions(
        **{"num_microbatches": 4, "schedule": schedule, "num_stages": None, **options}
    )
    share = BATCH // options.num_microbatches
    profile = stagewright.profile(build(), sample(share))
    plan = stagewright.plan(profile, f"{ranks}xcpu", _all_stages(options, ranks))
    exported = export(plan, "torch")
    (tmp_path / "torch_pipeline.py").write_text(exported.text)
    (tmp_path / "model").write_text(name)
    for file, text in exported.attachments.items():
        (tmp_path / file).write_text(text)
    _run(forking_executable, tmp_path, ranks, form)

    model = build()
    loss = loss_fn(model(sample(BATCH)), target(BATCH))
    loss.backward()
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(ranks)]
    (reported,) = (each["loss"] for each in found if each["loss"] is not None)
    assert reported == pytest.approx(loss.item(), rel=1e-12)
    gradients = {name: grad for each in found for name, grad in each["gradients"].items()}
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-10, atol=1e-12)


def _all_stages(options, ranks):
    """Have every rank used, so that the export has as many processes as the test starts."""
    chunks = 2 if options.schedule in ("zbv", "dualpipev") else options.chunks
    several = options.schedule not in ("gpipe", "1f1b", "zero_bubble")
    return options.model_copy(update={"num_stages": ranks * (chunks if several else 1)})


def _run(executable, folder, ranks, form):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    command = [str(executable), "-m", "tests.formats.runtimes.torch_worker", str(folder)]
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(ranks)]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks), form], env=environment, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=240) for process in started]
        assert codes == [0] * ranks, [
            (folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(ranks)
        ]
    finally:
        for process, log in zip(started, logs, strict=True):
            process.kill()
            process.wait()
            log.close()


def test_sends_and_receives_of_a_pair_of_ranks_are_in_one_order():
    """As torch posts them without tags, another order would pair a receive with another send."""
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"):
        profile = stagewright.profile(MODELS["cnn"][0](), MODELS["cnn"][1](1))
        options = stagewright.PlanOptions(num_microbatches=8, schedule=schedule)
        plan = stagewright.plan(profile, "4xcpu", options)
        rows = export(plan, "torch").attachments["schedule_comms.csv"].splitlines()
        rank_of = {
            int(action.partition("F")[0]): rank
            for rank, row in enumerate(rows)
            for action in row.split(",")
            if "_" not in action and "F" in action
        }
        sent, received = {}, {}
        for rank, row in enumerate(rows):
            for action in row.split(","):
                stage, _, rest = action.partition("SEND_")
                if rest:
                    other = int(stage) + (1 if rest[0] == "F" else -1)
                    sent.setdefault((rank, rank_of[other]), []).append((other, rest))
                stage, _, rest = action.partition("RECV_")
                if rest:
                    other = int(stage) - (1 if rest[0] == "F" else -1)
                    received.setdefault((rank_of[other], rank), []).append((int(stage), rest))
        assert sent == received
        assert sent


class Centred(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True)
        return self.inner(x - mean)


class SwitchedOff(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            scale = torch.ones(8)
        return super().forward(x * scale)


class HalfPrecision(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize(
    ("module", "name"),
    [(Centred, 1), (lambda: SwitchedOff(8, 8), 0), (lambda: HalfPrecision(8, 8), 0)],
)
def test_regions_without_gradients_are_refused_by_name(module, name, tmp_path):
    """Their stages raised "Expected positional argument for parameter x".

    The mean of the first `Centred` is of the inputs, into which no parameter goes.
    """
    model = torch.nn.Sequential(*(module() for _ in range(4)))
    profile = stagewright.profile(model, torch.randn(2, 8))
    options = stagewright.PlanOptions(num_microbatches=2, num_stages=2)
    scope = {"__file__": str(tmp_path / "torch_pipeline.py")}
    text = export(stagewright.plan(profile, "2xcpu", options), "torch").text
    assert "# build_schedule refuses autocast regions" in text
    exec(text, scope)
    with pytest.raises(NotImplementedError, match=rf"^{name} has operations under torch.no_grad"):
        scope["build_schedule"](model, (torch.randn(2, 8),), 0, torch.device("cpu"), None)
