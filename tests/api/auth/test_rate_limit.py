"""Buckets of requests, by a clock of our own."""

from __future__ import annotations

import pytest

from stagewright.api.auth import rate_limit as rates
from stagewright.api.auth.middleware import audit_name, rate_headers, too_many_requests
from stagewright.api.auth.rate_limit import RateLimiter


class Clock:
    def __init__(self):
        self.time_s = 0.0

    def __call__(self):
        return self.time_s


@pytest.fixture
def clock():
    return Clock()


def taken(bucket, quota, number):
    return [not bucket.take("key", quota).is_exceeded for _ in range(number)]


def test_a_minutes_worth_at_once_and_then_one_by_one(clock):
    bucket = RateLimiter(clock)
    assert taken(bucket, 6, 7) == [True] * 6 + [False]
    clock.time_s = 9.99
    assert taken(bucket, 6, 1) == [False]
    clock.time_s = 10.0
    assert taken(bucket, 6, 2) == [True, False]
    clock.time_s = 1e6
    assert taken(bucket, 6, 7) == [True] * 6 + [False], "it holds no more than a minute's worth"


def test_waiting_as_long_as_it_says_is_enough(clock):
    for quota in (1, 7, 60, 1000):
        bucket = RateLimiter(clock)
        taken(bucket, quota, quota)
        refused = bucket.take("key", quota)
        assert refused.is_exceeded
        assert refused.wait_s >= 1
        clock.time_s += refused.wait_s
        assert not bucket.take("key", quota).is_exceeded


def test_no_minute_has_more_than_twice_the_quota(clock):
    bucket, times = RateLimiter(clock), []
    for step in range(4 * 60 * 4):
        clock.time_s = step / 4
        if not bucket.take("key", 10).is_exceeded:
            times.append(clock.time_s)
    for start in times:
        assert len([time for time in times if start <= time < start + 60]) <= 20
    assert len(times) >= 10 * 4


def test_what_it_remembers_is_bounded_and_nobody_gains_by_it(clock, monkeypatch):
    monkeypatch.setattr(rates, "MAX_BUCKETS", 100)
    bucket = RateLimiter(clock)
    taken(bucket, 2, 3)
    for number in range(1000):
        clock.time_s += 0.01
        bucket.take(f"other {number}", 6000)
    assert len(bucket._buckets) <= 101
    assert bucket.take("key", 2).is_exceeded


def test_headers_say_what_is_left(clock):
    bucket = RateLimiter(clock)
    assert rate_headers(bucket.take("key", 2)) == {
        "RateLimit-Policy": '"minute";q=2;w=60',
        "RateLimit": '"minute";r=1;t=0',
    }
    bucket.take("key", 2)
    problem = too_many_requests(bucket.take("key", 2))
    assert problem.headers["Retry-After"] == "30"
    assert problem.headers["RateLimit"] == '"minute";r=0;t=30'


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v1/plans", ("plans.create", None)),
        ("DELETE", "/v1/api-keys/key_1", ("api-keys.delete", "key_1")),
        ("POST", "/v1/jobs/job_1/cancel", ("jobs.cancel", "job_1")),
        ("GET", "/v1/plans/plan_1", ("plans.read", "plan_1")),
        ("GET", "/metrics", ("GET /metrics", None)),
        ("POST", "/v1/", ("POST /v1/", None)),
        ("POST", "/v1/a/b/c/d", ("POST /v1/a/b/c/d", None)),
        ("POST", "/v1/\n/x", ("POST /v1/\n/x", None)),
        ("GET", "/" + "x" * 5000, ("GET /" + "x" * 195, None)),
    ],
)
def test_requests_have_names_in_the_audit_log(method, path, expected):
    assert audit_name(method, path) == expected
