"""Help of the commands: a summary and two examples each, in groups, as long as a screen."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from typer.core import TyperCommand, TyperGroup

from .support.output import PARAMETERS


class Summary(NamedTuple):
    """One line on a command, and two command lines that work."""

    text: str
    examples: tuple[str, str]


GROUPS: dict[str, dict[str, Summary]] = {
    "Plan": {
        "doctor": Summary(
            "Report devices, memory, links and installed extras.", ("doctor", "doctor --links")
        ),
        "capture": Summary(
            "Show a model's layers and where it may be cut.",
            ("capture my_model:build --sample my_model:sample", "capture --family gpt2"),
        ),
        "profile": Summary(
            "Measure what each layer of a model costs here.",
            (
                "profile my_model:build --sample my_model:sample -o profile.json",
                "profile --links -o cluster.json",
            ),
        ),
        "estimate": Summary(
            "Estimate a model's layers on a device that is not here.",
            (
                "estimate gpt2-xl --device H100 -o profile.json",
                "estimate ./config.json --device A100 --sequence 4096",
            ),
        ),
        "calibrate": Summary(
            "Measure this device, for better estimates.",
            ("calibrate", "calibrate --device cpu --threads 8"),
        ),
        "plan": Summary(
            "Split a model into pipeline stages for some devices.",
            (
                "plan gpt2-xl --devices 4x24GB -o plan.json",
                "plan profile.json -d 2x8xH100 --batch-size 256",
            ),
        ),
        "explain": Summary(
            "Say what bounds a plan, and what changes would gain.",
            (
                "explain plan.json",
                "explain plan.json profile.json -d cluster.json --json",
            ),
        ),
        "show": Summary(
            "Print or draw a plan, a profile, a cluster or a graph.",
            ("show plan.json --svg plan.svg", "show profile.json --tree"),
        ),
        "diff": Summary(
            "Compare two profiles layer by layer.",
            ("diff before.json after.json", "diff a100.json h100.json --json"),
        ),
        "merge": Summary(
            "Merge several profiles of one model into one.",
            (
                "merge first.json second.json -o merged.json",
                "merge small.json large.json --microbatch 4",
            ),
        ),
        "export": Summary(
            "Write a plan in the form of another runtime.",
            (
                "export plan.json --to megatron",
                "export plan.json --to torch -o torch_pipeline.py",
            ),
        ),
        "import": Summary(
            "Read a cut of another runtime as a plan.",
            (
                "import 17,20,3 --from vllm --model llama-13b -d 3x24GB -o plan.json",
                "import layout.sh --from megatron --model profile.json -d 8xH100",
            ),
        ),
        "check": Summary(
            "Judge a cut in the form of another runtime.",
            (
                "check 17,20,3 --from vllm --model llama-13b -d 3x24GB",
                "check layout.sh --from megatron --model profile.json -d 8xH100 --microbatches 64",
            ),
        ),
    },
    "Run": {
        "verify": Summary(
            "Check that a plan's stages compute what the model does.",
            ("verify plan.json", "verify plan.json my_model:build --sample my_model:sample"),
        ),
        "run": Summary(
            "Train a plan's model on this machine.",
            (
                "run plan.json --compare",
                "run plan.json my_model:build --sample my_model:sample --svg run.svg",
            ),
        ),
        "checkpoint": Summary(
            "Inspect a checkpoint, or convert it to one file.",
            ("checkpoint inspect run/", "checkpoint convert run/ model.safetensors"),
        ),
        "demo": Summary(
            "Measure, plan, serve and train two models in stages.",
            ("demo", "demo --models gpt2 --steps 5"),
        ),
    },
    "Serve": {
        "serve": Summary(
            "Serve planning over HTTP, with pages.",
            ("serve", "serve --port 0 --database team.db"),
        ),
        "worker": Summary(
            "Run a service's measurements on this machine.",
            (
                "worker --scheduler tls://head:8786 --tls-ca-file ca.pem --tls-cert worker.pem",
                "worker --scheduler tls://head:8786 --resources H200=1,cuda=1",
            ),
        ),
        "jobs": Summary(
            "List, watch or cancel a service's jobs.",
            ("jobs list --state running", "jobs watch job_0123456789abcdef"),
        ),
    },
    "Administer": {
        "config": Summary(
            "Show a server's settings and where they come from.",
            ("config", "config --config stagewright.toml"),
        ),
        "keys": Summary(
            "Create, list and revoke API keys.",
            ("keys create laptop --scopes read,plan", "keys list"),
        ),
        "audit": Summary(
            "Read the audit log of a service.", ("audit --limit 20", "audit --project vision")
        ),
        "db": Summary(
            "Check or prune the database of a service.",
            ("db check", "db prune --jobs-days 30"),
        ),
    },
}
"""Every command, in the order of ``stagewright --help``."""

SUMMARIES = {name: found for group in GROUPS.values() for name, found in group.items()}

HELP_ALL = "--help-all"
"""Word that the command line takes like ``--help``, and that leaves nothing out."""

_FLAGS = re.compile(r"--?[A-Za-z][A-Za-z-]*\s")

OTHER = "Options"
MOST_LINES = 48
"""Longest list of options that is printed in full."""


class Overview(TyperGroup):
    """The command without a command: its help lists all of them, in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, found.text) for name, found in group.items()])


class GroupedCommand(TyperCommand):
    """Command whose help has one section per option group; typer needs rich for that."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take words such as '-ts 6,2' as the cut of another runtime: no option has a space."""
        if "--" not in args and any(entry.name == "cut" for entry in self.params):
            cuts = [word for word in args if _FLAGS.match(word)]
            args = [*(word for word in args if word not in cuts), "--", *cuts]
        return list(super().parse_args(ctx, args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, without typer's braces around what is required."""
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def invoke(self, ctx: Any) -> Any:
        """Run the command, whose outputs must be none of its inputs."""
        PARAMETERS.set(ctx.params)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections in the order of the options, those without a group last.

        Of a command with many options, only the first section and the last are explained.
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                name = "Arguments" if parameter.param_type_name == "argument" else panel or OTHER
                groups.setdefault(name, []).append(record)
        names = sorted(groups, key=lambda name: name == OTHER)
        kept = names if self._fits(ctx, formatter, groups) else [*names[:2], OTHER]
        for name in names:
            if name in kept:
                with formatter.section(name):
                    formatter.write_dl(groups[name])
        if rest := [(name, _flags(groups[name])) for name in names if name not in kept]:
            with formatter.section(f"More, explained by {HELP_ALL}"):
                formatter.write_dl(rest)

    def _fits(self, ctx: Any, formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> bool:
        if HELP_ALL in (ctx.find_root().obj or ()):
            return True
        trial = type(formatter)(width=formatter.width)
        for records in groups.values():
            trial.write_dl(records)
        return len(trial.getvalue().splitlines()) <= MOST_LINES

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, each a line that can be copied."""
        with formatter.section("Examples"):
            for example in SUMMARIES[self.name or ""].examples:
                formatter.write(f"  {ctx.find_root().info_name} {example}\n")


def _flags(records: list[tuple[str, str]]) -> str:
    """Return the flags of some options, without what they take."""
    spelled = (record[0].split(" ")[0 if record[0].startswith("--") else 1] for record in records)
    return ", ".join(flag.rstrip(",") for flag in spelled)
