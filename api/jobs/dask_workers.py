"""Dask: schedulers, embedded with one worker or remote, and the worker backend behind either.

Dask is imported when the first job needs it: a fifth of the time that a server takes to start.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ...core.errors import InvalidInput, Refused
from ..errors import WorkersUnavailable
from ..settings.settings import LOOPBACK_NAMES, TlsFiles
from ..telemetry.logs import LogFormat
from .measurements import run_measurement
from .messages import (
    TaskOutcome,
    TaskReport,
    WorkerLost,
    WorkerMessage,
    WorkerStarted,
    WorkerTask,
    as_event,
    from_event,
)
from .worker_resources import INVITATION, detect_resources

MISSING = "jobs need Dask; run: pip install -e '.[cluster]' (in the checkout)"

DASK_SETTINGS = {
    # This server restarts and counts jobs whose worker died; the scheduler must not.
    "distributed.scheduler.allowed-failures": 0,
    # Every process on this machine could query Dask's web servers, so they have no routes.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "logging": {"distributed": "warning", "distributed.scheduler": "critical"},
}

CONNECT_TIMEOUT = "10s"

_log = logging.getLogger(__name__)


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
        try:
            configure_dask()
            from distributed import Client, LocalCluster, Security

            from .worker_log import WorkerLog

            security = Security.temporary()
        except ImportError as error:  # Dask or cryptography is missing
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
        try:
            configure_dask()
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
    from distributed import Security

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
    import dask

    dask.config.set(DASK_SETTINGS)


class DaskWorkers:
    """A `WorkerBackend` behind a Dask scheduler, connected when first needed.

    Workers' messages travel as events of a topic that belongs to this server; the outcome is the
    result of the Dask task. Workers never see the database.
    """

    def __init__(self, scheduler: EmbeddedScheduler | RemoteScheduler) -> None:
        self._scheduler = scheduler
        self._topic = f"stagewright-{secrets.token_hex(8)}"
        self._lock = threading.Lock()  # guards the connection; callbacks do not take it
        self._closed = False
        self._client: Any = None
        self._futures: dict[str, Any] = {}
        self._callbacks: dict[str, Callable[[WorkerMessage], None]] = {}

    def submit(self, task: WorkerTask, on_message: Callable[[WorkerMessage], None]) -> None:
        client = self._connected()
        self._callbacks[task.key] = on_message  # first: a message may arrive before the future
        try:
            future = client.submit(
                run_task,
                task,
                self._topic,
                key=task.key,
                resources={task.needs: 1},
                # Dask gives equal pure calls one result.
                pure=False,
                retries=0,
            )
        except Exception as error:
            self._callbacks.pop(task.key, None)
            raise WorkersUnavailable(f"{self._scheduler.name} took no task: {error}") from error
        self._futures[task.key] = future
        future.add_done_callback(self._on_done)

    def stop(self, key: str) -> None:
        self._callbacks.pop(key, None)
        future = self._futures.pop(key, None)
        if future is not None:
            with suppress(Exception):  # a scheduler that is gone runs nothing
                future.cancel(force=True)

    def offers(self) -> Mapping[str, int]:
        client = self._connected()
        try:
            workers = client.scheduler_info(n_workers=-1)["workers"].values()
        except Exception as error:
            raise WorkersUnavailable(f"{self._scheduler.name} does not answer: {error}") from error
        return Counter(kind for worker in workers for kind in worker.get("resources", {}))

    def invitation(self, needs: str) -> str:
        return self._scheduler.invitation.format(needs=needs)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for key in list(self._futures):
                self.stop(key)
            self._disconnect()

    def _connected(self) -> Any:
        """Return the client, reconnected if the scheduler was lost. Raises: WorkersUnavailable."""
        with self._lock:
            if self._closed:
                raise WorkersUnavailable("the server is stopping")
            if self._client is not None and self._client.status == "running":
                return self._client
            self._disconnect()
            self._client = self._scheduler.connect(CONNECT_TIMEOUT)
            self._client.subscribe_topic(self._topic, self._on_event)
            return self._client

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                client.close(timeout=2)
        self._scheduler.close()
        for key in list(self._futures):
            self._futures.pop(key, None)
            self._end(key, WorkerLost(f"{self._scheduler.name} is gone"))

    def _on_event(self, event: tuple[float, Any]) -> None:
        """Pass a worker's message on; called on the client's own thread."""
        payload = event[1]
        try:
            on_message = self._callbacks.get(payload["key"])
            if on_message is not None:
                on_message(from_event(payload))
        except (KeyError, ValueError, TypeError):
            _log.warning("cannot read a worker's message: %.200r", payload)

    def _on_done(self, future: Any) -> None:
        """Pass the end of a task on; called on one of the client's threads."""
        key = future.key
        # Stopped, or ended by a disconnect, which has reported it.
        if self._futures.pop(key, None) is None:
            return
        if future.status == "finished":
            try:
                outcome = future.result(timeout=60)
            except Exception as error:  # noqa: BLE001 - whatever happens on the way back
                self._end(key, WorkerLost(f"its result did not arrive: {type(error).__name__}"))
                return
            assert isinstance(outcome, TaskOutcome)
            self._end(key, outcome)
        elif future.status == "error":
            raised = future.exception()
            _log.warning("job task %s failed on its worker: %r", key, raised)
            self._end(key, WorkerLost(f"its worker was lost: {type(raised).__name__}"))
        else:
            self._end(key, WorkerLost(f"its task was {future.status} by {self._scheduler.name}"))

    def _end(self, key: str, outcome: TaskOutcome) -> None:
        on_message = self._callbacks.pop(key, None)
        if on_message is not None:
            on_message(outcome)


RUNNING_TASK = ("executing", "long-running")
"""States of a task on its worker in which its result is still wanted."""

CLOSING_WORKER = ("closing", "closed", "failed", "closing_gracefully")


def run_task(task: WorkerTask, topic: str) -> TaskOutcome:
    """Run a task on a Dask worker, publishing its messages under a topic.

    Dask cannot interrupt a running task. But when the task is cancelled, or the server that
    submitted it is gone, the scheduler makes the worker forget it; polling for that ends the child.
    """
    from distributed import get_worker

    worker: Any = get_worker()

    def on_message(message: TaskReport) -> None:
        worker.log_event(topic, {"key": task.key, **as_event(message)})

    def is_stopped() -> bool:
        known = worker.state.tasks.get(task.key)
        is_wanted = known is not None and known.state in RUNNING_TASK
        return not is_wanted or worker.status.name in CLOSING_WORKER

    on_message(WorkerStarted(str(worker.name)))
    return run_measurement(task, on_message, is_stopped)
