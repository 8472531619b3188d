"""Messages are what the receiver has made room for, or they are refused where they are sent."""

import pytest
import torch

from stagewright.core.errors import InvalidInput
from stagewright.core.graph import Boundary
from stagewright.core.schedule import Action
from stagewright.core.tensors import TensorSpec
from stagewright.runtime.messages import Connections, Message, incoming, message_of
from stagewright.schedules.named import make_schedule

SPECS = (
    TensorSpec(name="h", shape=(2, 3), dtype="float32", requires_grad=True),
    TensorSpec(name="mask", shape=(2,), dtype="int64"),
)


def connections():
    boundary = Boundary(after=0, tensors=SPECS)
    return Connections(0, None, None, [0, 1], [boundary], torch.device("cpu"))


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
        connections().send(Message(False, 1, 0), 1, [tensor, mask])
    assert f"activation 'h' for stage 1 is {found}, but float32 (2, 3) was planned" in str(
        caught.value
    )


def test_gradients_are_of_tensors_that_have_one():
    with pytest.raises(InvalidInput, match="the gradient of 'h' for stage 0 is float64"):
        connections().send(Message(True, 0, 0), 1, [torch.zeros(2, 3, dtype=torch.float64)])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "zbv", "dualpipev"])
def test_every_message_is_expected_once_by_the_rank_that_reads_it(name):
    chunks = 2 if name in ("zbv", "dualpipev") else 1
    schedule = make_schedule(name, 4, 6, chunks=chunks)
    sent = [
        (message, sender, schedule.rank_of(message.stage, message.microbatch))
        for sender, actions in enumerate(schedule.ranks)
        for action in actions
        if (message := message_of(action, 4)) is not None
    ]
    expected = [
        (message, sender, receiver)
        for receiver in range(len(schedule.ranks))
        for sender, messages in enumerate(incoming(schedule.ranks, schedule, receiver))
        for message in messages
    ]
    across = [entry for entry in sent if entry[1] != entry[2]]
    assert len(set(across)) == len(across)
    assert sorted(map(str, expected)) == sorted(map(str, across))


def test_the_ends_send_nothing():
    assert message_of(Action.model_validate("3F0"), 4) is None
    assert message_of(Action.model_validate("0B0"), 4) is None
    assert message_of(Action.model_validate("1W0"), 4) is None
    assert message_of(Action.model_validate("1I0"), 4) == Message(True, 0, 0)
