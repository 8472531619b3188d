"""The application: settings in, ASGI out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from .. import __version__
from ..core.errors import InvalidInput
from .auth.gate import Gate
from .auth.identify import Identification, TokenReader
from .auth.signing_keys import SigningKeys
from .draining import Drain, DrainGate
from .hosts import HostCheck
from .limits import BodyLimit
from .measuring import Measurer
from .models.estimating import Estimator
from .openapi import describe
from .origins import OriginCheck
from .problems import install_problems
from .routes_audit import audit_routes
from .routes_catalogue import catalogue_routes
from .routes_graphs import graph_routes
from .routes_health import health_routes
from .routes_keys import key_routes
from .routes_metrics import metrics_routes
from .routes_plans import plan_routes
from .routes_profiles import profile_routes
from .routes_what_if import what_if_routes
from .services import Planning
from .settings import Settings
from .solving import Solver
from .store.contract import Store
from .store.sql_store import SqlStore
from .telemetry.metrics import Metrics
from .telemetry.requests import Requests
from .telemetry.watched import watch


def create_app(
    settings: Settings, *, store: Store | None = None, measurer: Measurer | None = None, drain: Drain | None = None
) -> FastAPI:
    """The service as an ASGI application; torch is not imported.

    Args:
        settings: How it behaves.
        store: Where it keeps things, instead of ``settings.database``. The application closes it
            when it shuts down.
        measurer: What measures, instead of one made from the settings.
        drain: How far the server is on its way out; told by whoever hears signals.

    Raises:
        InvalidInput, StoreUnavailable: The database cannot be used.
    """
    kept = SqlStore(settings.database) if store is None else store
    metrics = Metrics()
    drain = Drain() if drain is None else drain
    solver = Solver(settings.plan_processes, metrics.worked)
    watch(metrics, kept, solver, drain)
    planning = Planning(
        kept,
        measurer or Measurer.from_settings(settings),
        Estimator(settings.estimate_command),
        solver,
        deadline_s=settings.plan_deadline_s,
    )

    identification = Identification(settings.token, kept, _token_reader(settings, kept))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
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
        middleware=[  # the first sees a request first; a stranger's body is not read
            Middleware(Requests, metrics=metrics),
            Middleware(DrainGate, drain=drain),
            Middleware(HostCheck, allowed=settings.allowed_hosts),
            Middleware(OriginCheck),
            Middleware(Gate, identification=identification, store=kept),
            Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
        ],
    )
    install_problems(app)
    app.state.metrics = metrics
    app.state.drain = drain
    app.include_router(health_routes(kept, solver, drain))
    app.include_router(metrics_routes(metrics))
    app.include_router(audit_routes(kept))
    app.include_router(key_routes(kept))
    app.include_router(plan_routes(planning, kept))
    app.include_router(profile_routes(planning, kept))
    app.include_router(graph_routes(planning, kept))
    app.include_router(what_if_routes(planning))
    app.include_router(catalogue_routes(settings))

    @cache
    def openapi() -> dict[str, Any]:
        return describe(app)

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
    return app


def _token_reader(settings: Settings, store: Store) -> TokenReader | None:
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
