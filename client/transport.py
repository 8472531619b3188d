"""The use of httpx2 that both clients share: options, conversions and errors."""

from __future__ import annotations

from typing import Any, TypedDict

from .sans_io import HttpReply, HttpRequest, TransportFailure
from .settings import ClientSettings

try:
    import httpx2 as httpx2
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the client needs httpx2; run: pip install 'stagewright[client]', or in a checkout: "
        "pip install -e '.[client]'",
        name=error.name,
    ) from None

CONNECT_TIMEOUT_S = 10.0


class HttpOptions(TypedDict):
    """Options that `httpx2.Client` and `httpx2.AsyncClient` have in common."""

    base_url: str
    headers: dict[str, str]
    trust_env: bool
    follow_redirects: bool


def build_options(settings: ClientSettings) -> HttpOptions:
    """Return the constructor options of the httpx2 client."""
    # Redirects are not followed: the token would be sent to another host.
    return {
        "base_url": settings.url,
        "headers": settings.headers,
        "trust_env": settings.uses_proxies,
        "follow_redirects": False,
    }


def build_request(
    http: httpx2.Client | httpx2.AsyncClient, call: HttpRequest, timeout_s: float
) -> Any:
    """Convert a request to httpx2's form."""
    timeout = httpx2.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
    return http.build_request(
        call.method,
        call.path,
        params=dict(call.params) or None,
        headers=dict(call.headers),
        content=call.body,
        timeout=timeout,
    )


def read_response(response: httpx2.Response, body: bytes) -> HttpReply:
    """Convert a response of httpx2."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpReply(response.status_code, headers, body)


def read_error(error: httpx2.RequestError) -> TransportFailure:
    """Convert an error of httpx2, deciding whether the service may have seen the request."""
    # Only these errors are raised before the first byte is sent.
    never_left = httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout
    return TransportFailure(
        str(error) or type(error).__name__,
        was_sent=not isinstance(error, never_left),
        is_timeout=isinstance(error, httpx2.TimeoutException),
    )
