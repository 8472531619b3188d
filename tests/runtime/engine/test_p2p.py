"""Messages are what the receiver has made room for, or they are refused where they are sent."""

import pytest
import torch
import torch.distributed as dist

from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.schedule import Action
from stagewright.runtime.engine.p2p import (
    Message,
    P2PChannels,
    list_incoming,
    messages_received_by,
    messages_sent_by,
)
from stagewright.runtime.partition.routes import TensorRoute, TensorRoutes
from stagewright.schedules.make_schedule import make_schedule

SPECS = (
    TensorSpec(name="h", shape=(2, 3), dtype="float32", requires_grad=True),
    TensorSpec(name="mask", shape=(2,), dtype="int64"),
)


ROUTE = TensorRoute(0, 1, SPECS)


def channels():
    return P2PChannels(0, {}, [0, 1], torch.device("cpu"))


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16 (2, 3)"),
        (torch.zeros(2, 4), "float32 (2, 4)"),
    ],
)
def test_another_dtype_or_shape_is_refused(tensor, found):
    mask = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidInput) as caught:
        channels().send(Message(ROUTE, False, 0), 1, [tensor, mask])
    assert f"activation 'h' for stage 1 is {found}, but float32 (2, 3) was planned" in str(
        caught.value
    )


def test_gradients_are_of_tensors_that_have_one():
    with pytest.raises(InvalidInput, match="the gradient of 'h' for stage 0 is float64"):
        channels().send(Message(ROUTE, True, 0), 1, [torch.zeros(2, 3, dtype=torch.float64)])


RELAYS = TensorRoutes([TensorRoute(stage, stage + 1, SPECS) for stage in range(3)], 4)
SKIPS = TensorRoutes([*RELAYS.all, TensorRoute(0, 3, SPECS), TensorRoute(1, 3, SPECS)], 4)


@pytest.mark.parametrize("routes", [RELAYS, SKIPS], ids=["relays", "skips"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "zbv", "dualpipev"])
def test_every_message_is_expected_once_by_the_rank_that_reads_it(name, routes):
    chunks = 2 if name in ("zbv", "dualpipev") else 1
    schedule = make_schedule(name, 4, 6, chunks=chunks)
    sent = [
        (message, sender, schedule.rank_of(message.receiving_stage, message.microbatch))
        for sender, actions in enumerate(schedule.ranks)
        for action in actions
        for message in messages_sent_by(action, routes)
    ]
    expected = [
        (message, sender, receiver)
        for receiver in range(len(schedule.ranks))
        for sender, messages in enumerate(list_incoming(schedule.ranks, schedule, routes, receiver))
        for message in messages
    ]
    read = [
        m
        for actions in schedule.ranks
        for action in actions
        for m in messages_received_by(action, routes)
    ]
    across = [entry for entry in sent if entry[1] != entry[2]]
    assert len(set(across)) == len(across)
    assert sorted(map(str, expected)) == sorted(map(str, across))
    assert sorted(map(str, read)) == sorted(str(message) for message, _, _ in sent)


def test_the_ends_send_nothing():
    assert messages_sent_by(Action.model_validate("3F0"), RELAYS) == []
    assert messages_sent_by(Action.model_validate("0B0"), RELAYS) == []
    assert messages_sent_by(Action.model_validate("1W0"), RELAYS) == []
    assert messages_sent_by(Action.model_validate("1I0"), RELAYS) == [
        Message(RELAYS.all[0], True, 0)
    ]


def test_the_nearest_stage_comes_first():
    def stages(messages):
        return [(message.sending_stage, message.receiving_stage) for message in messages]

    assert stages(messages_sent_by(Action.model_validate("0F0"), SKIPS)) == [(0, 1), (0, 3)]
    assert stages(messages_received_by(Action.model_validate("3F0"), SKIPS)) == [
        (2, 3),
        (1, 3),
        (0, 3),
    ]
    assert stages(messages_sent_by(Action.model_validate("3B0"), SKIPS)) == [(3, 2), (3, 1), (3, 0)]
    assert stages(messages_received_by(Action.model_validate("1B0"), SKIPS)) == [(2, 1), (3, 1)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_dtypes_that_nccl_does_not_know_travel_as_bytes(monkeypatch, dtype, shape):
    """NCCL refused them in the first step."""
    spec = TensorSpec(name="h", shape=shape, dtype=str(dtype).removeprefix("torch."))
    message = Message(TensorRoute(0, 1, (spec,)), False, 0)
    sent = []
    monkeypatch.setattr(dist, "isend", lambda tensor, *args, **kwargs: sent.append(tensor))
    tensor = torch.ones(shape).to(dtype)
    P2PChannels(0, {(0, 1): None}, [0, 1], torch.device("cpu")).send(message, 1, [tensor])
    assert sent[0].dtype == torch.uint8

    def receive(room, *args, **kwargs):
        assert room.dtype == torch.uint8
        room.copy_(sent[0])

    monkeypatch.setattr(dist, "irecv", receive)
    receiver = P2PChannels(1, {(0, 1): None}, [0, 1], torch.device("cpu"))
    receiver.begin([[message], []], [message], {})
    (found,) = receiver.receive(message, 0)
    assert found.shape == shape
    assert found.dtype == dtype
    assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))
