"""A worker of a fleet: one machine, or one GPU of it, that runs a scheduler's jobs in turn."""

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

AGAIN_S = 5.0
"""Until a scheduler that is gone is tried again."""

_log = logging.getLogger(__name__)


def work(
    scheduler: str,
    *,
    tls: TlsFiles | None = None,
    offers: Mapping[str, float] | None = None,
    name: str | None = None,
    on_ready: Callable[[str, Mapping[str, float]], None] = lambda name, offers: None,
) -> None:
    """Run jobs until SIGINT or SIGTERM, which stops the one at hand; others have to run it then.

    It waits for a scheduler that is not there yet, or no longer. How it measures is said by the
    ``STAGEWRIGHT_*`` variables of its own, as a server's settings are.

    Args:
        scheduler: Its address.
        tls: Certificates for it.
        offers: What the worker has; found out if not given.
        name: What jobs call it; its address if not given.
        on_ready: Called with name and offers whenever a scheduler has taken the worker.

    Raises:
        InvalidInput: The address cannot be one, a setting does not fit, or Dask is not installed.
        Refused: It would be spoken to in the clear over a network.
    """
    check_address(scheduler, tls)
    configure_dask()
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"{MISSING} ({error})") from None
    read_own_setup()  # a variable that does not fit is said now, not with the first job
    has = dict(detect_resources() if offers is None else offers)
    if not has:
        raise InvalidInput(
            "this worker would offer nothing: install stagewright[torch], or say what it has, "
            "such as --resources H200=1"
        )
    settings = configure().settings
    configure_logging(settings.log_format, settings.log_level)
    asyncio.run(_work(scheduler, tls, has, name, on_ready))


async def _work(
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
            await _until_gone(scheduler, tls, offers, name, on_ready, stopping)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(stopping), AGAIN_S)
    finally:
        stopping.cancel()


async def _until_gone(
    scheduler: str,
    tls: TlsFiles | None,
    offers: dict[str, float],
    name: str | None,
    on_ready: Callable[[str, Mapping[str, float]], None],
    stopping: asyncio.Task[Any],
) -> None:
    """Be a worker until the scheduler is gone, or somebody stops it."""
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
        starting.result()
        on_ready(str(worker.name), offers)
        gone = asyncio.ensure_future(worker.finished())
        await asyncio.wait([gone, stopping], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
    except Exception as error:  # noqa: BLE001 - whatever keeps it away, it is tried again
        _log.warning("%s does not answer: %s", scheduler, error)
    finally:
        starting.cancel()
        with suppress(Exception):
            await worker.close(timeout=5)
