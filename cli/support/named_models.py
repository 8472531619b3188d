"""Published models named on the command line, and estimates of their costs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...core.errors import Infeasible, InvalidInput, PlanMismatch
from .estimate_cache import list_entries, recall_or_make, store
from .next_steps import command_line, drop_flags
from .progress import working
from .read_documents import read_document, read_json

if TYPE_CHECKING:
    from ...core.cluster.accelerators import Accelerator
    from ...core.cluster.cluster import Cluster
    from ...core.graph.tensors import Sample
    from ...core.models.families import ModelSpec
    from ...core.models.training_memory import Recipe
    from ...core.plan.plan import Plan, PlanOptions
    from ...core.profile.profile import Profile
    from ...core.requests.precision import AskedPrecision
    from ...profiler.estimates.cluster_estimate import ClusterEstimate


MAX_CONFIG_BYTES = 2**20
"""Profiles are larger, and are not read twice."""


def find_model_name(arguments: Sequence[str]) -> str | None:
    """Return the model's name, or its ``config.json``; `None` if all arguments are other files."""
    names = [text for text in arguments if not _is_file(text) or find_config(text) is not None]
    if not names:
        return None
    module, colon, _ = names[0].partition(":")
    if colon or module.endswith(".py"):
        code = names[0] if colon else f"{Path(module).stem}:build"
        raise InvalidInput(
            f"{names[0]} is code of yours; measure it first, then plan the profile: stagewright "
            f"profile {code} --sample {code.partition(':')[0]}:sample -o profile.json"
        )
    if len(arguments) > 1:
        raise InvalidInput(
            f"{names[0]!r} names a model; give either one model or profiles, not both"
        )
    return names[0]


def _is_file(text: str) -> bool:
    # Anything with a path or a file's ending is a file, whether it exists or not.
    path = Path(text)
    return path.suffix in (".json", ".pt2") or "/" in text or path.exists()


def find_config(text: str) -> dict[str, object] | None:
    """Return the Hugging Face configuration in this file, or in ``config.json`` of this folder."""
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InvalidInput(f"the folder {text} has no config.json; give a model's folder")
    try:
        if path.suffix != ".json" or path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever reads it as a profile says what is wrong with it
    if isinstance(found, dict) and "model_type" in found:
        return found
    if path.name == "config.json":
        raise InvalidInput(
            f"{path} has no model_type, so it is no model's; add it, such as "
            '"model_type": "qwen3", or name a profile'
        )
    return None


def is_stored_id(name: str) -> bool:
    """Return True if this is a service's id of a profile or graph, not a model's name."""
    return name.startswith(("profile_", "graph_"))


def is_model_name(name: str | None) -> bool:
    """Return True if a model was named, rather than a file or a service's document."""
    return name is not None and not is_stored_id(name)


@contextmanager
def name_config_file(name: str | None) -> Iterator[None]:
    """Name the ``config.json`` in errors of the model that is built from it inside."""
    try:
        yield
    except InvalidInput as error:
        is_of_model = (error.field or "").startswith("/model")
        if name is None or not is_of_model or find_config(name) is None:
            raise
        raise InvalidInput(f"{name}: {error}", field=error.field) from error


def read_family(family: str, config: str) -> ModelSpec:
    """Return the model of a family with this configuration, in JSON."""
    from ...core.models.families import ModelSpec

    try:
        text = json.dumps({"family": family, "config": json.loads(config)})
    except ValueError as error:
        raise InvalidInput(f"--config is not JSON: {error}") from None
    spec: ModelSpec = read_json(ModelSpec, text, "model")
    return spec


