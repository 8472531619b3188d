"""What one project makes no other sees, and what a key has no scope for it cannot do.

Both are asked of every route the application has. A new route with an id in its path fails here
until `IDS` knows an object for it, or `CATALOGUES` says that it belongs to nobody.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stagewright.api
from stagewright.api.auth.access import (
    AUDIT,
    KEYS,
    OPERATOR,
    PROJECTS,
    is_below,
    is_open,
    needed_scope,
)
from stagewright.api.auth.authenticate import principal_of_key
from stagewright.api.auth.scopes import SCOPES
from stagewright.api.http.examples import example_graph
from stagewright.api.jobs.service import JobOptions, submit
from stagewright.api.model_sources.estimator import Estimator
from stagewright.api.planning.solver_pool import Solver
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.errors import RecordNotFound, TooManyJobs
from stagewright.api.store.records import JobRequest, Quotas
from stagewright.api.store.store import Store
from stagewright.core.errors import InvalidInput
from tests.api.app_routes import routes
from tests.api.stored import a_graph

CHOICES = {"target": "pipedream"}
"""Parts of paths that name no object of anybody's."""

CATALOGUES = ("/v1/model-families/", "/static/")
"""Below these is what the service knows, the same for everyone."""


@pytest.fixture
def kept():
    return Store(IN_MEMORY)


@pytest.fixture
def holder(make_client, kept):
    """A client of the same service, with a key of its own; `ours` and `theirs` are projects."""
    projects = {name: kept.projects.create(name).id for name in ("ours", "theirs")}

    def make(*scopes, project="ours"):
        made = kept.keys.create(projects[project], name="test", scopes=scopes or SCOPES)
        client = make_client(store=kept, authorized=False)
        client.headers["Authorization"] = f"Bearer {made.secret}"
        return client

    make.projects = projects
    return make


@pytest.fixture
def ids(holder, kept, profile):
    """An object of our project for each parameter of a path."""
    ours, project = holder(), holder.projects["ours"]
    plan = ours.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}).json()
    made = ours.post("/v1/api-keys", json={"name": "n", "scopes": ["read"]}).json()
    job = kept.jobs.submit(project, JobRequest(kind="plan", request_json="{}"))
    return {
        "plan_id": plan["id"],
        "profile_id": plan["profile_id"],
        "key_id": made["key"]["id"],
        "graph_id": ours.post("/v1/graphs", json=a_graph().model_dump(mode="json")).json()["id"],
        "job_id": job.id,
    }


def operations(client):
    return sorted(set(routes(client.app)))


def addressed(client, ids):
    """Every operation on one object: its method, its path, and the path of our object."""
    for method, path in operations(client):
        names = re.findall(r"{(\w+)", path)
        if names and not path.startswith(CATALOGUES):
            unknown = set(names) - ids.keys() - CHOICES.keys()
            assert not unknown, f"say in `ids` which object {unknown} of {path} is"
            yield method, path, path.format(**ids, **CHOICES)


def body_of(method):
    return None if method in ("GET", "DELETE") else {}


def query(path):
    """What a route cannot do without."""
    forms = {"/v1/plans/{plan_id}/export": "svg", "/v1/profiles/{profile_id}/export": "csv"}
    return {"format": forms[path]} if path in forms else {}


def test_another_projects_objects_are_not_found(holder, ids):
    ours, theirs = holder(), holder(project="theirs")
    seen = 0
    for method, path, ours_path in addressed(ours, ids):
        answer = theirs.request(method, ours_path, json=body_of(method), params=query(path))
        expected = (404,) if method in ("GET", "DELETE") else (404, 422)
        assert answer.status_code in expected, f"{method} {path}: {answer.text[:300]}"
        seen += 1
    for method, path, ours_path in addressed(ours, ids):
        if method == "GET":
            answer = ours.get(ours_path, params=query(path))
            assert answer.status_code == 200, f"our own {path}: {answer.text[:300]}"
    assert seen >= 3


