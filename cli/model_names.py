"""Models named on the command line instead of a profile: what to estimate of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import InvalidInput
from .documents import read_devices, read_document

if TYPE_CHECKING:
    from ..core.accelerators import Precision
    from ..core.cluster import Cluster
    from ..core.families import ModelSpec
    from ..core.sample import Sample
    from ..profiler.estimates.cluster import ClusterEstimate

PRECISIONS: dict[str, Precision] = {
    "fp32": "float32",
    "tf32": "tf32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def model_named(arguments: Sequence[str]) -> str | None:
    """The model, if that is what was named; `None` for files.

    Raises:
        InvalidInput: Several names, or a name that is neither a file nor a model.
    """
    names = [text for text in arguments if not _is_file(text)]
    if not names:
        return None
    if len(arguments) > 1:
        raise InvalidInput(
            f"{names[0]!r} is no file; give either one model's name or profile files"
        )
    return names[0]


def _is_file(text: str) -> bool:
    return Path(text).suffix == ".json" or "/" in text or Path(text).exists()


def named_model(
    name: str, config: str | None, microbatch: int, sequence: int | None
) -> tuple[ModelSpec, Sample]:
    """A model and one micro-batch of it.

    Args:
        name: Of a published model, or of a family.
        config: The family's configuration as JSON; its defaults if not given.
        microbatch: Samples in a micro-batch.
        sequence: Tokens of a sample; those of the publication if not given.

    Raises:
        InvalidInput: There is no such model, or a number does not fit it.
    """
    from ..core.default_samples import default_sample
    from ..core.families import ModelSpec
    from ..core.presets import preset
    from .checked import checked_json

    if microbatch < 1:
        raise InvalidInput(f"--microbatch is {microbatch}; a micro-batch has at least one sample")
    if sequence is not None and sequence < 1:
        raise InvalidInput(f"--sequence is {sequence}; a sample has at least one token")
    if config is None:
        found = preset(name)
        spec, length = found.spec, found.sequence_length
    else:
        try:
            text = json.dumps({"family": name, "config": json.loads(config)})
        except ValueError as error:
            raise InvalidInput(f"--config is not JSON: {error}") from None
        spec, length = checked_json(ModelSpec, text, "model"), None
    return spec, default_sample(spec, microbatch, sequence or length)


def read_precision(text: str | None) -> Precision | None:
    """The precision by its short name.

    Raises:
        InvalidInput: There is none of that name.
    """
    if text is None:
        return None
    if text not in PRECISIONS:
        raise InvalidInput(
            f"--precision takes {', '.join(PRECISIONS)}, not {text!r}", field="/precision"
        )
    return PRECISIONS[text]


def devices_named(text: str) -> Cluster:
    """A cluster from a file or from shorthand, which may name devices of the catalogue.

    Raises:
        InvalidInput: Neither a readable cluster file nor shorthand.
    """
    from ..core.named_devices import parse_devices

    if not text.strip() or Path(text).suffix == ".json" or Path(text).exists():
        return read_devices(text)
    return parse_devices(text)


def refuse_for_files(given: Mapping[str, object]) -> None:
    """Insist that none of these options was given with a profile, which has them settled.

    Raises:
        InvalidInput: One was.
    """
    for option, value in given.items():
        if value:
            raise InvalidInput(
                f"{option} is for a model's name; a profile was measured with its own"
            )


def estimated_model(
    name: str,
    cluster: Cluster,
    microbatch: int | None,
    sequence: int | None,
    precision: str | None,
    kind: str | None,
    calibrate: Sequence[Path],
) -> ClusterEstimate:
    """A published model's costs on a cluster's devices.

    Raises:
        InvalidInput: A name, a number or a file does not fit.
    """
    from ..core.accelerators import accelerator
    from ..core.profile import Profile

    wanted = read_precision(precision)
    if kind is not None:
        accelerator(kind)
    spec, sample = named_model(name, None, 1 if microbatch is None else microbatch, sequence)
    measured = [read_document(path, Profile) for path in calibrate]
    from ..profiler.estimates.cluster import estimate_for_cluster

    return estimate_for_cluster(
        spec, sample, cluster, kind=kind, precision=wanted, calibrate_by=measured
    )


def what_was_taken(name: str, estimated: ClusterEstimate) -> str:
    """What was estimated and for which device, and how to choose another."""
    first = next(iter(estimated.taken.values()))
    shapes = ", ".join(
        f"{entry.name} {'x'.join(map(str, entry.shape))} {entry.dtype}"
        for entry in estimated.profile.inputs
    )
    lines = [f"estimated {name} for {first.full_name}; one micro-batch is {shapes}"]
    for kind, found in estimated.guessed.items():
        others = ", ".join(entry.name for entry in found[1:])
        lines.append(
            f"{kind} was taken for {found[0].name}"
            + (f"; it may also be {others}" if others else "")
            + ": choose with --estimate-for, or name the devices"
        )
    return "\n".join(lines)


def words_of_estimate(
    name: str,
    estimated: ClusterEstimate,
    microbatch: int | None,
    sequence: int | None,
    precision: str | None,
    calibrate: Sequence[Path],
) -> str:
    """The command that writes the profile a named model was planned from."""
    words = ["stagewright", "estimate", name, "--device", next(iter(estimated.taken.values())).name]
    for option, value in (
        ("--microbatch", microbatch),
        ("--sequence", sequence),
        ("--precision", precision),
    ):
        if value is not None:
            words += [option, str(value)]
    if estimated.profile.provenance.num_threads is not None:
        words += ["--threads", str(estimated.profile.provenance.num_threads)]
    for path in calibrate:
        words += ["--calibrate", str(path)]
    return shlex.join([*words, "-o", "profile.json"])
