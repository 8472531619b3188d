"""``stagewright worker``: run a service's measurements on this machine's devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from typer import Option

from ..support.output import JsonFlag, emit, say

VARIABLE = "STAGEWRIGHT_SCHEDULER"


def command(
    scheduler: Annotated[
        str, Option(envvar=VARIABLE, help="Address of the scheduler, tls://HOST:8786.")
    ],
    resources: Annotated[
        str | None,
        Option(
            help="Resources this worker offers, such as H200=1,cuda=1.",
            show_default="cpu, and the GPUs torch finds",
        ),
    ] = None,
    name: Annotated[
        str | None, Option(help="Name of this worker in job records.", show_default="its address")
    ] = None,
    tls_ca_file: Annotated[
        str | None,
        Option(envvar=f"{VARIABLE}_TLS_CA_FILE", help="Certificate authority of the cluster."),
    ] = None,
    tls_cert: Annotated[
        str | None, Option(envvar=f"{VARIABLE}_TLS_CERT", help="This worker's certificate.")
    ] = None,
    tls_key: Annotated[
        str | None,
        Option(
            envvar=f"{VARIABLE}_TLS_KEY", help="The certificate's private key, if in another file."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a service's measurements, one at a time, until interrupted.

    Start one worker per GPU, each with its own CUDA_VISIBLE_DEVICES. The scheduler is
    'dask scheduler' with TLS certificates; see docs/service/jobs.md for the commands.
    """
    from ...api.jobs.worker_process import run_worker
    from ...api.jobs.worker_resources import parse_resources
    from ...api.settings.settings import TlsFiles
    from ...core.errors import InvalidInput

    if (tls_ca_file is None) != (tls_cert is None):
        raise InvalidInput("--tls-ca-file and --tls-cert must be given together")
    tls = None
    if tls_ca_file is not None and tls_cert is not None:
        tls = TlsFiles(ca_file=tls_ca_file, cert=tls_cert, key=tls_key)

    def on_ready(name: str, offers: Mapping[str, float]) -> None:
        if as_json:
            emit(json.dumps({"worker": name, "offers": dict(offers)}))
        listed = ", ".join(f"{kind}={number:g}" for kind, number in offers.items())
        say(f"worker {name} connected to {scheduler}, offering {listed}")

    offers = None if resources is None else parse_resources(resources)
    run_worker(scheduler, tls=tls, offers=offers, name=name, on_ready=on_ready)
