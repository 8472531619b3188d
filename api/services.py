"""The services behind the routes, built from the settings."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import InvalidInput
from .auth.authenticate import Authenticator
from .auth.middleware import AuditWriter
from .auth.sessions import Sessions
from .jobs.async_workers import AsyncWorkers, EstimatingWorkers
from .jobs.attempt import JobContext
from .jobs.notifications import JobNotifications
from .jobs.runner import JobRunner
from .jobs.service import JobOptions, JobService
from .jobs.worker_resources import measuring_place
from .jobs.workers import WorkerBackend, build_workers, is_local, local_setup
from .middleware.graceful_shutdown import GracefulShutdown
from .model_sources.estimator import Estimator
from .model_sources.factories import Factories, read_factories
from .page.plan_views import Views
from .planning.decision import decide
from .planning.service import Planning
from .planning.solver_pool import Solver
from .routes.operations import ReadinessCheck, watch
from .sandbox.bubblewrap import find_sandbox
from .settings.settings import ServerSettings
from .store.records import Retention
from .store.store import Store
from .telemetry.metrics import Metrics


@dataclass(frozen=True)
class Services:
    """Everything that routes and middleware use, by its name on ``app.state``."""

    settings: ServerSettings
    store: Store
    metrics: Metrics
    shutdown: GracefulShutdown
    readiness: ReadinessCheck
    solver: Solver
    planning: Planning
    runner: JobRunner
    jobs: JobService
    factories: Factories
    authenticator: Authenticator
    audit: AuditWriter
    sessions: Sessions
    views: Views

    async def start(self) -> None:
        """Begin to run jobs, with processes ready for the first searches."""
        self.solver.warm_up(decide)
        await self.runner.start()

    async def stop(self) -> None:
        """Hand jobs back, end the solver's processes, and close the store last."""
        await self.runner.stop()
        self.solver.close()
        self.store.close()


def build_services(
    settings: ServerSettings,
    store: Store | None = None,
    workers: WorkerBackend | None = None,
    shutdown: GracefulShutdown | None = None,
) -> Services:
    """Build the services; see `app.create_app` for the arguments and errors."""
    # First all that may refuse the settings, before the database is opened.
    factories = read_factories(settings.factories_file)
    if is_local(settings.scheduler) and settings.sandbox == "required":
        find_sandbox()
    if store is None:
        store = Store(settings.database, max_project_bytes=settings.project_stored_bytes)
    workers = build_workers(settings) if workers is None else workers
    shutdown = GracefulShutdown() if shutdown is None else shutdown
    metrics = Metrics()
    solver = Solver(settings.plan_processes, metrics.worked)
    watch(metrics, store, solver, shutdown)
    planning = build_planning(settings, store, solver, workers, factories)
    notifications = JobNotifications()
    # Streams of events and requests that wait for jobs end when shutdown begins to refuse work.
    shutdown.on_refusing(notifications.stop)
    runner = build_runner(settings, store, workers, planning, notifications, metrics)
    sessions = Sessions(settings.session_key, settings.oidc)
    options = JobOptions(
        measuring_place(settings.scheduler),
        is_local(settings.scheduler),
        settings.job_deadline_s,
        key_jobs=settings.key_unfinished_jobs,
        project_jobs=settings.project_unfinished_jobs,
    )
    return Services(
        settings=settings,
        store=store,
        metrics=metrics,
        shutdown=shutdown,
        readiness=ReadinessCheck(store, solver, shutdown),
        solver=solver,
        planning=planning,
        runner=runner,
        jobs=JobService(store, planning, runner, notifications, options),
        factories=factories,
        authenticator=build_authenticator(settings, store, sessions),
        audit=AuditWriter(store),
        sessions=sessions,
        views=Views(planning, store),
    )


def build_planning(
    settings: ServerSettings,
    store: Store,
    solver: Solver,
    workers: WorkerBackend,
    factories: Factories,
) -> Planning:
    """Build the planning service; without local workers, estimates are theirs as well."""
    local = is_local(settings.scheduler)
    estimator = Estimator(
        settings.estimate_command,
        memory_bytes=settings.child_memory_bytes,
        sandbox=settings.sandbox,
        elsewhere=None if local else EstimatingWorkers(workers),
    )
    return Planning(
        store,
        estimator,
        solver,
        deadline_s=settings.plan_deadline_s,
        factories=factories,
        builds_here=local,
    )


def build_runner(
    settings: ServerSettings,
    store: Store,
    workers: WorkerBackend,
    planning: Planning,
    notifications: JobNotifications,
    metrics: Metrics,
) -> JobRunner:
    """Build the runner of jobs."""
    context = JobContext(
        store,
        AsyncWorkers(workers),
        planning,
        notifications,
        setup=local_setup(settings),
        max_attempts=settings.job_attempts,
        silence_s=settings.job_silence_s,
        metrics=metrics,
    )
    retention = Retention(
        jobs_days=settings.keep_jobs_days,
        audit_days=settings.keep_audit_days,
        keys_days=settings.keep_keys_days,
    )
    return JobRunner(context, retention)


def build_authenticator(
    settings: ServerSettings, store: Store, sessions: Sessions
) -> Authenticator:
    """Build the authenticator, with the identity provider's tokens if there is a provider."""
    if settings.oidc is None:
        return Authenticator(settings.token, store, None, sessions=sessions)
    try:
        from .auth.oidc import OidcTokens, SigningKeys  # needs pyjwt, an extra
    except ModuleNotFoundError:
        raise InvalidInput(
            "Tokens of an identity provider need pyjwt. "
            "Run: pip install -e '.[oidc]' (in the checkout)"
        ) from None
    tokens = OidcTokens(settings.oidc, store, SigningKeys(settings.oidc.jwks_url))
    return Authenticator(settings.token, store, tokens, sessions=sessions)