def read_model(
    name: str, config: str | None, microbatch: int, sequence: int | None
) -> tuple[ModelSpec, Sample]:
    """Return a model and a sample of one micro-batch.

    The name is a published model's, a Hugging Face ``config.json`` or its folder, or a family's
    where ``config`` is given.
    """
    from ...core.requests.default_samples import default_sample
    from ...core.requests.model_input import read_model as expand
    from ...core.requests.presets import find_preset

    if microbatch < 1:
        raise InvalidInput(f"--microbatch is {microbatch}; it must be at least 1")
    if sequence is not None and sequence < 1:
        raise InvalidInput(f"--sequence is {sequence}; it must be at least 1")
    if config is None and (published := find_config(name)) is not None:
        try:
            spec = cast("ModelSpec", expand(published))
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}", field=error.field) from None
        return spec, default_sample(spec, microbatch, sequence)
    if config is None and _is_file(name):
        raise InvalidInput(
            f"{name} is not a Hugging Face config, which is a JSON object with a model_type; give "
            "one, its folder or a model's name"
        )
    if config is None:
        found = find_preset(name)
        return found.spec, default_sample(found.spec, microbatch, sequence or found.sequence_length)
    spec = read_family(name, config)
    return spec, default_sample(spec, microbatch, sequence)


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def read_precision(text: str | None) -> AskedPrecision | None:
    """Return the recipe of this name, or the precision of an estimate, such as ``tf32``."""
    from ...core.models.training_memory import RECIPES

    if text is None:
        return None
    name = text.lower()
    if name in RECIPES:
        return cast("AskedPrecision", name)
    if name == "tf32" or name in (*DTYPES, *DTYPES.values()):
        return cast("AskedPrecision", DTYPES.get(name, name))
    raise InvalidInput(
        f"--precision takes {', '.join((*RECIPES, 'tf32', 'fp16'))}, not {text!r}",
        field="/precision",
    )


def read_recipe(text: str | None, *, is_model: bool) -> Recipe | None:
    """Return the recipe that ``--precision`` names; `None` where it only names a type."""
    from ...core.models.training_memory import RECIPES

    asked = read_precision(text)
    if asked in RECIPES:
        return asked
    if asked is not None and not is_model:
        raise InvalidInput(
            f"--precision {text} is for estimates; with a profile it takes {', '.join(RECIPES)}",
            field="/precision",
        )
    return None


def lengthen_dtype(text: str | None) -> str | None:
    """Return torch's name for a dtype's short name; anything else is returned unchanged."""
    return text if text is None else DTYPES.get(text.lower(), text)


@dataclass(frozen=True)
class EstimateFlags:
    """Flags of ``plan`` that say how to estimate a named model; `None` where not given."""

    microbatch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    kind: str | None = None
    calibrate: tuple[Path, ...] = ()
    use_cache: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EstimateFlags:
        """Return the flags among the parameters of a command."""
        return cls(
            given["microbatch"],
            given["sequence"],
            given["precision"],
            given["estimate_for"],
            tuple(given["calibrate"] or ()),
            not given["no_cache"],
        )

    def refuse_for_profiles(self) -> None:
        """Raise `InvalidInput` if a flag was given: a profile has all of this settled."""
        for option, value in (
            ("--microbatch", self.microbatch),
            ("--sequence", self.sequence),
            ("--estimate-for", self.kind),
            ("--calibrate", self.calibrate),
        ):
            if value:
                raise InvalidInput(f"{option} requires a model name; a profile already fixes it")

    def words(self) -> list[str]:
        """Return the flags as given, in words of a command."""
        given: list[tuple[str, object]] = [
            ("--microbatch", self.microbatch),
            ("--sequence", self.sequence),
            ("--precision", self.precision),
            ("--estimate-for", self.kind),
            *(("--calibrate", path) for path in self.calibrate),
        ]
        return [str(word) for pair in given if pair[1] is not None for word in pair]

    def estimate(self, name: str, cluster: Cluster, devices: str) -> ClusterEstimate:
        """Estimate a published model's costs on a cluster's devices, described by ``devices``."""
        from ...core.cluster.accelerators import get_accelerator
        from ...core.profile.profile import Profile

        # Everything cheap is checked before the import below, which takes torch seconds.
        precision = read_precision(self.precision)
        if self.kind is not None:
            get_accelerator(self.kind)
        samples = 1 if self.microbatch is None else self.microbatch
        spec, sample = read_model(name, None, samples, self.sequence)
        measured = [read_document(path, Profile) for path in self.calibrate]

        def make() -> dict[str, Any]:
            text = f"estimating {name}: capturing it without weights"
            with working(text), name_config_file(name):
                from ...profiler.estimates.for_cluster import estimate_for_cluster

                made = estimate_for_cluster(
                    spec,
                    sample,
                    cluster,
                    kind=self.kind,
                    precision=precision,
                    calibrate_by=measured,
                )
            return _to_json(made) | {"words": words}

        words = [name, "-d", devices, *self.words()]
        asked = _asked(spec, sample, precision, measured)
        question = {**asked, "cluster": cluster, "kind": self.kind, "words": words}
        found = _from_json(recall_or_make(question, make, use=self.use_cache))
        if self.use_cache and len(found.taken) == 1:
            # What `stagewright estimate` would make: the next command that is suggested.
            (device,) = found.taken.values()
            threads = found.profile.provenance.num_threads
            store(_of_device(asked, device, threads), found.profile.model_dump(mode="json"))
        return found

    def estimate_at(
        self, name: str, cluster: Cluster, devices: str, sequence: int
    ) -> ClusterEstimate:
        """Estimate the model with samples of another length."""
        return replace(self, sequence=sequence).estimate(name, cluster, devices)

    def estimate_command(self, name: str, estimated: ClusterEstimate) -> str:
        """Return the command that writes the profile this estimate amounts to."""
        words: list[object] = ["--device", next(iter(estimated.taken.values())).name]
        words += drop_flags(self.words(), [], ["--estimate-for"])
        if (threads := estimated.profile.provenance.num_threads) is not None:
            words += ["--threads", threads]
        return command_line("estimate", name, *words, "-o", "profile.json")


