"""Dask schedulers: one embedded in the server, with a worker; or one that somebody else runs."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from distributed import WorkerPlugin

from ...core.errors import InvalidInput, Refused
from ..errors import WorkersUnavailable
from ..settings.settings import LOOPBACK_NAMES, TlsFiles
from ..telemetry.logs import LogFormat, configure_logging
from .worker_resources import detect_resources

MISSING = "jobs need Dask; run: pip install 'stagewright[cluster]'"


class Scheduler(Protocol):
    """Gives tasks to workers."""

    @property
    def name(self) -> str:
        """For messages."""

    def connect(self, timeout: str) -> Any:
        """A new Dask client; starts the scheduler if it is ours. Raises: WorkersUnavailable."""

    def invitation(self, needs: str) -> str:
        """See `workers.Workers.invitation`."""

    def close(self) -> None:
        """End what `connect` started."""


class EmbeddedScheduler:
    """A scheduler in this process and a worker in one below it, on loopback.

    Whoever reaches a scheduler may run code; so the two show each other certificates made up
    for this one run.

    Args:
        log_format: How the worker logs; see `telemetry.logs.configure_logging`.
        log_level: Likewise.
    """

    name = "the embedded scheduler"

    def __init__(self, log_format: LogFormat = "auto", log_level: str = "info") -> None:
        self._log: tuple[LogFormat, str] = (log_format, log_level)
        self._cluster: Any = None

    def connect(self, timeout: str) -> Any:
        configure_dask()
        try:
            from distributed import Client, LocalCluster, Security

            pass  # SELFIMPORT

            security = Security.temporary()
        except ImportError as error:
            raise WorkersUnavailable(f"{MISSING} ({error})") from None
        try:
            self._cluster = LocalCluster(
                n_workers=1,
                threads_per_worker=1,
                processes=True,
                host="127.0.0.1",
                protocol="tls://",
                security=security,
                scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
                memory_limit=0,
                resources=detect_resources(),
                silence_logs=logging.WARNING,
            )
            client = Client(self._cluster, timeout=timeout, set_as_default=False)
            client.register_plugin(WorkerLog(*self._log))
            return client
        except Exception as error:
            self.close()
            raise WorkersUnavailable(f"{self.name} did not start: {error}") from error

    def invitation(self, needs: str) -> str:
        return (
            "start the server with --scheduler tls://HOST:8786, and where there is one: "
            f"stagewright worker --scheduler tls://HOST:8786 --resources {needs}=1"
        )

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            with suppress(Exception):
                cluster.close(timeout=5)


class RemoteScheduler:
    """A scheduler at an address.

    Args:
        address: ``tls://host:port``; ``tcp://`` on loopback alone.
        tls: For the former.

    Raises:
        InvalidInput: The address cannot be one, or the certificates are missing.
        Refused: It would be spoken to in the clear over a network.
    """

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        check_address(address, tls)
        self.name = address
        self._tls = tls

    def connect(self, timeout: str) -> Any:
        configure_dask()
        try:
            from distributed import Client
        except ImportError as error:
            raise WorkersUnavailable(f"{MISSING} ({error})") from None
        try:
            return Client(
                self.name,
                timeout=timeout,
                security=security_of(self._tls, "client"),
                set_as_default=False,
            )
        except Exception as error:
            raise WorkersUnavailable(f"{self.name} does not answer: {error}") from error

    def invitation(self, needs: str) -> str:
        return f"stagewright worker --scheduler {self.name} --resources {needs}=1"

    def close(self) -> None:
        """Others use it; it stays."""


def check_address(address: str, tls: TlsFiles | None) -> None:
    """Refuse what is no scheduler's address, and what would expose one.

    Raises:
        InvalidInput, Refused: See `RemoteScheduler`.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("tls", "tcp") or not host or port is None:
        raise InvalidInput(
            f"{address!r} is no scheduler's address; give one such as tls://10.0.0.5:8786"
        )
    if parts.scheme == "tls" and tls is None:
        raise InvalidInput(
            f"{address} needs certificates, of the authority that signed the scheduler's: a worker "
            "takes them by --tls-ca-file, --tls-cert and --tls-key, a server by "
            "STAGEWRIGHT_SCHEDULER_TLS_CA_FILE, STAGEWRIGHT_SCHEDULER_TLS_CERT and "
            "STAGEWRIGHT_SCHEDULER_TLS_KEY"
        )
    if parts.scheme == "tcp" and host not in LOOPBACK_NAMES:
        raise Refused(
            f"{address} is spoken to in the clear, and whoever reaches a scheduler runs code on "
            "every worker; start it with certificates and use tls://"
        )


def security_of(tls: TlsFiles | None, role: str) -> Any:
    """Dask's own form of the certificates, for a ``client`` or a ``worker``."""
    from distributed import Security

    if tls is None:
        return Security()
    return Security(
        require_encryption=True,
        tls_ca_file=tls.ca_file,
        **{f"tls_{role}_cert": tls.cert, f"tls_{role}_key": tls.key or tls.cert},
    )


def configure_dask() -> None:
    """What has to be set before Dask is imported, and goes to its worker processes too."""
    with suppress(ImportError):
        import dask

        dask.config.set(QUIET)


QUIET = {
    # A job whose worker dies is started again by us, who count; never by the scheduler.
    "distributed.scheduler.allowed-failures": 0,
    # Its web servers, which anyone on this machine could ask, have nothing to say.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "logging": {"distributed": "warning", "distributed.scheduler": "critical"},
}
"""Settings of Dask."""


class WorkerLog(WorkerPlugin):
    """Sets up the log of every worker that is started, also in another's place.

    Args:
        format: See `telemetry.logs.configure_logging`.
        level: Likewise.
    """

    name = "stagewright-log"

    def __init__(self, format: LogFormat, level: str) -> None:
        self._format: LogFormat = format
        self._level = level

    def setup(self, worker: Any) -> None:
        configure_logging(self._format, self._level)
