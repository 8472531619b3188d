"""The ``stagewright worker`` process: one machine, or one GPU of it, serving a scheduler."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from distributed import Worker

from ...core.errors import InvalidInput
from ..settings.load import configure
from ..settings.settings import TlsFiles
from ..telemetry.logs import configure_logging
from .dask_workers import check_address, configure_dask, security_of
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

    An unreachable scheduler is waited for; ``on_ready`` is called with name and resources at every
    connection. Resources are detected if none are offered. The worker measures by its own
    ``STAGEWRIGHT_*`` variables, which work as a server's settings do.

    Raises:
        InvalidInput: The address or a setting is invalid.
        Refused: The connection would be unencrypted over a network.
    """
    check_address(scheduler, tls)
    configure_dask()
    read_own_setup()  # reports an invalid variable now and not with the first job
    resources = _check_resources(detect_resources() if offers is None else offers)
    settings = configure().settings
    configure_logging(settings.log_format, settings.log_level)
    new_worker = partial(
        Worker,
        scheduler,
        nthreads=1,
        name=name,
        resources=resources,
        security=security_of(tls, "worker"),
        memory_limit=0,
        dashboard=False,
        death_timeout=30,
    )

    async def serve() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        stopping = asyncio.create_task(stopped.wait())
        try:
            while not stopped.is_set():
                worker = new_worker()
                try:
                    await _serve(worker, lambda name: on_ready(name, resources), stopping)
                except Exception as error:  # noqa: BLE001 - whatever the reason, it is tried again
                    _log.warning("%s does not answer: %s", scheduler, error)
                with suppress(TimeoutError):
                    # Shielded: a timeout cancels what it waits for, and every round waits for it.
                    await asyncio.wait_for(asyncio.shield(stopping), RECONNECT_S)
        finally:
            stopping.cancel()

    asyncio.run(serve())


def _check_resources(offers: Mapping[str, float]) -> dict[str, float]:
    if not offers:
        raise InvalidInput(
            "this worker has no resources: install stagewright[torch], or name them, for example "
            "--resources H200=1"
        )
    return dict(offers)


async def _serve(
    worker: Worker, on_ready: Callable[[str], None], stopping: asyncio.Task[Any]
) -> None:
    """Serve the scheduler until it is gone or ``stopping`` is done."""
    starting = asyncio.ensure_future(worker.start())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        # Raises if the worker did not start.
        starting.result()
        on_ready(str(worker.name))
        gone = asyncio.ensure_future(worker.finished())
        await asyncio.wait([gone, stopping], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
    finally:
        starting.cancel()
        with suppress(Exception):
            await worker.close(timeout=5)