@dataclass(frozen=True)
class PlanSource:
    """Profile, cluster and options that a plan was made from.

    Attributes:
        profile: Its costs, as the planner was given them.
        cluster: Its devices.
        words: Arguments of ``stagewright plan`` that name both.
        fixed: Flags of ``plan`` that `words` settle, given or not.
    """

    profile: Profile
    cluster: Cluster
    words: tuple[str, ...]
    fixed: tuple[str, ...] = ()


def recall_source(plan: Plan) -> PlanSource | None:
    """Return what a named model's plan was made from, if its estimate is still in the cache.

    Of clusters that differ in their links alone it is the one by which the plan's figures come out.
    """
    from ...core.profile.forward_only import match_profile
    from ...planner.validation.validate import validate

    first = None
    for entry in list_entries():
        if "words" not in entry:
            continue  # an estimate on one device
        try:
            found = _from_json(entry)
        except (ValueError, KeyError, InvalidInput):
            continue  # written by another version
        profile = match_profile(found.profile, plan.profile_id)
        names = {device.name for device in found.cluster.devices}
        used = {name for stage in plan.stages for name in stage.devices}
        if (
            profile.content_id() == plan.profile_id
            and len(names) == plan.cluster_devices
            and used <= names
        ):
            # The precision also decides what is estimated; the default is not always a recipe's.
            source = PlanSource(
                found.profile, found.cluster, tuple(entry["words"]), ("--precision",)
            )
            first = first or source
            with suppress(PlanMismatch):
                validate(plan, profile, found.cluster)
                return source
    return first


def estimate_on_device(
    spec: ModelSpec,
    sample: Sample,
    device: Accelerator,
    precision: AskedPrecision | None,
    num_threads: int | None,
    measured: Sequence[Profile],
    *,
    use_cache: bool,
) -> Profile:
    """Estimate a model on one device, by its kept calibration if any, or recall the estimate."""
    from ...core.cluster.accelerators import default_precision
    from ...core.profile.profile import Profile
    from ...core.requests.precision import split_precision
    from ...profiler.estimates.calibration_table import read_kept_table

    threads = (num_threads or os.cpu_count() or 1) if device.backend == "cpu" else 1
    table = None
    if not measured:  # profiles that were named go first
        computed = split_precision(precision)[0] or default_precision([device])
        table = read_kept_table(device.name, computed, threads)

    def make() -> dict[str, Any]:
        with working("estimating: capturing the model without weights"):
            from ...profiler.estimates.estimate import estimate_spec

            made = estimate_spec(
                spec,
                sample,
                device=device,
                precision=precision,
                num_threads=num_threads,
                calibrate_by=measured,
                table=table,
            )
        return made.model_dump(mode="json")

    asked = _of_device(_asked(spec, sample, precision, measured), device, num_threads)
    if table is not None:
        asked["table"] = table.content_id()
    return Profile.model_validate(recall_or_make(asked, make, use=use_cache))


