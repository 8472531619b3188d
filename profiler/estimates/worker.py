"""Estimate one model in a process of its own: an `EstimateRequest` in, an `Estimated` out.

Nothing of the model has values: its operations are applied to tensors without memory.
`worker_protocol` says how it is asked and answers.
"""

from __future__ import annotations

import sys

from ...core.errors import InvalidInput
from ...core.requests.default_samples import default_sample
from ...core.requests.requests import Estimated, EstimateRequest
from ..worker_protocol import serve

FIELDS = {
    "/devices": "/cluster",
    "/device": "/estimate/device",
    "/precision": "/estimate/precision",
}
"""Where a request has what the library calls by another name."""


def main() -> int:
    """Estimate the request on standard input; return the exit code."""
    return serve(
        EstimateRequest, "estimate request", lambda asked: estimate(asked).model_dump_json()
    )


def estimate(request: EstimateRequest) -> Estimated:
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
