"""Tokens of an identity provider: what is not signed by it, for us and now, opens nothing."""

from __future__ import annotations

import base64
import json

import jwt
import pytest

from stagewright.api.auth import oidc as signing_keys
from stagewright.api.auth.oidc import OidcTokens, SigningKeys, fetch_directly, parse_jwks
from stagewright.api.errors import IdentityProviderUnreachable, Unauthorized
from stagewright.api.http.problems import problem_of_error
from stagewright.api.settings.settings import OidcSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.store import Store
from tests.api.identity_provider import AUDIENCE, ISSUER, identity_provider


@pytest.fixture(scope="module")
def provider():
    with identity_provider() as running:
        yield running


@pytest.fixture
def make(make_client, provider):
    """Clients of services that take the provider's tokens."""

    def make(store=None, **settings):
        oidc = OidcSettings(
            **{"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": provider.url, **settings}
        )
        return make_client(store=store, authorized=False, oidc=oidc)

    return make


@pytest.fixture(scope="module")
def refused(provider):
    """How a token is refused, without a service around: the reader's own answer."""
    store = Store(IN_MEMORY)

    def refused(token, **settings):
        oidc = OidcSettings(
            **{"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": provider.url, **settings}
        )
        with pytest.raises(Unauthorized) as caught:
            OidcTokens(oidc, store, keys).principal(token)
        problem = problem_of_error(caught.value)
        assert problem.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
        assert problem.document.status == 401
        return problem.document.detail

    keys = SigningKeys(provider.url)
    assert OidcTokens(
        OidcSettings(issuer=ISSUER, audience=AUDIENCE, jwks_url=provider.url), store, keys
    ).principal(provider.token()).scopes == {"read"}
    yield refused
    store.close()


def ask(client, token, method="GET", path="/v1/plans"):
    return client.request(method, path, headers={"Authorization": f"Bearer {token}"})


@pytest.mark.parametrize("key_id", ["rsa", "ec"])
def test_a_token_of_the_provider_opens_what_its_scopes_say(make, provider, key_id):
    client = make()
    token = provider.token(key_id)
    assert ask(client, token).status_code == 200
    assert ask(client, token, "POST", "/v1/plans").status_code == 403
    planning = provider.token(key_id, scope=["stagewright:plan"])
    assert ask(client, planning).status_code == 403
    assert ask(client, planning, "POST", "/v1/profiles").status_code == 415


def encoded(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_keys_are_fetched_once(make, provider):
    client = make()
    before = provider.num_asked
    for _ in range(3):
        assert ask(client, provider.token()).status_code == 200
    assert ask(client, provider.token(header={"kid": "made-up"})).status_code == 401
    assert provider.num_asked == before + 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"iss": "https://evil.example"}, "issuer"),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"iss": None}, "iss"),
        ({"aud": "another-service"}, "udience"),
        ({"aud": None}, "aud"),
        ({"exp": 1_000_000_000}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "exp"),
        ({"exp": 1e400}, "Invalid token"),
        ({"nbf": 4_000_000_000}, "not yet valid"),
        ({"sub": None}, "sub"),
        ({"sub": 7}, "ub"),
        ({"sub": ""}, "subject"),
        ({"sub": "line\nbreak"}, "subject"),
        ({"sub": "x" * 256}, "subject"),
        ({"header": {"kid": "unknown"}}, "no such key"),
        ({"header": {"crit": ["x"], "x": 1}}, "rit"),
    ],
)
def test_a_token_that_does_not_fit_opens_nothing(refused, provider, changes, says):
    assert says in refused(provider.token(**changes))


def test_what_opens_nothing_is_401(make, provider):
    answer = ask(make(), provider.token(aud="another-service"))
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
    assert answer.json()["detail"].endswith("Get a new one from the identity provider.")


def test_a_token_nobody_signed_opens_nothing(refused, make, provider):
    _, claims, signature = provider.token().split(".")
    for header in ({"alg": "none", "kid": "rsa"}, {"alg": "None", "kid": "rsa"}, {"kid": "rsa"}):
        for end in (signature, "AA", ""):
            assert "Invalid token" in refused(f"{encoded(header)}.{claims}.{end}")
    unsigned = f"{encoded({'alg': 'none', 'kid': 'rsa'})}.{claims}"
    client = make()
    for end in ("", ".", ".AA"):
        assert ask(client, unsigned + end).status_code == 401


def test_the_public_key_is_no_password(refused, provider):
    """The classic confusion: HMAC with what anybody can fetch."""
    import hashlib
    import hmac

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    public = provider.private["rsa"][0].public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _, claims, _ = provider.token().split(".")
    signed = f"{encoded({'alg': 'HS256', 'kid': 'rsa'})}.{claims}"
    digest = hmac.new(pem, signed.encode(), hashlib.sha256).digest()
    end = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    assert "not signed with one of" in refused(f"{signed}.{end}")
    with pytest.raises(ValueError, match="takes some of"):
        refused("", algorithms=("HS256",))


