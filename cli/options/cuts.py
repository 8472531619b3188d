"""Cuts of other runtimes read for a model or profile, for ``import`` and ``check``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ...formats.target_tables import TARGET_NAMES
from ..support.named_models import (
    EstimateFlags,
    describe_estimate,
    find_model_name,
    read_recipe,
)
from ..support.output import say
from ..support.read_documents import build_record, read_devices, read_document

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.plan.plan import PlanOptions
    from ...core.profile.profile import Profile
    from ...formats.target import ImportedCut

CutText = Annotated[
    str,
    Argument(metavar="CUT", help="A file in the runtime's form, or the text itself: 17,20,3"),
]
Source = Annotated[
    str,
    Option(
        "--from", metavar="TARGET", help=f"The runtime whose form it is: {', '.join(TARGET_NAMES)}."
    ),
]
Model = Annotated[
    str,
    Option(
        metavar="PROFILE|MODEL",
        help="The model's profile, or a name or config.json whose costs are then estimated.",
    ),
]
Devices = Annotated[
    str, Option("--devices", "-d", help="Devices it runs on: 4x24GB, 8xH100, or a cluster file.")
]
Microbatches = Annotated[
    int, Option("--microbatches", "-m", min=1, help="Micro-batches per step, unless the form says.")
]
Schedule = Annotated[str, Option(help="Order of work, unless the form says it.")]
Recompute = Annotated[
    str,
    Option(help="never, auto or always: whether stages recompute, unless the form says."),
]
Deadline = Annotated[float | None, Option(min=0.0, help="Time limit in seconds for the best plan.")]


@dataclass(frozen=True)
class CutQuestion:
    """A cut with the costs, devices and options to price it with."""

    cut: ImportedCut
    profile: Profile
    cluster: Cluster
    options: PlanOptions

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> CutQuestion:
        """Read what the parameters of a command name, or estimate the model.

        Raises:
            InvalidInput: The text is not in the runtime's form, or a file cannot be read.
        """
        from ...core.plan.plan import PlanOptions
        from ...formats.runtimes.registry import find_target, import_cut, read_text

        target = find_target(given["source"])
        text, cluster = read_text(given["cut"]), read_devices(given["devices"])
        profile, cluster = _read_profile(given, cluster)
        is_model = find_model_name([given["model"]]) is not None
        options = build_record(
            PlanOptions,
            schedule=given["schedule"],
            num_microbatches=given["microbatches"],
            optimizer=given["optimizer"],
            recompute=given["recompute"],
            precision=read_recipe(given["precision"], is_model=is_model),
            memory_fraction=given["memory_fraction"],
        )
        return cls(import_cut(text, target.name, profile), profile, cluster, options)


def _read_profile(given: Mapping[str, Any], cluster: Cluster) -> tuple[Profile, Cluster]:
    from ...core.profile.profile import Profile

    estimate, model = EstimateFlags.of(given), given["model"]
    name = find_model_name([model])
    if name is None:
        estimate.refuse_for_profiles()
        return read_document(Path(model), Profile), cluster
    estimated = estimate.estimate(name, cluster, given["devices"])
    say(describe_estimate(name, estimated, estimate), quiet=given["as_json"])
    return estimated.profile, estimated.cluster
