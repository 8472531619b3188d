"""An identity provider on this machine: keys made here, and a server that hands them out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://id.example", "stagewright-tests"


class Provider:
    """Signs tokens; counts how often its keys were asked for.

    Attributes:
        answer: What is at its address; `None` answers with an error.
    """

    def __init__(self) -> None:
        self.private = {
            "rsa": (generate_rsa(public_exponent=65537, key_size=2048), "RS256"),
            "ec": (generate_private_key(SECP256R1()), "ES256"),
        }
        self.answer: Any = {"keys": [self.public(key_id) for key_id in self.private]}
        self.url, self.num_asked = "", 0

    def public(self, key_id: str) -> dict[str, Any]:
        key, algorithm = self.private[key_id]
        made = (RSAAlgorithm if algorithm == "RS256" else ECAlgorithm).to_jwk(
            key.public_key(), as_dict=True
        )
        return {**made, "kid": key_id, "use": "sig"}

    def token(self, key_id: str = "rsa", *, header: Any = None, **claims: Any) -> str:
        """A token that would be taken, but for the changes; a claim of `None` is left out."""
        key, algorithm = self.private[key_id]
        usual = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": "someone",
            "exp": time.time() + 600,
            "scope": "openid stagewright:read",
            "stagewright_project": "project_default",
        }
        said = {name: value for name, value in {**usual, **claims}.items() if value is not None}
        return jwt.encode(said, key, algorithm, headers={"kid": key_id, **(header or {})})


@contextmanager
def identity_provider() -> Iterator[Provider]:
    provider = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            provider.num_asked += 1
            if self.path == "/elsewhere":
                self.send_response(302)
                self.send_header("Location", provider.url)
                self.end_headers()
                return
            body = json.dumps(provider.answer).encode()
            self.send_response(500 if provider.answer is None else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    provider.url = f"http://127.0.0.1:{server.server_port}/keys"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