def _asked(
    spec: ModelSpec, sample: Sample, precision: AskedPrecision | None, measured: Sequence[Profile]
) -> dict[str, Any]:
    calibrated_by = [profile.content_id() for profile in measured]
    return {"spec": spec, "sample": sample, "precision": precision, "by": calibrated_by}


def _of_device(
    asked: dict[str, Any], device: Accelerator, num_threads: int | None
) -> dict[str, Any]:
    return {**asked, "device": device.name, "threads": num_threads}


def _to_json(estimated: ClusterEstimate) -> dict[str, Any]:
    return {
        "profile": estimated.profile.model_dump(mode="json"),
        "cluster": estimated.cluster.model_dump(mode="json"),
        "taken": {kind: found.name for kind, found in estimated.taken.items()},
        "guessed": {kind: [one.name for one in many] for kind, many in estimated.guessed.items()},
    }


def _from_json(found: dict[str, Any]) -> ClusterEstimate:
    from ...core.cluster.accelerators import get_accelerator
    from ...core.cluster.cluster import Cluster
    from ...core.profile.profile import Profile
    from ...profiler.estimates.cluster_estimate import ClusterEstimate

    return ClusterEstimate(
        Profile.model_validate(found["profile"]),
        Cluster.model_validate(found["cluster"]),
        {kind: get_accelerator(name) for kind, name in found["taken"].items()},
        {kind: tuple(map(get_accelerator, names)) for kind, names in found["guessed"].items()},
    )


def describe_estimate(name: str, estimated: ClusterEstimate, given: EstimateFlags) -> str:
    """Describe the model and device estimated, and the flags not given that change them."""
    first = next(iter(estimated.taken.values()))
    shapes = ", ".join(
        f"{entry.name} {'x'.join(map(str, entry.shape))} {entry.dtype}"
        for entry in estimated.profile.inputs
    )
    left = ["--microbatch"] * (given.microbatch is None)
    left += ["--sequence"] * (given.sequence is None and _tokens(estimated.profile) > 0)
    change = f" (change it with {' or '.join(left)})" if left else ""
    lines = [f"estimated {name} on {first.full_name}; micro-batch: {shapes}{change}"]
    for kind, candidates in estimated.guessed.items():
        others = ", ".join(entry.name for entry in candidates[1:])
        lines.append(
            f"assuming that {kind} means {candidates[0].name}"
            + (f" (other candidates: {others})" if others else "")
            + "; choose with --estimate-for, or name the device in --devices"
        )
    return "\n".join(lines)


TRIAL_S = 1.0
"""Time to find out whether any plan fits samples of one length."""


def suggest_shorter_samples(
    error: Infeasible,
    profile: Profile,
    options: PlanOptions,
    estimate: Callable[[int], ClusterEstimate],
    cluster: Cluster,
) -> Infeasible:
    """Return the error with the longest halved ``--sequence`` that fits, if there is one.

    Lengths are tried in proportion first; the one named was estimated and found to fit.
    """
    from fractions import Fraction

    from ...core.profile.scale import scale_lengths
    from ...planner.plan import Planner

    tokens = _tokens(profile) if error.constraint == "memory" else 0

    def may_fit(sequence: int) -> bool:
        shorter = scale_lengths(profile, Fraction(sequence, tokens))
        return Planner(shorter).may_plan(cluster, options, within_s=TRIAL_S)

    if tokens < 2 or not may_fit(1):
        return error
    for sequence in filter(may_fit, filter(None, (tokens >> halvings for halvings in range(1, 8)))):
        found = estimate(sequence)
        if Planner(found.profile).may_plan(found.cluster, options, within_s=TRIAL_S):
            offered = str(error).removeprefix(f"{error.summary}; ")
            words = f"{offered}, or" if error.remedies else "it would fit with"
            return error.with_advice(f"{words} --sequence {sequence}", error.remedies)
    return error


def _tokens(profile: Profile) -> int:
    """Return the tokens per sample; 0 if samples are not token ids."""
    first = profile.inputs[0] if profile.inputs else None
    has_tokens = first is not None and first.dtype == "int64" and len(first.shape) == 2
    return first.shape[1] if first is not None and has_tokens else 0
