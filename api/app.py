"""The application: settings in, ASGI out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from fastapi import Depends, FastAPI
from starlette.middleware import Middleware

from .. import __version__
from ..core.errors import InvalidInput
from .auth.audit import AuditWriter
from .auth.authenticate import Authenticator, TokenReader
from .auth.jwks import SigningKeys
from .auth.middleware import AuthMiddleware
from .auth.sessions import Sessions
from .http.allowed_methods import documented_paths
from .http.problems import install_problems
from .http.query_parameters import refuse_unknown_parameters
from .http.threads import FOR_DATABASE
from .jobs.attempt import RetryPolicy
from .jobs.backends import build_workers, is_local, local_setup
from .jobs.estimates import EstimatingWorkers
from .jobs.notifications import JobNotifications
from .jobs.runner import JobRunner
from .jobs.service import JobOptions, JobService
from .jobs.worker_resources import measuring_place
from .jobs.workers import WorkerBackend
from .middleware.access_log import AccessLog
from .middleware.allowed_hosts import HostCheck
from .middleware.body_limit import BodyLimit
from .middleware.compression import Compression
from .middleware.concurrency_limit import ConcurrencyLimit
from .middleware.graceful_shutdown import DrainGate, GracefulShutdown
from .middleware.request_framing import FramingCheck
from .middleware.same_origin import OriginCheck
from .model_sources.custom_code import ForeignModels
from .model_sources.estimator import Estimator
from .model_sources.measure import prove
from .model_sources.pt2_upload import ProgramReader
from .openapi import describe
from .page import routes_pages, routes_sign_in, routes_views
from .page.plan_views import Views
from .page.security_headers import Pages
from .page.templates import error_page, load
from .planning.service import Planning
from .planning.solver_pool import Solver
from .routes import audit as route_audit
from .routes import catalogue, graphs, health, keys, plans, profiles, what_if
from .routes import jobs as route_jobs
from .routes import metrics as route_metrics
from .settings.settings import ServerSettings
from .store.records import Retention
from .store.store import Store
from .telemetry.metrics import Metrics
from .telemetry.tracing import fastapi_options

ROUTERS = (
    health.router,
    route_metrics.router,
    route_audit.router,
    keys.router,
    plans.router,
    route_jobs.router,
    profiles.router,
    graphs.router,
    what_if.router,
    catalogue.router,
    routes_views.router,
    routes_sign_in.router,
    routes_pages.router,
)
"""In the order of the OpenAPI document; everything a handler needs is on ``app.state``."""


def create_app(
    settings: ServerSettings,
    *,
    store: Store | None = None,
    workers: WorkerBackend | None = None,
    shutdown: GracefulShutdown | None = None,
) -> FastAPI:
    """The service as an ASGI application; torch is not imported.

    Args:
        settings: How it behaves.
        store: Where it keeps things, instead of ``settings.database``. The application closes it
            when it shuts down.
        workers: What runs jobs, instead of those the settings say.
        shutdown: How far the server is on its way out; told by whoever hears signals.

    Raises:
        InvalidInput, StoreUnavailable: The database, or a file of settings, cannot be used.
        Refused: A sandbox is asked for that this machine does not have.
    """
    foreign = ForeignModels.from_settings(settings)
    if is_local(settings.scheduler):
        prove(settings)
    kept = Store(settings.database) if store is None else store
    metrics = Metrics()
    shutdown = GracefulShutdown() if shutdown is None else shutdown
    solver = Solver(settings.plan_processes, metrics.worked)
    route_metrics.watch(metrics, kept, solver, shutdown)
    chosen = build_workers(settings) if workers is None else workers
    planning = Planning(
        kept,
        Estimator(
            settings.estimate_command,
            memory_bytes=settings.child_memory_bytes,
            sandbox=settings.sandbox,
            elsewhere=None if is_local(settings.scheduler) else EstimatingWorkers(chosen),
        ),
        solver,
        deadline_s=settings.plan_deadline_s,
        foreign=foreign,
        builds_here=is_local(settings.scheduler),
    )

    board = JobNotifications()
    shutdown.on_refusing(board.stop)
    runner = JobRunner(
        kept,
        chosen,
        planning,
        board,
        setup=local_setup(settings),
        retry_policy=RetryPolicy(settings.job_attempts, settings.job_silence_s),
        retention=Retention(jobs_days=settings.keep_jobs_days, audit_days=settings.keep_audit_days),
        metrics=metrics,
    )
    offer = JobOptions(
        measuring_place(settings.scheduler), is_local(settings.scheduler), settings.job_deadline_s
    )
    jobs = JobService(kept, planning, runner, board, offer)

    sessions = Sessions(settings.session_key, settings.oidc)
    authenticator = Authenticator(
        settings.token, kept, _token_reader(settings, kept), sessions=sessions
    )
    audit = AuditWriter(kept)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        current_default_thread_limiter().total_tokens = FOR_DATABASE
        load()
        await runner.start()
        yield
        await runner.stop()
        solver.close()
        kept.close()

    app = FastAPI(
        title="Stagewright",
        version=__version__,
        description="Plans the pipeline stages of a PyTorch model.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(refuse_unknown_parameters)],
        **fastapi_options(),
        middleware=[  # the first sees a request first; a stranger's body is not read
            Middleware(Compression),
            Middleware(Pages, error_page=error_page),
            Middleware(AccessLog, metrics=metrics),
            Middleware(DrainGate, shutdown=shutdown),
            Middleware(FramingCheck),
            Middleware(HostCheck, allowed=settings.allowed_hosts),
            Middleware(OriginCheck),
            Middleware(AuthMiddleware, authenticator=authenticator, audit=audit),
            Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
            Middleware(ConcurrencyLimit),
        ],
    )
    services = {
        "settings": settings,
        "store": kept,
        "metrics": metrics,
        "shutdown": shutdown,
        "readiness": health.ReadinessCheck(kept, solver, shutdown),
        "planning": planning,
        "jobs": jobs,
        "foreign": foreign,
        "program_reader": ProgramReader(settings.sandbox),
        "authenticator": authenticator,
        "audit": audit,
        "sessions": sessions,
        "views": Views(planning, kept),
    }
    for name, service in services.items():
        setattr(app.state, name, service)
    for router in ROUTERS:
        app.include_router(router)
    install_problems(app, documented_paths(ROUTERS))

    @cache
    def openapi() -> dict[str, Any]:
        return describe(app)

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
    return app


def _token_reader(settings: ServerSettings, store: Store) -> TokenReader | None:
    """What reads an identity provider's tokens, if there is one."""
    if settings.oidc is None:
        return None
    try:
        from .auth.oidc import OidcTokens
    except ModuleNotFoundError:
        raise InvalidInput(
            "tokens of an identity provider need pyjwt; run: pip install 'stagewright[oidc]'"
        ) from None
    return OidcTokens(settings.oidc, store, SigningKeys(settings.oidc.jwks_url))
