"""What both clients share of httpx2: how it is set up, and what its errors mean."""

from __future__ import annotations

from typing import Any, TypedDict

from .sans_io import Call, Failure, Reply
from .settings import Settings

try:
    import httpx2 as httpx2
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "a client of the service needs httpx2; run: pip install 'stagewright[client]', or in a "
        "checkout: pip install -e '.[client]'",
        name=error.name,
    ) from None

CONNECT_TIMEOUT_S = 10.0


class HttpOptions(TypedDict):
    """What `httpx2.Client` and `httpx2.AsyncClient` take alike."""

    base_url: str
    headers: dict[str, str]
    trust_env: bool
    follow_redirects: bool


def http_options(settings: Settings) -> HttpOptions:
    """How to set httpx2 up. A redirect is not followed: the token is for this service alone."""
    return {
        "base_url": settings.url,
        "headers": settings.headers,
        "trust_env": settings.uses_proxies,
        "follow_redirects": False,
    }


def request_of(http: httpx2.Client | httpx2.AsyncClient, call: Call, timeout_s: float) -> Any:
    """A call as a request of httpx2."""
    timeout = httpx2.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
    return http.build_request(
        call.method,
        call.path,
        params=dict(call.params) or None,
        headers=dict(call.headers),
        content=call.body,
        timeout=timeout,
    )


def reply_of(response: httpx2.Response, body: bytes) -> Reply:
    """A response of httpx2 as a reply."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status_code, headers, body)


def failure_of(error: httpx2.RequestError) -> Failure:
    """What it means that there was no response, or not all of it."""
    never_left = httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout
    return Failure(
        str(error) or type(error).__name__,
        was_sent=not isinstance(error, never_left),
        is_timeout=isinstance(error, httpx2.TimeoutException),
    )