def test_their_answer_is_the_same_as_for_what_never_was(holder, ids):
    theirs = holder(project="theirs")
    never = {name: re.sub(r"[0-9a-f]", "7", value) for name, value in ids.items()}
    for method, path, ours_path in addressed(theirs, ids):
        if method == "GET":
            paths = ours_path, path.format(**never, **CHOICES)
            same = {"X-Request-ID": "same"}
            answers = [theirs.get(one, params=query(path), headers=same) for one in paths]
            texts = {answer.text for answer in answers}
            for name, value in ids.items():
                texts = {text.replace(value, name).replace(never[name], name) for text in texts}
            assert len(texts) == 1, path


def test_lists_hold_nothing_of_another_project(holder, ids):
    ours, theirs = holder(), holder(project="theirs")
    listed = [
        path
        for method, path in operations(ours)
        if method == "GET" and path.startswith("/v1/") and "{" not in path
    ]
    for name in ("plan_id", "profile_id", "graph_id"):
        path = f"/v1/{name.removesuffix('_id')}s"
        assert path in listed
        assert ids[name] in ours.get(path).text, f"our own of {path}"
    for path in listed:
        text = theirs.get(path).text
        assert not [value for value in ids.values() if value in text], path


def test_ids_of_another_project_in_a_body_are_refused(holder, ids, profile):
    ours, theirs = holder(), holder(project="theirs")
    second = ours.post("/v1/plans", json={"profile": profile, "cluster": "1xcpu"}).json()["id"]
    bodies = (
        {"profile_id": ids["profile_id"], "cluster": "2xcpu"},
        {"profile_id": ids["profile_id"], "cluster": "2xcpu", "balance": [2, 2]},
        {"plan_id": ids["plan_id"]},
        {"plan_ids": [ids["plan_id"], second]},
    )
    paths = {
        path for method, path in operations(ours)
        if method == "POST"
        and path.startswith("/v1/")
        and "{" not in path
    }  # fmt: skip
    for body in bodies:
        for path in paths:
            answer = theirs.post(path, json=body)
            assert answer.status_code in (404, 422), f"{path} {body}: {answer.text[:300]}"
        assert any(ours.post(path, json=body).is_success for path in paths), f"our own {body}"


@pytest.mark.parametrize("name", ["profile_id", "graph_id"])
def test_nothing_is_planned_from_another_projects_object(holder, ids, name):
    theirs = holder(project="theirs")
    answer = theirs.post("/v1/plans", json={name: ids[name], "cluster": "2xcpu"})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["pointer"] == f"/{name}"
    assert error["detail"].startswith("there is no ")


def test_an_idempotency_key_of_another_project_is_another_key(holder, profile):
    ours, theirs = holder(), holder(project="theirs")
    headers, path = {"Idempotency-Key": "once"}, "/v1/profiles"
    first = ours.post(path, json=profile, headers=headers)
    again = ours.post(path, json=profile, headers=headers)
    assert (again.status_code, again.headers["Idempotency-Replayed"]) == (201, "true")
    other = theirs.post(path, json=profile, headers=headers)
    assert (other.status_code, other.headers.get("Idempotency-Replayed")) == (201, None)
    assert theirs.get(first.headers["Location"]).status_code == 200


def test_work_takes_its_turn_under_the_project_of_its_key(holder, profile, monkeypatch):
    """Under one project for all, a busy project would make the others wait."""
    asked = []

    def spy(kind, name, position=None):
        original = getattr(kind, name)

        async def noted(self, *args, **kwargs):
            asked.append((name, kwargs["project"] if position is None else args[position]))
            return await original(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, noted)

    async def estimate(self, request, project, deadline_s):
        asked.append(("estimate", project))
        raise InvalidInput("enough is known")

    monkeypatch.setattr(Estimator, "estimate", estimate)
    spy(Solver, "search")
    spy(Solver, "run")
    theirs = holder(project="theirs")
    split = {"profile": profile, "cluster": "2xcpu", "balance": [1, len(profile["layers"]) - 1]}
    assert theirs.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}).is_success
    assert theirs.post("/v1/simulations", json=split).is_success
    graph = {"graph": example_graph(), "cluster": "2xH100"}
    assert theirs.post("/v1/plans", json=graph).status_code == 422
    project = holder.projects["theirs"]
    assert asked == [("search", project), ("run", project), ("estimate", project)]


def test_a_project_whose_storage_is_full_is_told_what_to_delete(make_client, profile):
    client = make_client(store=Store(IN_MEMORY, max_project_bytes=100))
    answer = client.post("/v1/profiles", json=profile)
    assert answer.status_code == 409
    assert answer.json()["type"].endswith(":storage-full")
    assert "project_stored_bytes" in answer.json()["detail"]
    assert client.get("/v1/profiles").json()["profiles"] == []


