"""The store's contract for keys, answers given before and the audit log, over every database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from stagewright.api.store.errors import AnswerPending, KeyReused, RecordNotFound
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.records import Answer, AuditEvent, Quotas
from stagewright.core.errors import InvalidInput
from stagewright.core.profile.profile import Profile
from tests.api.store.test_jobs import side_by_side
from tests.api.stored import infeasible

ANSWER = Answer(status=201, headers=(("Location", "/v1/plans/plan_1"),), body='{"id": "plan_1"}')


class TestProjects:
    def test_the_default_one_is_there_and_others_can_be_added(self, store):
        added = store.projects.create("team")
        assert [project.id for project in store.projects.list()] == [HERE, added.id]
        assert store.projects.get(added.id) == added

    def test_names_are_unique_and_short(self, store):
        store.projects.create("team")
        for name, words in [("team", "already"), (" ", "1 to 200"), ("x" * 201, "201")]:
            with pytest.raises(InvalidInput, match=words):
                store.projects.create(name)
        with pytest.raises(RecordNotFound):
            store.projects.get("project_nowhere")


class TestKeys:
    def make(self, store, **options: Any) -> Any:
        return store.keys.create(HERE, name="ci", scopes=["plans:write"], **options)

    def test_its_secret_opens_it_and_is_not_stored(self, store, address):
        quotas = Quotas(max_requests_per_minute=60, max_unfinished_jobs=2)
        made = self.make(store, quotas=quotas)
        found = store.keys.by_secret(made.secret)
        assert (found.id, found.project_id, found.name) == (made.key.id, HERE, "ci")
        assert (found.scopes, found.quotas) == (("plans:write",), quotas)
        assert made.secret not in repr(made)
        with store._database.read() as connection:
            rows = connection.exec_driver_sql("SELECT * FROM api_keys").all()
        assert made.secret not in str(rows)

    def test_other_secrets_open_nothing(self, store):
        made = self.make(store)
        for secret in ("", "sw_", made.secret + "x", made.key.id, "\0", "\ud800"):
            assert store.keys.by_secret(secret) is None

    def test_it_closes_when_it_is_revoked(self, store):
        made = self.make(store)
        revoked = store.keys.revoke(HERE, made.key.id)
        assert store.keys.by_secret(made.secret) is None
        assert store.keys.revoke(HERE, made.key.id) == revoked
        assert store.keys.list(HERE) == [revoked]

    def test_it_closes_when_its_time_is_over(self, store, clock):
        made = self.make(store, expires_at=clock.time + timedelta(hours=1))
        assert store.keys.by_secret(made.secret) is not None
        clock.time += timedelta(hours=1)
        assert store.keys.by_secret(made.secret) is None

    def test_it_is_known_for_a_second_and_no_longer_than_it_opens(self, store, clock, monkeypatch):
        passed_s = [0.0]
        monkeypatch.setattr(store.keys, "_monotonic_s", lambda: passed_s[0])
        made = self.make(store, expires_at=clock.time + timedelta(hours=1))
        other = self.make(store)
        assert store.keys.known(made.secret) is None, "nobody looked it up"
        for key in (made, other):
            store.keys.by_secret(key.secret)
            assert store.keys.known(key.secret).id == key.key.id
        passed_s[0] = 0.99
        assert store.keys.known(made.secret) is not None
        clock.time += timedelta(hours=1)
        assert store.keys.known(made.secret) is None
        assert store.keys.known(other.secret) is not None
        passed_s[0] = 1.0
        assert store.keys.known(other.secret) is None
        store.keys.by_secret(other.secret)
        store.keys.revoke(HERE, other.key.id)
        assert store.keys.known(other.secret) is None

    def test_what_is_revoked_or_expired_is_not_live(self, store, clock):
        """Expired keys counted, so that a project that let keys expire could make no more."""
        self.make(store)
        self.make(store, expires_at=clock.time + timedelta(hours=1))
        store.keys.revoke(HERE, self.make(store).key.id)
        assert store.keys.count_live(HERE) == 2
        clock.time += timedelta(hours=1)
        assert store.keys.count_live(HERE) == 1

    def test_its_use_is_noted_about_once_a_minute(self, store, clock):
        made = self.make(store)
        store.keys.by_secret(made.secret)
        (first,) = store.keys.list(HERE)
        store.keys.by_secret(made.secret)
        assert store.keys.list(HERE) == [first]
        clock.time += timedelta(minutes=1)
        store.keys.by_secret(made.secret)
        (later,) = store.keys.list(HERE)
        assert later.last_used_at > first.last_used_at is not None

    def test_another_projects_key_cannot_be_revoked(self, store):
        made = self.make(store)
        other = store.projects.create("other").id
        with pytest.raises(RecordNotFound):
            store.keys.revoke(other, made.key.id)
        assert store.keys.by_secret(made.secret) is not None
        assert store.keys.list(other) == []

    def test_it_needs_a_project_and_a_name(self, store):
        with pytest.raises(RecordNotFound):
            store.keys.create("project_nowhere", name="ci", scopes=[])
        with pytest.raises(InvalidInput):
            store.keys.create(HERE, name="", scopes=[])


class TestIdempotency:
    def test_the_first_answer_is_given_again(self, store):
        assert store.idempotency.claim(HERE, "k", "d", holder="us") is None
        assert store.idempotency.complete(HERE, "k", ANSWER, holder="us") == ANSWER
        assert store.idempotency.claim(HERE, "k", "d", holder="us") == ANSWER

    def test_another_request_with_the_key_is_refused(self, store):
        store.idempotency.claim(HERE, "k", "d", holder="us")
        for _ in range(2):  # while it is answered, and afterwards
            with pytest.raises(KeyReused, match="choose a new key"):
                store.idempotency.claim(HERE, "k", "other", holder="us")
            store.idempotency.complete(HERE, "k", ANSWER, holder="us")

    def test_keys_belong_to_projects(self, store):
        other = store.projects.create("other").id
        store.idempotency.claim(HERE, "k", "d", holder="us")
        store.idempotency.complete(HERE, "k", ANSWER, holder="us")
        assert store.idempotency.claim(other, "k", "something else", holder="us") is None

    def test_of_two_at_once_one_answers_and_the_other_is_told_to_wait(self, store):
        def claim(index: int) -> Answer | str | None:
            try:
                return store.idempotency.claim(HERE, "k", "d", holder="us")
            except AnswerPending:
                return "pending"

        assert sorted(map(str, side_by_side(claim))) == ["None"] + ["pending"] * 5

    def test_a_claim_given_up_can_be_made_again(self, store):
        store.idempotency.claim(HERE, "k", "d", holder="us")
        store.idempotency.release(HERE, "k", holder="us")
        assert store.idempotency.claim(HERE, "k", "d", holder="us") is None

    def test_an_answer_is_not_given_up(self, store):
        store.idempotency.claim(HERE, "k", "d", holder="us")
        store.idempotency.complete(HERE, "k", ANSWER, holder="us")
        store.idempotency.release(HERE, "k", holder="us")
        assert store.idempotency.claim(HERE, "k", "d", holder="us") == ANSWER

    def test_a_claim_that_is_renewed_is_not_free_one_that_is_not_is(self, store, clock):
        store.idempotency.claim(HERE, "k", "d", lease_s=15, holder="us")
        for _ in range(4):
            clock.time += timedelta(seconds=10)
            store.idempotency.renew(HERE, "k", lease_s=15, holder="us")
        with pytest.raises(AnswerPending):
            store.idempotency.claim(HERE, "k", "d", lease_s=15, holder="us")
        clock.time += timedelta(seconds=16)
        assert store.idempotency.claim(HERE, "k", "d", lease_s=15, holder="us") is None

    def test_a_claim_whose_server_died_passes_on_and_the_first_answer_stays(self, store, clock):
        store.idempotency.claim(HERE, "k", "d", lease_s=60, holder="late")
        clock.time += timedelta(seconds=61)
        assert store.idempotency.claim(HERE, "k", "d", holder="us") is None
        with pytest.raises(AnswerPending):
            store.idempotency.claim(HERE, "k", "d", holder="third")
        store.idempotency.complete(HERE, "k", ANSWER, holder="us")
        late = Answer(status=500)
        assert store.idempotency.complete(HERE, "k", late, holder="late") == ANSWER

    def test_who_lost_a_claim_can_neither_keep_nor_answer_nor_give_it_up(self, store, clock):
        """Cause: a request that took too long deleted, or answered, the claim of the next."""
        store.idempotency.claim(HERE, "k", "d", lease_s=15, holder="late")
        clock.time += timedelta(seconds=16)
        store.idempotency.claim(HERE, "k", "d", lease_s=15, holder="us")
        with pytest.raises(AnswerPending):
            store.idempotency.complete(HERE, "k", Answer(status=500), holder="late")
        store.idempotency.release(HERE, "k", holder="late")
        with pytest.raises(AnswerPending):
            store.idempotency.claim(HERE, "k", "d", holder="third")
        store.idempotency.renew(HERE, "k", lease_s=1000, holder="late")
        clock.time += timedelta(seconds=16)
        assert store.idempotency.claim(HERE, "k", "d", holder="third") is None, "not renewed"
        assert store.idempotency.complete(HERE, "k", ANSWER, holder="third") == ANSWER

    def test_after_a_day_the_key_is_free(self, store, clock):
        store.idempotency.claim(HERE, "k", "d", holder="us")
        store.idempotency.complete(HERE, "k", ANSWER, holder="us")
        clock.time += timedelta(days=1)
        assert store.idempotency.claim(HERE, "k", "something else", holder="us") is None

    def test_keys_have_a_length(self, store):
        for key in ("", "k" * 256):
            with pytest.raises(InvalidInput, match="1 to 255"):
                store.idempotency.claim(HERE, key, "d", holder="us")
        assert store.idempotency.claim(HERE, "k" * 255, "d", holder="us") is None


class TestReuse:
    def test_a_stored_answer_is_found_again(self, store, profile):
        profile_id = store.documents.put(HERE, Profile.model_validate(profile)).id
        plan_id = store.documents.put_plan(HERE, infeasible(profile_id)).id
        store.reuse.remember(HERE, "plan", "d", "plan_that_is_gone")
        assert store.reuse.recall(HERE, "plan", "d") is None
        store.reuse.remember(HERE, "plan", "d", plan_id)
        assert store.reuse.recall(HERE, "plan", "d") == plan_id
        assert store.reuse.recall(HERE, "profile", "d") is None
        assert store.reuse.recall(HERE, "plan", "e") is None
        assert store.reuse.recall(store.projects.create("other").id, "plan", "d") is None


class TestAudit:
    def test_lines_come_back_newest_first_in_pages(self, store):
        for action in ("key.create", "plan.create", "job.cancel"):
            store.audit.add(AuditEvent(action=action, outcome="ok", project_id=HERE, key_id="k"))
        first = store.audit.entries(limit=2)
        store.audit.add(AuditEvent(action="later", outcome="refused", address="::1"))
        second = store.audit.entries(limit=2, cursor=first.next_cursor)
        rows = [*first.items, *second.items]
        assert [row.action for row in rows] == ["job.cancel", "plan.create", "key.create"]
        assert [row.key_id for row in rows] == ["k"] * 3
        assert rows[0].created_at > rows[1].created_at

    def test_one_projects_lines_alone(self, store):
        store.audit.add(AuditEvent(action="a", outcome="ok", project_id=HERE))
        store.audit.add(AuditEvent(action="b", outcome="ok"))
        assert [row.action for row in store.audit.entries(project_id=HERE, limit=9).items] == ["a"]
        assert len(store.audit.entries(limit=9).items) == 2


def test_two_projects_that_use_one_key_at_once_get_an_answer_each(store):
    """One that ends first must not answer the other."""
    ours, theirs = HERE, store.projects.create("theirs").id
    for project in (ours, theirs):
        assert store.idempotency.claim(project, "key", "digest", holder="us") is None
    store.idempotency.complete(ours, "key", Answer(status=201, body="ours"), holder="us")
    with pytest.raises(AnswerPending):
        store.idempotency.claim(theirs, "key", "digest", holder="us")
    store.idempotency.complete(theirs, "key", Answer(status=201, body="theirs"), holder="us")
    for project, body in ((ours, "ours"), (theirs, "theirs")):
        assert store.idempotency.claim(project, "key", "digest", holder="us").body == body
