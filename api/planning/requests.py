"""Planning requests: validation, limits, and the digests under which results are cached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ... import __version__
from ...core.cluster.cluster import Cluster
from ...core.document import Record, json_digest
from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ...core.graph.tensors import ELEMENT_SIZE_BYTES, MAX_SAMPLE_BYTES, Sample
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile
from ...core.profile.scale import get_microbatch_size
from ...core.requests.model_input import ModelInput, expand_model
from ...core.requests.requests import (
    EstimateOptions,
    EstimateRequest,
    FactoryCall,
    MeasureRequest,
    ProfilingOptions,
)
from ...core.units import format_bytes
from ...planner.choose_options import CHUNKS, list_counts
from ...planner.microbatch_size import sizes_to_try
from ...planner.plan import is_count_given
from ...schedules.numba_jit import is_available
from ..model_sources.graph_limits import check_graph, check_rebuilt

MAX_SHORTHAND_DEVICES = 16_384
"""A short request must not cause much work or storage: every device is stored with the plan, in
this many about 1 MiB."""

MAX_SHORTHAND = 1000
"""Characters of a shorthand."""

MAX_KINDS = 4
"""Kinds of devices, by name, memory or speed. Stages of any kind may follow those of any other:
with 200 layers and a deadline of 20 s, 3 kinds of 16 devices took 12 s of processor time, 4 of 16
took 30 s, and 8 of 8 had not ended after 45 s."""

SEARCHED = ("1f1b", "gpipe")
"""Schedules with a closed form for the step time; only the best plans are simulated."""

MAX_SIMULATION = 2**22
"""Stages times micro-batches. The simulator stops comparing plans at the deadline but always
completes one: with 64 stages of 65,536 micro-batches, that and the search took 7 s of processor
time and 0.7 GB."""

MAX_SIMULATION_PLAIN = 2**18
"""Limit without numba: 64 stages of 4,096 micro-batches kept a deadline of 20 s, four times as
many exceeded it by 16 s."""

MAX_ORDERED = 2**18
"""Limit for other schedules, whose order of actions is generated once per stage: 64 stages of
4,096 micro-batches kept the deadline, sixteen times as many exceeded it by over 35 s."""

MAX_ORDERED_PLAIN = 2**14
"""Limit for those without numba: 64 stages of 256 micro-batches took 26 s, of 4,096 over 55 s."""

SOURCES = ("profile", "profiles", "profile_id", "model", "graph", "graph_id", "factory")

PACKAGES = ("torch", "transformers", "numpy")
"""Packages whose versions change profiles and plans."""


def _parse_shorthand(value: object) -> object:
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SHORTHAND:
        raise InvalidInput(
            f"the shorthand has {len(value)} characters, and at most {MAX_SHORTHAND} are accepted; "
            "send the cluster as a document"
        )
    return Cluster.parse(value, max_devices=MAX_SHORTHAND_DEVICES)


Shorthand = Annotated[str, Field(max_length=MAX_SHORTHAND)]
ClusterInput = Annotated[
    Cluster, BeforeValidator(_parse_shorthand, json_schema_input_type=Cluster | Shorthand)
]
"""A cluster document, or its shorthand such as ``4x24GB``, ``8xH200`` or ``2x80GB,4x24GB``."""


class PlanRequest(Record):
    """Request to plan a model from its profile, or to estimate or measure the model first.

    Attributes:
        profile: Costs of the model's layers; nothing is run.
        profiles: Profiles of one model at several micro-batch sizes, with a ``batch_size`` among
            the options: the plan chooses the size, too.
        profile_id: A profile stored in this service.
        model: A family and its configuration, the name of a published model such as ``gpt2-xl``,
            or a Hugging Face ``config.json``; estimated unless there is ``profiling``.
        graph: A captured model, as ``stagewright capture`` writes it: operations and shapes,
            without weights or code. It is estimated, or with ``profiling`` measured with random
            weights.
        graph_id: A graph stored in this service.
        factory: A model that the server registers by name; it is measured.
        sample: The inputs of one micro-batch; a ``model`` has a default.
        estimate: How to estimate costs from the device catalogue: the default for all but a
            ``factory``.
        profiling: Measure the model, in this way.
        cluster: The devices: a document, or shorthand such as ``4x24GB``, ``2xcpu``, ``8xH200``,
            ``4x8x80GB`` (4 nodes of 8) or ``2x80GB,4x24GB`` (two kinds).
        options: What to plan for.
        deadline_s: Limit of the estimate and the search; then the best plan so far is the response,
            or a problem with status 422 if there is none. The server's own limits if not given.
    """

    profile: Profile | None = None
    profiles: tuple[Profile, ...] | None = Field(None, min_length=1, max_length=12)
    profile_id: str | None = Field(None, max_length=80)
    model: ModelInput | None = None
    graph: Graph | None = None
    graph_id: str | None = Field(None, max_length=80)
    factory: FactoryCall | None = None
    sample: Sample | None = None
    estimate: EstimateOptions | None = None
    profiling: ProfilingOptions | None = None
    cluster: ClusterInput
    options: PlanOptions = PlanOptions()
    deadline_s: float | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return expand_model(data)

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            *others, factory = map(repr, SOURCES)
            raise InvalidInput(
                f"give exactly one of {', '.join(others)}, or where the server accepts it "
                f"{factory}; found {' and '.join(map(repr, given)) or 'none'}",
                field=f"/{given[-1]}" if given else None,
            )
        self._check_costs(given[0])
        check_model(self.sample, self.graph)
        return self

    def _check_costs(self, source: str) -> None:
        """Refuse fields about estimating or measuring that do not go with the source."""
        accepted = {
            "model": {"sample", "estimate", "profiling"},
            "graph": {"estimate", "profiling"},
            "factory": {"sample", "profiling"},
        }.get(source.removesuffix("_id"), set())
        for name in ("sample", "profiling", "estimate"):
            if getattr(self, name) is None or name in accepted:
                continue
            if source.startswith("graph"):
                why = f"{name!r} goes with a 'model': a graph has its own sample"
            elif source == "factory":
                why = f"the model of a {source!r} is measured, not estimated; remove {name!r}"
            else:
                why = f"{name!r} goes with a 'model', which is not given"
            raise InvalidInput(why, field=f"/{name}")
        if self.estimate is not None and self.profiling is not None:
            raise InvalidInput("a model is estimated or measured, not both", field="/profiling")
        if source == "factory" and self.sample is None:
            raise InvalidInput("a factory's model is measured with a sample", field="/sample")

    @property
    def is_measured(self) -> bool:
        """Return True if something has to be measured before planning."""
        return self.profiling is not None or self.factory is not None

    def measure_request(self, graph: Graph | None = None) -> MeasureRequest | None:
        """Return the measurement to be made before planning; `None` if there is none.

        ``graph`` is the one that ``graph_id`` names.
        """
        if not self.is_measured:
            return None
        return MeasureRequest(
            model=self.model,
            sample=self.sample,
            graph=self.graph or graph,
            factory=self.factory,
            profiling=self.profiling or ProfilingOptions(),
        )


def check_model(sample: Sample | None, graph: Graph | None) -> None:
    """Refuse a sample too large to be made up, and a graph too large or not to be rebuilt.

    Raises: InvalidInput.
    """
    if sample is not None:
        tensors = [*sample.inputs.values(), *([sample.target] if sample.target else [])]
        size_bytes = sum(
            prod(tensor.shape) * ELEMENT_SIZE_BYTES[tensor.dtype] for tensor in tensors
        )
        if size_bytes > MAX_SAMPLE_BYTES:
            raise InvalidInput(
                f"the sample has {format_bytes(size_bytes)}, and at most "
                f"{format_bytes(MAX_SAMPLE_BYTES)} are accepted; make the micro-batch smaller",
                field="/sample",
            )
    if graph is not None:
        try:
            check_graph(graph)
            check_rebuilt(graph)
        except InvalidInput as error:
            raise InvalidInput(str(error), field=f"/graph{error.field or ''}") from None


def check_effort(profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions) -> None:
    """Admission control: refuse a request that would run beyond its deadline.

    Searches check their deadline, so layers and devices need no limits: 2,000 layers over 64
    devices, or over 4,096, took 9 s of processor time. The limits here are on what was measured to
    go on after the deadline. The library itself has none of them.

    Raises:
        InvalidInput: It is too large; the message names the number to reduce.
    """
    kinds = {(device.kind, device.memory_bytes, device.speed) for device in cluster.devices}
    if len(kinds) > MAX_KINDS:
        raise InvalidInput(
            f"{len(kinds)} kinds of devices (by name, memory and speed) exceed this server's limit "
            f"of {MAX_KINDS}; use fewer, or plan with the library",
            field="/cluster",
        )
    num_microbatches = options.num_microbatches
    if "num_microbatches" in options.auto:
        num_microbatches = max(list_counts(len(cluster.devices)))
    is_size_asked = is_count_given(options)
    if options.batch_size is not None and not is_size_asked:  # every size is tried
        sizes = sizes_to_try(options.batch_size, tuple(map(get_microbatch_size, profiles)))
        num_microbatches = options.batch_size // min(sizes)
    num_stages = _most_stages(profiles[0], cluster, options, num_microbatches)
    limit, way_out = _limit(options)
    if num_stages * num_microbatches > limit:
        raise InvalidInput(
            f"{num_microbatches} micro-batches over up to {num_stages} stages exceed this server's "
            f"limit; use at most {limit // num_stages} micro-batches, or fewer stages by "
            f"'max_stages'{way_out}",
            field="/options/num_microbatches"
            if options.batch_size is None
            else "/options/batch_size",
        )


def _most_stages(
    profile: Profile, cluster: Cluster, options: PlanOptions, num_microbatches: int
) -> int:
    """Return an upper bound of the number of stages."""
    num_layers = len(profile.layers)
    chunks = max(CHUNKS) if "chunks" in options.auto else options.chunks
    places = len(cluster.devices) * (1 if _is_searched(options) else chunks)
    most = [num_layers, places, options.num_stages or num_layers, options.max_stages or num_layers]
    if options.schedule == "1f1b" and "schedule" not in options.auto:
        most.append(num_microbatches)
    return min(most)


def _is_searched(options: PlanOptions) -> bool:
    return options.schedule in SEARCHED and "schedule" not in options.auto


def _limit(options: PlanOptions) -> tuple[int, str]:
    """Return the limit on stages times micro-batches, and a way out to suggest."""
    is_searched, is_compiled = _is_searched(options), is_available()
    way_out = "" if is_searched else ", or the 1f1b schedule"
    if not is_compiled:
        way_out += "; with numba installed (stagewright[fast]) the limit is higher"
    if is_searched:
        return MAX_SIMULATION if is_compiled else MAX_SIMULATION_PLAIN, way_out
    return MAX_ORDERED if is_compiled else MAX_ORDERED_PLAIN, way_out


def digest_plan_request(request: PlanRequest, deadline_s: float) -> str:
    """Return the digest of a planning request with this much time to search."""
    asked = request.model_dump(mode="json", exclude={"deadline_s", "profile", "graph"})
    if not request.is_measured:
        asked["estimate"] = (request.estimate or EstimateOptions()).model_dump(mode="json")
    for name in ("profile", "graph"):
        asked[name] = None
        document = getattr(request, name)
        if document is not None:  # the digest of a stored document's id, so that both are found
            asked[f"{name}_id"] = document.content_id()
    # Without compiled kernels the same deadline allows less of the search.
    return _digest({"plan": asked, "deadline_s": deadline_s, "compiled": is_available()})


def digest_estimate(request: EstimateRequest) -> str:
    """Return the digest of an estimate for one kind of device; their number does not matter."""
    first = request.cluster.devices[0]
    asked: dict[str, Any] = {
        **request.model_dump(mode="json", exclude={"cluster", "graph"}),
        "graph": None if request.graph is None else request.graph.content_id(),
        "kind": first.kind,
        "memory_bytes": first.memory_bytes,
    }
    return _digest({"estimate": asked})


def digest_measurement(request: MeasureRequest, needs: str, place: str) -> str:
    """Return the digest of a measurement on one kind of device at one place (see `jobs`)."""
    asked = request.model_dump(mode="json", exclude={"graph"})
    if request.graph is not None:
        asked["graph"] = request.graph.content_id()
    return _digest({"measure": asked, "needs": needs, "place": place})


def _digest(asked: dict[str, Any]) -> str:
    versions = {"stagewright": __version__, **{name: _version(name) for name in PACKAGES}}
    return json_digest({**asked, "versions": versions})


@cache  # looking a version up takes longer than the rest of a digest
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
