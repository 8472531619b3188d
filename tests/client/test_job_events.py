"""Events come once and in order, whatever happens to connections."""

from __future__ import annotations

import pytest

from stagewright.client.job_events import EventParser, follow_events
from stagewright.client.methods.jobs import wait
from stagewright.client.progress import describe_event
from stagewright.client.sans_io import TransportFailure
from stagewright.core.errors import (
    Cancelled,
    DeadlineExceeded,
    NotFound,
    OutOfMemory,
    StagewrightError,
    Unreachable,
)
from stagewright.core.service.jobs import JobEvent
from stagewright.core.service.problems import TYPE_PREFIX
from tests.client.world import World, job, problem, reply


def event(number: int, kind: str, data: str = "{}") -> str:
    return f"id: {number}\nevent: {kind}\ndata: {data}\n\n"


STREAM = reply(200)
ENDED = ""
LOST = TransportFailure("connection reset")
WHOLE = "".join(
    [
        event(1, "queued"),
        ": keep alive\n\n",
        event(2, "progress", '{"step": "a\u2028b", "done": 1, "total": 2}').replace("\n", "\r\n"),
        event(3, "succeeded"),
    ]
)


def test_events_are_read_whole_wherever_the_text_is_cut():
    whole = list(EventParser().feed(WHOLE))
    assert [entry.number for entry in whole] == [1, 2, 3]
    assert whole[1].data == {"step": "a\u2028b", "done": 1, "total": 2}
    for cut in range(len(WHOLE)):
        parser = EventParser()
        assert [*parser.feed(WHOLE[:cut]), *parser.feed(WHOLE[cut:])] == whole


@pytest.mark.parametrize("text", ["data: {}\n\n", "id: x\nevent: a\ndata: {}\n\n", "data: [\n\n"])
def test_what_is_no_event_of_a_job_is_an_error(text):
    with pytest.raises(StagewrightError, match="invalid event"):
        list(EventParser().feed(text))


def test_a_broken_stream_is_taken_up_where_it_broke():
    world = World(
        STREAM, event(1, "queued") + event(2, "started") + "id: 3\nevent: prog", LOST,
        TransportFailure("refused", was_sent=False),
        STREAM, event(2, "started") + event(3, "progress"), ENDED, reply(200, job("running")),
        reply(503),
        STREAM, event(4, "succeeded"),
    )  # fmt: skip
    assert [entry.number for entry in world.events(follow_events("job_1"))] == [1, 2, 3, 4]
    opened = [call for call in world.calls if call.path.endswith("/events")]
    resumed = [call.headers.get("Last-Event-ID") for call in opened]
    assert resumed == [None, "2", "2", "3", "3"]


def test_a_job_whose_last_event_was_heard_before_is_over():
    world = World(STREAM, ENDED, reply(200, job("succeeded")))
    assert list(world.events(follow_events("job_1", after=3))) == []
    assert world.calls[0].headers["Last-Event-ID"] == "3"


def test_a_service_that_stays_away_is_given_up():
    world = World(STREAM, event(1, "queued"), *[LOST] * 50)
    with pytest.raises(Unreachable):
        list(world.events(follow_events("job_1")))
    assert sum(world.slept) <= 10


def test_an_unknown_job_is_not_found_at_once():
    with pytest.raises(NotFound):
        list(World(problem(404, "not-found")).events(follow_events("job_x")))


def test_waiting_ends_at_its_limit_and_the_job_goes_on():
    world = World(STREAM, *[event(n, "progress") for n in range(1, 50)])

    def passing(_: object) -> None:
        world.now_s += 1

    with pytest.raises(DeadlineExceeded, match="job_1 is still running"):
        world.run(wait("job_1", timeout_s=3, progress=passing))


def test_waiting_gives_the_job_and_tells_what_happens():
    seen = []
    world = World(STREAM, WHOLE, reply(200, job("succeeded")))
    found = world.run(wait("job_1", progress=lambda entry: seen.append(entry.kind)))
    assert found.state == "succeeded"
    assert seen == ["queued", "progress", "succeeded"]


@pytest.mark.parametrize(
    ("state", "kind", "error"),
    [
        ("failed", "out-of-memory", OutOfMemory),
        ("failed", "deadline-exceeded", DeadlineExceeded),
        ("cancelled", None, Cancelled),
    ],
)
def test_a_job_that_failed_raises_why(state, kind, error):
    why = kind and {
        "type": TYPE_PREFIX + kind, "title": "", "status": 422, "detail": "blocks.3 and 2 GiB",
        "kinds": [error.__name__],
    }  # fmt: skip
    world = World(STREAM, event(1, state), reply(200, job(state, problem=why)))
    with pytest.raises(error, match=r"blocks\.3|job_1"):
        world.run(wait("job_1"))


def test_an_event_in_words():
    data = {"step": "measuring", "layer": "blocks.3\x1b[2J", "done": 4, "total": 12}
    told = JobEvent(number=1, kind="progress", data=data)
    assert describe_event(told) == "measuring layer blocks.3[2J (4 of 12)"
    assert describe_event(JobEvent(number=2, kind="started", data={"at": "now"})) == "started"
    assert (
        describe_event(JobEvent(number=3, kind="requeued", data={"message": "lost"}))
        == "requeued: lost"
    )
