"""How a model that is named instead of profiled is to be estimated, in the words of ``plan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import Infeasible, InvalidInput
from ..support.next_steps import command_line
from ..support.read_documents import read_document
from .model import named_model, read_precision

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.profile.profile import Profile
    from ...profiler.estimates.for_cluster import ClusterEstimate


@dataclass(frozen=True)
class EstimateWords:
    """What was said of the estimate; `None` where nothing was.

    Attributes:
        microbatch: Samples in a micro-batch.
        sequence: Tokens of a sample.
        precision: Its short name or torch's.
        kind: The catalogue's device.
        calibrate: Files of measured profiles.
    """

    microbatch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    kind: str | None = None
    calibrate: tuple[Path, ...] = ()

    def refuse_for_files(self) -> None:
        """Insist that nothing was said: profiles have it settled.

        Raises:
            InvalidInput: Something was.
        """
        for option, value in (
            ("--microbatch", self.microbatch),
            ("--sequence", self.sequence),
            ("--precision", self.precision),
            ("--estimate-for", self.kind),
            ("--calibrate", self.calibrate),
        ):
            if value:
                raise InvalidInput(
                    f"{option} is for a model's name; a profile was measured with its own"
                )

    def estimate(self, name: str, cluster: Cluster) -> ClusterEstimate:
        """A published model's costs on a cluster's devices.

        Raises:
            InvalidInput: A name, a number or a file does not fit.
        """
        from ...core.cluster.accelerators import get_accelerator
        from ...core.profile.profile import Profile

        wanted = read_precision(self.precision)
        if self.kind is not None:
            get_accelerator(self.kind)
        samples = 1 if self.microbatch is None else self.microbatch
        spec, sample = named_model(name, None, samples, self.sequence)
        measured = [read_document(path, Profile) for path in self.calibrate]
        from ...profiler.estimates.for_cluster import estimate_for_cluster

        return estimate_for_cluster(
            spec, sample, cluster, kind=self.kind, precision=wanted, calibrate_by=measured
        )

    def command_line(self, name: str, estimated: ClusterEstimate) -> str:
        """The command that writes the profile a named model was planned from."""
        threads = estimated.profile.provenance.num_threads
        words: list[object] = ["--device", next(iter(estimated.taken.values())).name]
        for option, value in (
            ("--microbatch", self.microbatch),
            ("--sequence", self.sequence),
            ("--precision", self.precision),
            ("--threads", threads),
            *(("--calibrate", path) for path in self.calibrate),
        ):
            if value is not None:
                words += [option, value]
        return command_line("estimate", name, *words, "-o", "profile.json")


def what_was_taken(name: str, estimated: ClusterEstimate) -> str:
    """What was estimated and for which device, and how to choose another."""
    first = next(iter(estimated.taken.values()))
    shapes = ", ".join(
        f"{entry.name} {'x'.join(map(str, entry.shape))} {entry.dtype}"
        for entry in estimated.profile.inputs
    )
    sizes = "--microbatch and --sequence" if _tokens(estimated.profile) else "--microbatch"
    lines = [
        f"estimated {name} for {first.full_name}; one micro-batch is {shapes} ({sizes} change it)"
    ]
    for kind, found in estimated.guessed.items():
        others = ", ".join(entry.name for entry in found[1:])
        lines.append(
            f"{kind} was taken for {found[0].name}"
            + (f"; it may also be {others}" if others else "")
            + ": choose with --estimate-for, or name the devices"
        )
    return "\n".join(lines)


def with_shorter_samples(error: Infeasible, profile: Profile) -> Infeasible:
    """The same error, naming the flags that make the samples of a named model smaller."""
    shape = profile.inputs[0].shape if profile.inputs else ()
    smaller = []
    if shape and shape[0] > 1:
        smaller.append(f"--microbatch below {shape[0]}")
    tokens = _tokens(profile)
    if tokens > 1:
        smaller.append(f"--sequence below {tokens}")
    if error.constraint != "memory" or not smaller:
        return error
    return Infeasible(
        f"{error}; smaller micro-batches need less memory, too: {' or '.join(smaller)}",
        constraint=error.constraint,
        required=error.required,
        available=error.available,
        ways_out=error.ways_out,
    )


def _tokens(profile: Profile) -> int:
    """Tokens of a sample; 0 where samples are no tokens."""
    first = profile.inputs[0] if profile.inputs else None
    has_tokens = first is not None and first.dtype == "int64" and len(first.shape) == 2
    return first.shape[1] if first is not None and has_tokens else 0