def test_a_secret_is_not_kept_for_an_idempotency_key(holder, kept):
    admin, headers = holder(), {"Idempotency-Key": "once"}
    body = {"name": "n", "scopes": ["read"]}
    secrets = {
        admin.post("/v1/api-keys", json=body, headers=headers).json()["secret"] for _ in range(2)
    }
    assert len(secrets) == 2, "each is a key of its own"


def test_equal_content_is_each_projects_own(holder, profile):
    ours, theirs = holder(), holder(project="theirs")
    body = {"profile": profile, "cluster": "2xcpu"}
    first, second = ours.post("/v1/plans", json=body), theirs.post("/v1/plans", json=body)
    assert first.json()["id"] == second.json()["id"]
    assert theirs.get(second.headers["Location"]).status_code == 200
    assert theirs.get("/v1/plans").text.count(first.json()["id"]) == 1


def asked(client, scope):
    """Every operation that needs a scope, and how it is answered."""
    for method, path in operations(client):
        if not is_open(path) and needed_scope(method, path) == scope:
            filled = re.sub(r"[{}]", "", path)
            yield f"{method} {path}", client.request(method, filled, json=body_of(method))


@pytest.mark.parametrize("scope", SCOPES)
def test_without_its_scope_no_route_is_reached(holder, scope):
    rest = [other for other in SCOPES if other != scope]
    for name, answer in asked(holder(*rest), scope):
        assert answer.status_code == 403, name
        assert f'scope="{scope}"' in answer.headers["WWW-Authenticate"]


@pytest.mark.parametrize("scope", SCOPES)
def test_with_its_scope_alone_a_route_is_reached(holder, scope):
    for name, answer in asked(holder(scope), scope):
        assert answer.status_code not in (401, 403), name


def test_what_changes_something_needs_more_than_reading(holder):
    client = holder("read")
    for method, path in operations(client):
        if method != "GET" and not is_open(path):
            answer = client.request(method, re.sub(r"[{}]", "", path), json={})
            assert answer.status_code == 403, f"{method} {path}"


def test_no_route_was_forgotten_in_the_list_of_scopes(client):
    for method, path in operations(client):
        if not is_open(path) and needed_scope(method, path) == "admin":
            known = is_below(path, KEYS) or is_below(path, AUDIT) or path == PROJECTS
            assert known, f"say in api/auth/scopes.py what {method} {path} needs"


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v1/plans", "read"),
        ("HEAD", "/v1/plans/plan_1", "read"),
        ("GET", "/openapi.json", "read"),
        ("POST", "/v1/plans", "plan"),
        ("POST", "/v1/simulations", "plan"),
        ("POST", "/v1/jobs/job_1/cancel", "measure"),
        ("POST", "/v1/profile-jobs", "measure"),
        ("GET", "/v1/api-keys", "admin"),
        ("GET", "/v1/api-keys/", "admin"),
        ("DELETE", "/v1/api-keys/key_1", "admin"),
        ("GET", "/v1/projects", "read"),
        ("POST", "/v1/projects", "admin"),
        ("DELETE", "/v1/plans/plan_1", "plan"),
        ("PATCH", "/v1/plans/plan_1", "plan"),
        ("POST", "/v1/nobody-thought-of-it", "admin"),
        ("POST", "/v1/plansx", "admin"),
        ("DELETE", "/", "admin"),
        ("GET", "/metrics", "metrics"),
        ("GET", "/v1", "admin"),
        ("BREW", "/v1/coffee", "admin"),
    ],
)
def test_scopes_by_method_and_path(method, path, scope):
    assert needed_scope(method, path) == scope


def test_measuring_needs_its_scope_whatever_the_path(holder, kept):
    from stagewright.api.http.examples import measure_example

    answer = holder("read", "plan").post("/v1/plans", json=measure_example())
    assert answer.status_code == 403
    assert 'scope="measure"' in answer.headers["WWW-Authenticate"]
    assert "measuring a model needs the scope 'measure'" in answer.json()["detail"]
    (entry,) = kept.audit.entries(limit=5).items
    assert (entry.action, entry.outcome) == ("plans.create", "forbidden")
    assert entry.project_id == holder.projects["ours"]


