"""Dask schedulers: embedded in the server with one worker, or remote."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import dask
from distributed import Client, LocalCluster, Security, WorkerPlugin

from ...core.errors import InvalidInput, Refused
from ..errors import WorkersUnavailable
from ..settings.settings import LOOPBACK_NAMES, TlsFiles
from ..telemetry.logs import LogFormat, configure_logging
from .worker_resources import INVITATION, detect_resources

MISSING = "jobs need Dask; run: pip install 'stagewright[cluster]'"

DASK_SETTINGS = {
    # This server restarts and counts jobs whose worker died; the scheduler must not.
    "distributed.scheduler.allowed-failures": 0,
    # Every process on this machine could query Dask's web servers, so they have no routes.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "logging": {"distributed": "warning", "distributed.scheduler": "critical"},
}


class EmbeddedScheduler:
    """A scheduler in this process with one worker in a child process, on the loopback interface.

    A scheduler runs code for anyone who can connect, so both ends authenticate with certificates
    generated for this run. The worker's log is configured as the server's.
    """

    name = "the embedded scheduler"
    invitation = INVITATION

    def __init__(self, log_format: LogFormat = "auto", log_level: str = "info") -> None:
        self._log: tuple[LogFormat, str] = (log_format, log_level)
        self._cluster: Any = None

    def connect(self, timeout: str) -> Any:
        """Start the scheduler and return a Dask client. Raises: WorkersUnavailable."""
        configure_dask()
        try:
            security = Security.temporary()
        except ImportError as error:  # cryptography is missing
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
                memory_limit=0,  # measuring children are limited one by one
                resources=detect_resources(),
                silence_logs=logging.WARNING,
            )
            client = Client(self._cluster, timeout=timeout, set_as_default=False)
            client.register_plugin(WorkerLog(*self._log))
            return client
        except Exception as error:
            self.close()
            raise WorkersUnavailable(f"{self.name} did not start: {error}") from error

    def close(self) -> None:
        """Stop scheduler and worker."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            with suppress(Exception):
                cluster.close(timeout=5)


class RemoteScheduler:
    """A scheduler at an address; see `check_address` for what is refused."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        check_address(address, tls)
        self.name = address
        self.invitation = f"stagewright worker --scheduler {address} --resources {{needs}}=1"
        self._tls = tls

    def connect(self, timeout: str) -> Any:
        """Return a new Dask client. Raises: WorkersUnavailable."""
        configure_dask()
        try:
            return Client(
                self.name,
                timeout=timeout,
                security=security_of(self._tls, "client"),
                set_as_default=False,
            )
        except Exception as error:
            raise WorkersUnavailable(f"{self.name} does not answer: {error}") from error

    def close(self) -> None:
        """Do nothing: other servers use the scheduler."""


def check_address(address: str, tls: TlsFiles | None) -> None:
    """Check that an address is a scheduler's and safe to connect to.

    Raises:
        InvalidInput: The address is invalid, or the certificates are missing.
        Refused: The connection would be unencrypted over a network.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("tls", "tcp") or not host or port is None:
        raise InvalidInput(
            f"{address!r} is not a scheduler's address; use one like tls://10.0.0.5:8786"
        )
    if parts.scheme == "tls" and tls is None:
        raise InvalidInput(
            f"{address} needs certificates signed by the scheduler's authority: pass --tls-ca-file,"
            " --tls-cert and --tls-key to a worker, or set STAGEWRIGHT_SCHEDULER_TLS_CA_FILE, "
            "STAGEWRIGHT_SCHEDULER_TLS_CERT and STAGEWRIGHT_SCHEDULER_TLS_KEY for a server"
        )
    if parts.scheme == "tcp" and host not in LOOPBACK_NAMES:
        raise Refused(
            f"{address} is unencrypted, and anyone who reaches a scheduler can run code on its "
            "workers; start it with certificates and use tls://"
        )


def security_of(tls: TlsFiles | None, role: str) -> Any:
    """Return the certificates as Dask's `Security` for a ``client`` or a ``worker``."""
    if tls is None:
        return Security()
    return Security(
        require_encryption=True,
        tls_ca_file=tls.ca_file,
        # One PEM file may hold both certificate and key.
        **{f"tls_{role}_cert": tls.cert, f"tls_{role}_key": tls.key or tls.cert},
    )


def configure_dask() -> None:
    """Set Dask's configuration, which its worker processes inherit."""
    dask.config.set(DASK_SETTINGS)


class WorkerLog(WorkerPlugin):
    """Plugin that configures the log of every worker process, restarted ones included."""

    name = "stagewright-log"

    def __init__(self, format: LogFormat, level: str) -> None:
        self._format: LogFormat = format
        self._level = level

    def setup(self, worker: Any) -> None:
        configure_logging(self._format, self._level)