def test_changed_claims_and_other_peoples_keys_open_nothing(refused, provider):
    head, _, signature = provider.token().split(".")
    other = provider.token(scope="stagewright:admin").split(".")[1]
    assert "verification failed" in refused(f"{head}.{other}.{signature}")
    from tests.api.identity_provider import Provider

    assert "verification failed" in refused(Provider().token())
    mixed = jwt.encode({"iss": ISSUER}, provider.private["ec"][0], "ES256", headers={"kid": "rsa"})
    assert "Invalid token" in refused(mixed)


def test_an_algorithm_that_is_not_allowed_opens_nothing(refused, provider):
    assert "not signed with one of ES256" in refused(provider.token("rsa"), algorithms=("ES256",))


@pytest.mark.parametrize("text", ["a.b.c", "e30.e30.e30", "bnVsbA.e30.AA", "W10.W10.W10"])
def test_nonsense_is_refused(refused, text):
    assert "Invalid token" in refused(text)


@pytest.mark.parametrize(
    "header",
    [{"alg": "RS256"}, {"alg": "RS256", "kid": 7}, {"alg": "RS256", "kid": ["rsa"]},
     {"alg": ["RS256"], "kid": "rsa"}, {"alg": 7, "kid": "rsa"}, {"alg": {}, "kid": {}}],
)  # fmt: skip
def test_a_strange_header_is_refused(refused, provider, header):
    _, claims, signature = provider.token().split(".")
    assert "Invalid token" in refused(f"{encoded(header)}.{claims}.{signature}")


def test_without_a_provider_its_tokens_open_nothing(make_client, provider):
    assert ask(make_client(authorized=False), provider.token()).status_code == 401


def test_a_tokens_project_is_the_one_it_names(make, provider, profile, token):
    store = Store(IN_MEMORY)
    client = make(store)
    stored = client.post(
        "/v1/profiles", json=profile, headers={"Authorization": f"Bearer {token}"}
    ).json()["id"]
    theirs = store.projects.create("theirs").id
    mine, other = provider.token(), provider.token(stagewright_project=theirs)
    assert ask(client, mine, path=f"/v1/profiles/{stored}").status_code == 200
    assert ask(client, other, path=f"/v1/profiles/{stored}").status_code == 404
    for audit_name in (None, "project_unknown", 7, ["project_default"]):
        answer = ask(client, provider.token(stagewright_project=audit_name))
        assert answer.status_code == 403
        assert "project" in answer.json()["detail"]
    fallback = make(store, project=theirs)
    without = provider.token(stagewright_project=None)
    assert ask(fallback, without, path="/v1/plans").status_code == 200
    assert ask(fallback, without, path=f"/v1/profiles/{stored}").status_code == 404


def test_subjects_have_quotas_of_their_own(make, provider):
    client = make(requests_per_minute=1)
    assert ask(client, provider.token(sub="a")).status_code == 200
    assert ask(client, provider.token(sub="b")).status_code == 200
    assert ask(client, provider.token(sub="a")).status_code == 429


class Source:
    """A key set that may be gone."""

    def __init__(self):
        self.num_asked, self.time, self.document = 0, 0.0, b'{"keys": [{"kid": "a"}]}'
        self.keys = SigningKeys("", self.fetch, lambda: self.time)

    def fetch(self, _):
        self.num_asked += 1
        if self.document is None:
            raise OSError("gone")
        return self.document


def test_unknown_keys_do_not_make_it_fetch_without_end():
    source = Source()
    for _ in range(100):
        assert source.keys.key("unknown") is None
    assert source.num_asked == 1
    source.document = b'{"keys": [{"kid": "b"}]}'
    source.time = signing_keys.BETWEEN_FETCHES_S
    assert source.keys.key("b") is not None
    assert source.keys.key("a") is None, "a key the provider withdrew opens nothing"
    assert source.num_asked == 2


def test_keys_last_for_a_while_if_the_provider_is_gone(caplog):
    source = Source()
    assert source.keys.key("a") is not None
    source.document, source.time = None, signing_keys.USABLE_S
    assert source.keys.key("a") is not None
    assert "gone" in caplog.text
    source.time += 1
    with pytest.raises(IdentityProviderUnreachable, match="cannot be fetched"):
        source.keys.key("a")


def test_a_provider_that_does_not_answer_is_503(make, provider, monkeypatch):
    monkeypatch.setattr(provider, "answer", None)
    answer = ask(make(), provider.token())
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "30")
    assert provider.url not in answer.text


def test_redirects_are_not_followed(provider):
    with pytest.raises(OSError, match="redirect"):
        fetch_directly(provider.url.replace("/keys", "/elsewhere"))


def test_too_long_a_key_set_is_refused(provider, monkeypatch):
    monkeypatch.setattr(signing_keys, "MAX_BYTES", 20)
    with pytest.raises(OSError, match="longer than 20"):
        fetch_directly(provider.url)


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"keys": 1}', b"\xff", b"[" * 10_000])
def test_what_is_no_key_set_is_refused(document):
    with pytest.raises((ValueError, RecursionError)):
        parse_jwks(document)


def test_keys_for_other_uses_are_left_out():
    keys = [{"kid": "a", "use": "enc"}, {"kid": 7}, {}, 7, {"kid": "b"}, {"kid": "c", "use": "sig"}]
    assert set(parse_jwks(json.dumps({"keys": keys}).encode())) == {"b", "c"}
