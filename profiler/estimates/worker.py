"""Estimate one model in a process of its own: a request in, a profile and a cluster out.

Reads a `core.options.EstimateRequest` from standard input and writes an `Estimated` to standard
output. Nothing of the model has values: its operations are applied to tensors without memory. On
failure the last line of standard error is JSON as `profiler.child` writes it.
"""

from __future__ import annotations

import json
import sys

from pydantic import ValidationError

from ...core.document import to_invalid_input
from ...core.errors import InvalidInput, StagewrightError
from ...core.requests.default_samples import default_sample
from ...core.requests.requests import Estimated, EstimateRequest

FIELDS = {
    "/devices": "/cluster",
    "/device": "/estimate/device",
    "/precision": "/estimate/precision",
}
"""Where a request has what the library calls by another name."""


def main() -> int:
    """Return 0 with the answer on standard output, or 1 with an error on standard error."""
    try:
        answer = estimate(read_request(sys.stdin.read()))
    except StagewrightError as error:
        field = error.field if isinstance(error, InvalidInput) else None
        told: dict[str, object] = {"error": type(error).__name__, "message": str(error)}
        sys.stderr.write(json.dumps(told if field is None else {**told, "field": field}) + "\n")
        return 1
    sys.stdout.write(answer.model_dump_json())
    return 0


def read_request(text: str) -> EstimateRequest:
    """Parse the request read from standard input."""
    try:
        return EstimateRequest.model_validate_json(text)
    except ValidationError as error:
        raise to_invalid_input(error, "estimate request") from None


def estimate(request: EstimateRequest) -> Estimated:
    """Estimate what a request describes."""
    from .for_cluster import estimate_for_cluster, estimate_graph_for_cluster

    kind, precision = request.estimate.device, request.estimate.precision
    try:
        if request.graph is not None:
            found = estimate_graph_for_cluster(
                request.graph, request.cluster, kind=kind, precision=precision
            )
        else:
            assert request.model is not None, "a request checks that"
            sample = request.sample or default_sample(request.model)
            found = estimate_for_cluster(
                request.model, sample, request.cluster, kind=kind, precision=precision
            )
    except InvalidInput as error:
        inside = f"/graph{error.field or ''}" if request.graph is not None else error.field
        raise InvalidInput(str(error), field=FIELDS.get(error.field or "", inside)) from error
    return Estimated(
        profile=found.profile,
        cluster=found.cluster,
        taken={kind: entry.name for kind, entry in found.taken.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
