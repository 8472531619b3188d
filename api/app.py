"""The ASGI application: services, middleware and routes, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import cache
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from .. import __version__
from .auth.middleware import AuthMiddleware
from .http.problems import SCHEMA_REF, ProblemDocument, documented_paths, install_problems
from .http.strict_requests import check_parameters
from .http.threads import FOR_DATABASE
from .jobs.workers import WorkerBackend
from .middleware.access_log import AccessLog
from .middleware.browser_responses import Pages
from .middleware.graceful_shutdown import GracefulShutdown
from .middleware.load_limits import LoadLimits
from .middleware.request_checks import RequestChecks
from .page import plan_views, routes_pages, routes_sign_in
from .page.templates import error_page, load
from .routes import (
    catalogue,
    documents,
    jobs,
    keys,
    operations,
    plans,
    projects,
)
from .services import Services, build_services
from .settings.settings import ServerSettings
from .store.store import Store
from .telemetry.tracing import fastapi_options

ROUTERS = (
    operations.probes,
    operations.audit,
    projects.router,
    keys.router,
    plans.router,
    jobs.router,
    documents.profiles,
    documents.graphs,
    plans.what_if,
    catalogue.router,
    plan_views.router,
    routes_sign_in.router,
    routes_pages.router,
)
"""In the order of the OpenAPI document; handlers get their services from ``app.state``."""


def create_app(
    settings: ServerSettings,
    *,
    store: Store | None = None,
    workers: WorkerBackend | None = None,
    shutdown: GracefulShutdown | None = None,
) -> FastAPI:
    """Return the service as an ASGI application; torch is not imported.

    Args:
        settings: Its configuration.
        store: Used instead of ``settings.database``; closed when the application shuts down.
        workers: Used instead of ``settings.scheduler``.
        shutdown: State of the server's shutdown, advanced by the signal handlers.

    Raises:
        InvalidInput, StoreUnavailable: The database, or a file named in the settings, is unusable.
        Refused: The settings require a sandbox that this machine does not have.
    """
    services = build_services(settings, store, workers, shutdown)
    app = FastAPI(
        title="Stagewright",
        version=__version__,
        description="Plans the pipeline stages of a PyTorch model.",
        lifespan=_lifespan(services),
        docs_url=None,  # FastAPI's documentation pages load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(check_parameters)],
        middleware=build_middleware(services),
        # Names of functions in generated clients: `create_plan`, not `create_plan_v1_plans_post`.
        generate_unique_id_function=lambda route: route.name,
        **fastapi_options(),
    )
    include_routes(app, services)
    return app


def build_middleware(services: Services) -> list[Middleware]:
    """Return the middleware, in the order in which a request passes it."""
    return [
        # Outside of everything that answers, so that refusals and faults become pages, too.
        Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1),
        Middleware(Pages, error_page=error_page),
        Middleware(AccessLog, metrics=services.metrics, shutdown=services.shutdown),
        # First refusals from the headers alone, then of clients without a token, then the body.
        Middleware(
            RequestChecks,
            shutdown=services.shutdown,
            allowed_hosts=services.settings.allowed_hosts,
        ),
        Middleware(
            AuthMiddleware,
            authenticator=services.authenticator,
            audit=services.audit,
            key_requests=services.settings.key_requests_per_minute,
            project_requests=services.settings.project_requests_per_minute,
        ),
        Middleware(LoadLimits, max_bytes=services.settings.max_body_bytes),
    ]


def include_routes(app: FastAPI, services: Services) -> None:
    """Add the routes, the services they use, problem documents and the OpenAPI document."""
    for field in fields(services):
        setattr(app.state, field.name, getattr(services, field.name))
    for router in ROUTERS:
        app.include_router(router)
    install_problems(app, documented_paths(ROUTERS))

    @cache
    def openapi() -> dict[str, Any]:
        return describe(app)

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        servers=[{"url": "/", "description": "The server that this document came from"}],
    )
    components = document.setdefault("components", {})
    schema = ProblemDocument.model_json_schema(ref_template=SCHEMA_REF)
    components.setdefault("schemas", {}).update(schema.pop("$defs", {}), ProblemDocument=schema)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    return document


def _lifespan(services: Services) -> Any:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        current_default_thread_limiter().total_tokens = FOR_DATABASE
        load()  # templates: compiled now, and not while the first page waits
        await services.start()
        yield
        await services.stop()

    return lifespan
