"""The ``stagewright worker`` process: one machine, or one GPU of it, serving a scheduler."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ...core.errors import InvalidInput
from ..settings.load import configure
from ..settings.settings import TlsFiles
from ..telemetry.logs import configure_logging
from .dask_scheduler import MISSING, check_address, configure_dask, security_of
from .measurements import read_own_setup
from .worker_resources import detect_resources

RECONNECT_S = 5.0
"""Pause before an unreachable scheduler is tried again."""

_log = logging.getLogger(__name__)


def run_worker(
    scheduler: str,
    *,
    tls: TlsFiles | None = None,
    offers: Mapping[str, float] | None = None,
    name: str | None = None,
    on_ready: Callable[[str, Mapping[str, float]], None] = lambda name, offers: None,
) -> None:
    """Run jobs until SIGINT or SIGTERM, which hands the current job to other workers.

    An unreachable scheduler is waited for. The worker measures by its own ``STAGEWRIGHT_*``
    variables, which work as a server's settings do.

    Args:
        scheduler: Address of the scheduler.
        tls: Certificates for the connection.
        offers: Resources of the worker; detected by default.
        name: The worker's name in job documents; by default its address.
        on_ready: Called with name and resources at every connection.

    Raises:
        InvalidInput: The address or a setting is invalid, or Dask is not installed.
        Refused: The connection would be unencrypted over a network.
    """
    check_address(scheduler, tls)
    configure_dask()
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"{MISSING} ({error})") from None
    read_own_setup()  # reports an invalid variable now and not with the first job
    resources = dict(detect_resources() if offers is None else offers)
    if not resources:
        raise InvalidInput(
            "this worker has no resources: install stagewright[torch], or name them, for example "
            "--resources H200=1"
        )
    settings = configure().settings
    configure_logging(settings.log_format, settings.log_level)
    asyncio.run(_serve(scheduler, tls, resources, name, on_ready))


async def _serve(
    scheduler: str,
    tls: TlsFiles | None,
    offers: dict[str, float],
    name: str | None,
    on_ready: Callable[[str, Mapping[str, float]], None],
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    try:
        while not stopped.is_set():
            await _serve_scheduler(scheduler, tls, offers, name, on_ready, stopping)
            with suppress(TimeoutError):
                # Shielded: a timeout cancels what it waits for, and every round waits for this.
                await asyncio.wait_for(asyncio.shield(stopping), RECONNECT_S)
    finally:
        stopping.cancel()


async def _serve_scheduler(
    scheduler: str,
    tls: TlsFiles | None,
    offers: dict[str, float],
    name: str | None,
    on_ready: Callable[[str, Mapping[str, float]], None],
    stopping: asyncio.Task[Any],
) -> None:
    """Serve the scheduler until it is gone or ``stopping`` is done."""
    from distributed import Worker

    worker = Worker(
        scheduler,
        nthreads=1,
        name=name,
        resources=offers,
        security=security_of(tls, "worker"),
        memory_limit=0,
        dashboard=False,
        death_timeout=30,
    )
    starting = asyncio.ensure_future(worker.start())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        # Raises if the worker did not start.
        starting.result()
        on_ready(str(worker.name), offers)
        gone = asyncio.ensure_future(worker.finished())
        await asyncio.wait([gone, stopping], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
    except Exception as error:  # noqa: BLE001 - whatever the reason, the scheduler is tried again
        _log.warning("%s does not answer: %s", scheduler, error)
    finally:
        starting.cancel()
        with suppress(Exception):
            await worker.close(timeout=5)
