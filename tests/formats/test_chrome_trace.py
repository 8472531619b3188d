"""A trace Perfetto can read."""

import json
from itertools import pairwise

from stagewright.core.cluster.cluster import Cluster
from stagewright.formats.chrome_trace import chrome_trace
from stagewright.planner.plan import plan
from stagewright.planner.simulator.plan_timeline import plan_timeline
from stagewright.planner.simulator.simulate import StageTimes, simulate
from stagewright.schedules.make_schedule import make_schedule
from tests.builders import chain_profile, random_profile


def trace_of(profile, cluster):
    timeline = plan_timeline(plan(profile, cluster, num_microbatches=3))
    return timeline, json.loads(chrome_trace(timeline))


def test_work_is_on_its_ranks_track_in_microseconds():
    _, trace = trace_of(chain_profile([1.0, 1.0]), Cluster.uniform(2))
    work = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert len(work) == 2 * 2 * 3
    assert (work["1F0"]["ts"], work["1F0"]["dur"], work["1F0"]["tid"]) == (1e6, 1e6, 1)
    assert work["0B2"]["cat"] == "B"
    assert work["0B2"]["args"] == {"stage": 0, "microbatch": 2}


def test_messages_are_asynchronous_pairs():
    timeline, trace = trace_of(
        chain_profile([1.0, 1.0], forward_bytes=1000), Cluster.uniform(2, latency_s=0.1)
    )
    begins = [event for event in trace["traceEvents"] if event["ph"] == "b"]
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "e"}
    sends = [event for event in timeline.events if str(event.kind).startswith("send")]
    assert len(begins) == len(ends) == len(sends) == 6
    assert all(ends[event["id"]]["ts"] > event["ts"] for event in begins)


def test_every_track_has_a_name_and_nothing_overlaps_on_it():
    _, trace = trace_of(random_profile(4, 9), Cluster.uniform(3, bandwidth_bytes_per_s=1e7))
    events = trace["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"rank 0", "rank 1"} <= names
    for rank in {event["tid"] for event in events if event["ph"] == "X"}:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                     if e["ph"] == "X" and e["tid"] == rank)  # fmt: skip
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(row))


def test_sums_and_memory_stand_apart_from_work():
    times = StageTimes([1, 1], [1, 1], sync_s=[2, 0], saved_bytes=[10, 20])
    timeline = simulate(make_schedule("zero_bubble", 2, 2, replicas=(2, 2)), times)
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    assert [event["tid"] for event in events if event["name"] == "sync" and event["ph"] == "b"] == [
        0,
        1,
    ]
    counted = [event for event in events if event["name"] == "activations of rank 3"]
    assert [(event["ph"], event["ts"], event["args"]["bytes"]) for event in counted] == [
        ("C", 1e6, 20),
        ("C", 3e6, 0),
    ]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"1I1", "0W0"}


def test_two_timelines_stand_one_below_the_other():
    made = plan(chain_profile([1.0, 1.0], forward_bytes=8), Cluster.uniform(2), num_microbatches=3)
    predicted = plan_timeline(made)
    measured = predicted.model_copy(update={"source": "measured"})
    both = json.loads(chrome_trace(predicted, measured))["traceEvents"]
    alone = json.loads(chrome_trace(predicted))["traceEvents"]
    assert both[: len(alone)] == alone
    assert {event["pid"] for event in both} == {0, 1, 2, 3}
    names = [e["args"]["name"] for e in both if e["name"] == "process_name"]
    assert names[::2] == ["ranks (simulated)", "ranks (measured)"]
    opened = [event["id"] for event in both if event["ph"] == "b"]
    assert len(opened) == len(set(opened)) > 0
