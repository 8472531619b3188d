"""What may be asked of the service."""

from __future__ import annotations

from math import prod
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from ..core.cluster import Cluster
from ..core.document import Record
from ..core.errors import InvalidInput
from ..core.families import ModelSpec
from ..core.options import MeasureRequest, ProfilingOptions
from ..core.plan import PlanOptions
from ..core.profile import Profile
from ..core.sample import MAX_SAMPLE_BYTES, Sample
from ..core.tensors import ELEMENT_SIZE_BYTES
from ..core.units import format_bytes

MAX_SHORTHAND_DEVICES = 65_536
"""A few bytes of request must not become much work; a body of 16 MiB holds about as many devices
as a document. 200 layers over so many devices were planned in 3 s of processor time."""


def _parse_shorthand(value: object) -> object:
    if not isinstance(value, str):
        return value
    return Cluster.parse(value, max_devices=MAX_SHORTHAND_DEVICES)


ClusterInput = Annotated[
    Cluster, BeforeValidator(_parse_shorthand, json_schema_input_type=Cluster | str)
]
"""A cluster document, or its shorthand such as ``4x24GB``, ``8xH200`` or ``2x80GB,4x24GB``."""


CHOICES = "'profile', 'profiles', 'profile_id' and 'model'"


class PlanRequest(Record):
    """Plan a model from its profile, or measure the model first.

    Attributes:
        profile: Costs of the model's layers; nothing is run.
        profiles: Several of one model, measured at several sizes of micro-batches, where the
            options name a ``batch_size``: the size is chosen too.
        profile_id: A profile the service has stored.
        model: A family and its configuration, to be built and measured by the service.
        sample: The inputs of one micro-batch to measure the model with.
        profiling: How to measure it.
        cluster: The devices: a document, or shorthand such as ``4x24GB``, ``2xcpu``, ``8xH200``,
            ``4x8x80GB`` (4 nodes of 8) or ``2x80GB,4x24GB`` (two kinds).
        options: What to plan for.
        deadline_s: Longest to search: then the best plan so far is the answer, or a problem with
            status 504 if there is none. The server's own limit if not given.
    """

    profile: Profile | None = None
    profiles: tuple[Profile, ...] | None = Field(None, min_length=1, max_length=12)
    profile_id: str | None = Field(None, max_length=80)
    model: ModelSpec | None = None
    sample: Sample | None = None
    profiling: ProfilingOptions | None = None
    cluster: ClusterInput
    options: PlanOptions = PlanOptions()
    deadline_s: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        sources = ("profile", "profiles", "profile_id", "model")
        given = [name for name in sources if getattr(self, name) is not None]
        if not given:
            raise InvalidInput(
                f"give exactly one of {CHOICES}; found none",
                field="/profile",
            )
        if len(given) > 1:
            raise InvalidInput(
                f"give exactly one of {CHOICES}; found {' and '.join(map(repr, given))}",
                field=f"/{given[-1]}",
            )
        if self.model is None:
            self._refuse_without_model()
        elif self.sample is None:
            raise InvalidInput("a model is measured with a sample; give one", field="/sample")
        else:
            check_sample_size(self.sample)
        return self

    def _refuse_without_model(self) -> None:
        for name in ("sample", "profiling"):
            if getattr(self, name) is not None:
                raise InvalidInput(
                    f"{name!r} says how to measure a 'model', and none is given", field=f"/{name}"
                )

    def measure_request(self) -> MeasureRequest | None:
        """What has to be measured before planning, if anything."""
        if self.model is None or self.sample is None:
            return None
        profiling = self.profiling or ProfilingOptions()
        return MeasureRequest(model=self.model, sample=self.sample, profiling=profiling)


def check_sample_size(sample: Sample) -> None:
    """Refuse a sample whose tensors together are larger than the service makes up.

    Raises:
        InvalidInput: It has more than `MAX_SAMPLE_BYTES`.
    """
    tensors = [*sample.inputs.values(), *([sample.target] if sample.target else [])]
    size_bytes = sum(prod(tensor.shape) * ELEMENT_SIZE_BYTES[tensor.dtype] for tensor in tensors)
    if size_bytes > MAX_SAMPLE_BYTES:
        raise InvalidInput(
            f"the sample has {format_bytes(size_bytes)}, at most {format_bytes(MAX_SAMPLE_BYTES)} "
            "are accepted; make the micro-batch smaller",
            field="/sample",
        )