def test_scopes_this_release_does_not_know_open_nothing(holder):
    client = holder("everything", "READ", "read ")
    assert client.get("/v1/plans").status_code == 403
    assert "this key has none" in client.get("/v1/plans").json()["detail"]


def test_no_route_picks_a_project_itself():
    """A route that names the default project would show it to everyone."""
    folder = Path(stagewright.api.__file__).parent
    allowed = {folder / "auth" / "access.py"}
    for file in set(folder.rglob("*.py")) - allowed:
        if folder / "store" not in file.parents:
            assert "DEFAULT_PROJECT" not in file.read_text(), file


def test_unfinished_jobs_are_limited_by_key(store):
    project = store.projects.create("ours").id
    quotas = Quotas(max_unfinished_jobs=2)
    first, second = (
        principal_of_key(store.keys.create(project, name=name, scopes=SCOPES, quotas=quotas).key)
        for name in ("first", "second")
    )
    request = JobRequest(kind="plan", request_json="{}", key_id="somebody else")
    jobs = [submit(store.jobs, first, request) for _ in range(2)]
    assert {job.key_id for job in jobs} == {first.id}
    with pytest.raises(TooManyJobs, match="limit of 2 unfinished jobs"):
        submit(store.jobs, first, request)
    theirs = submit(store.jobs, second, request)
    with pytest.raises(RecordNotFound):
        store.jobs.get("project_default", theirs.id)
    store.jobs.request_cancel(project, jobs[0].id)
    submit(store.jobs, first, request)


def test_a_key_without_quotas_has_the_servers_and_its_project_has_one_for_all(make_client, kept):
    """Requests and jobs were unlimited unless a key's maker thought of it."""
    project, other = (kept.projects.create(name).id for name in ("ours", "theirs"))
    client = make_client(
        store=kept, authorized=False, key_requests_per_minute=3, project_requests_per_minute=4
    )

    def ask(key):
        return client.get("/v1/plans", headers={"Authorization": f"Bearer {key.secret}"})

    first, second = (kept.keys.create(project, name=n, scopes=SCOPES) for n in "ab")
    given = Quotas(max_requests_per_minute=4)
    more = kept.keys.create(other, name="c", scopes=SCOPES, quotas=given)
    assert [ask(first).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert "This key is limited to 3" in ask(first).json()["detail"]
    assert ask(second).status_code == 200
    refused = ask(second)
    assert refused.status_code == 429
    assert "This project is limited to 4" in refused.json()["detail"]
    assert refused.headers["Retry-After"]
    assert [ask(more).status_code for _ in range(5)] == [200] * 4 + [429]


def test_what_a_key_is_refused_is_not_charged_to_its_project(make_client, kept):
    """A key beyond its quota used its whole project's requests up."""
    project = kept.projects.create("ours").id
    client = make_client(
        store=kept, authorized=False, key_requests_per_minute=3, project_requests_per_minute=6
    )
    hasty, other = (kept.keys.create(project, name=name, scopes=SCOPES) for name in "ab")

    def ask(key):
        return client.get("/v1/plans", headers={"Authorization": f"Bearer {key.secret}"})

    assert [ask(hasty).status_code for _ in range(20)] == [200] * 3 + [429] * 17
    assert [ask(other).status_code for _ in range(3)] == [200] * 3


def test_unfinished_jobs_have_limits_for_every_key_and_project(store):
    project = store.projects.create("ours").id
    options = JobOptions("here", False, 60.0, key_jobs=2, project_jobs=3)
    first, second = (
        principal_of_key(store.keys.create(project, name=name, scopes=SCOPES).key)
        for name in ("first", "second")
    )
    request = JobRequest(kind="plan", request_json="{}")
    for _ in range(2):
        submit(store.jobs, first, request, options)
    with pytest.raises(TooManyJobs, match="limit of 2 unfinished jobs of this key"):
        submit(store.jobs, first, request, options)
    submit(store.jobs, second, request, options)
    with pytest.raises(TooManyJobs, match="limit of 3 unfinished jobs of this project"):
        submit(store.jobs, second, request, options)
    submit(store.jobs, OPERATOR.model_copy(update={"project_id": project}), request, options)
