"""Cuts of other runtimes read for a model or profile, for ``import`` and ``check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import InvalidInput
from ..support.named_models import EstimateFlags, describe_estimate, find_model_name
from ..support.output import say
from ..support.read_documents import read_document

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
        "--from",
        metavar="TARGET",
        help="The runtime whose form it is: torch, torchtitan, megatron, deepspeed, accelerate, "
        "vllm, sglang, tensorrt-llm, colossalai, maxtext, llama.cpp, torchgpipe or pipedream.",
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
Microbatches = Annotated[int, Option(min=1, help="Micro-batches per step.")]
Schedule = Annotated[str, Option(help="Order of work, where the form does not say it.")]
MicrobatchSize = Annotated[int | None, Option(min=1, help="Samples in a micro-batch. Default: 1.")]
Sequence = Annotated[
    int | None, Option(min=1, help="Tokens per sample. Default: the model's published length.")
]


def read_profile(
    model: str,
    cluster: Cluster,
    *,
    microbatch: int | None,
    sequence: int | None,
    quiet: bool,
) -> tuple[Profile, Cluster]:
    """Read a profile, or estimate a model by name; return it with the cluster to price it on."""
    from ...core.profile.profile import Profile

    flags = EstimateFlags(microbatch=microbatch, sequence=sequence)
    name = find_model_name([model])
    if name is None:
        flags.refuse_for_profiles()
        return read_document(Path(model), Profile), cluster
    estimated = flags.estimate(name, cluster)
    say(describe_estimate(name, estimated), quiet=quiet)
    return estimated.profile, estimated.cluster


def read_cut(text: str, source: str, profile: Profile) -> tuple[ImportedCut, Profile]:
    """Read a cut for a profile; the profile is of forward passes for an inference runtime.

    Raises:
        InvalidInput: The text is not in the runtime's form.
    """
    from ...core.profile.forward_only import for_inference
    from ...formats.runtimes.registry import find_target, import_cut

    if find_target(source).rules.inference:
        profile = for_inference(profile)
    names = tuple(entry.layer.name for entry in profile.layers)
    path = Path(text)
    try:
        content = path.read_text() if len(text) < 1000 and path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from None
    return import_cut(content, source, names), profile


def build_cut_options(schedule: str, microbatches: int) -> PlanOptions:
    """Return the options to price a cut with; its own form replaces what it says."""
    from ...core.plan.plan import PlanOptions
    from ..support.read_documents import build_record

    return build_record(PlanOptions, schedule=schedule, num_microbatches=microbatches)
