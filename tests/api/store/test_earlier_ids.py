"""Documents of earlier releases are found under either id, or refused with the reason."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from sqlalchemy import update

from stagewright.api.store.documents import ProfileCache
from stagewright.api.store.errors import ProfileInUse, RecordNotFound
from stagewright.api.store.maintenance import find_faults
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.tables import GRAPHS, PLANS, PROFILES
from stagewright.core.document import is_same_id
from stagewright.core.errors import InvalidInput
from stagewright.core.profile.profile import Profile
from tests.api.stored import a_graph, infeasible


def shorten(identifier: str) -> str:
    return identifier[:-8]


@pytest.fixture
def a_profile(profile) -> Profile:
    return Profile.model_validate(profile)


@pytest.fixture
def make_earlier(store):
    """Gives a stored document the id that an earlier release would have given it."""

    def make(table, identifier):
        with store._database.write() as connection:
            change = update(table).where(table.c.id == identifier)
            connection.execute(change.values(id=shorten(identifier)))
        return shorten(identifier)

    return make


def test_what_an_earlier_release_accepted_and_this_one_does_not_is_told(
    store, a_profile, monkeypatch
):
    """Names had no bounds; a stored one that is longer was answered with a 500."""
    kept = store.documents.put(HERE, a_profile).id
    longer = a_profile.to_json().replace(a_profile.model, "x" * 501)
    with store._database.write() as connection:
        connection.execute(update(PROFILES).where(PROFILES.c.id == kept).values(document=longer))
    monkeypatch.setattr(store.documents, "_parsed", ProfileCache(0))
    with pytest.raises(InvalidInput, match=rf"{kept} is older:\n  /model: .*at most 500"):
        store.documents.profile(HERE, kept)


def test_ids_have_128_bits(a_profile):
    assert len(a_profile.content_id().partition("_")[2]) * 4 == 128
    assert len(infeasible("profile_x").record_id().partition("_")[2]) * 4 == 128


@pytest.mark.parametrize("ending", ["\r\nX: abc", "éééééééé", "ABCDEF01", "g1234567", "_1234567"])
def test_an_id_that_is_not_of_digits_alone_finds_nothing(
    store, a_profile, make_earlier, make_client, ending
):
    """Any eight last characters found the document, and went into headers: 500, or more lines."""
    old = make_earlier(PROFILES, store.documents.put(HERE, a_profile).id)
    client = make_client(store=store)
    for query in ("", "?format=csv"):
        assert client.get(f"/v1/profiles/{old}12345678{query}").status_code == 200
        assert client.get(f"/v1/profiles/{old}{quote(ending)}{query}").status_code == 404


def test_one_document_has_one_row_whichever_release_stored_it(store, a_profile, make_earlier):
    documents = store.documents
    new = documents.put(HERE, a_profile).id
    old = make_earlier(PROFILES, new)
    graph = documents.put(HERE, a_graph()).id
    old_graph = make_earlier(GRAPHS, graph)
    for asked in (old, new):
        assert documents.profile(HERE, asked).profile == a_profile
        assert documents.profile_summary(HERE, asked).id == old
    assert documents.graph(HERE, graph).id == documents.graph(HERE, old_graph).id == old_graph
    assert documents.put(HERE, a_profile).id == old, "it is not stored a second time"
    plan = documents.put_plan(HERE, infeasible(new)).id
    assert documents.plan_summary(HERE, plan).profile_id == old
    assert documents.plan(HERE, plan).profile_id == new
    old_plan = make_earlier(PLANS, plan)
    assert documents.put_plan(HERE, infeasible(new)).id == old_plan
    assert documents.json("plan", HERE, plan) == documents.json("plan", HERE, old_plan)
    assert len(documents.plans(HERE, limit=9).items) == 1
    assert find_faults(store._database) == []
    with pytest.raises(ProfileInUse):
        documents.delete("profile", HERE, new)
    documents.delete("plan", HERE, plan)
    documents.delete("profile", HERE, new)
    with pytest.raises(RecordNotFound):
        documents.profile(HERE, old)


def test_a_noted_id_of_an_earlier_release_finds_what_is_stored_today(store, a_profile):
    new = store.documents.put(HERE, a_profile).id
    assert store.documents.profile(HERE, shorten(new)).id == new
    assert store.documents.json("profile", HERE, shorten(new))
    for wrong in (new[:-1], new[:-9], shorten(new)[:-1] + "g", "profile_", "", new + "0"):
        with pytest.raises(RecordNotFound):
            store.documents.profile(HERE, wrong)


def test_ids_are_compared_across_releases_and_no_further():
    new = "profile_" + "0123456789abcdef" * 2
    assert is_same_id(new, new)
    assert is_same_id(new, shorten(new))
    assert is_same_id(shorten(new), new)
    assert not is_same_id(new, new[:-1])
    assert not is_same_id(new, shorten(new)[:-1] + "0")
    assert not is_same_id(new, "")
    assert not is_same_id(new, new[:-1] + "0")
