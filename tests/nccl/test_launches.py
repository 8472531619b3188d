"""The replay finds what NCCL's order would block, and says who waits for whom."""

import pytest

from tests.nccl.launches import (
    Connect,
    Cuda,
    DeviceSynchronise,
    FirstUse,
    HostMeeting,
    HostRead,
    InThread,
    Launch,
    StreamWait,
    find_deadlock,
)

UP, DOWN = ("up", "pair 0-1"), ("down", "pair 0-1")


def message(sender, queue):
    return Launch(queue, (0, 1), f"message from {sender}", sender)


def total(queue=("all",), ranks=(0, 1), what="sum"):
    return Launch(queue, ranks, what)


READ = HostRead("a value")


def test_messages_of_two_ways_pass_each_other():
    logs = [
        [message(0, UP), message(1, DOWN), StreamWait(1), READ],
        [message(1, DOWN), message(0, UP), StreamWait(1), READ],
    ]
    assert find_deadlock(logs) is None


def test_two_ranks_that_send_first_on_one_stream_are_shown_as_a_circle():
    logs = [
        [message(0, UP), message(1, UP), StreamWait(1)],
        [message(1, UP), message(0, UP), StreamWait(1)],
    ]
    assert find_deadlock(logs) == (
        "ranks wait for each other in a circle:\n"
        "rank 0: the host has launched everything; message from 1, behind message from 0, on up "
        "pair 0-1, waits for rank 1\n"
        "rank 1: the host has launched everything; message from 0, behind message from 1, on up "
        "pair 0-1, waits for rank 0"
    )


def test_what_is_launched_before_a_stream_waits_frees_the_other_rank():
    """Hosts run ahead of their streams, which keep what was launched behind a wait."""
    theirs = [message(0, UP), StreamWait(0), message(1, DOWN), READ]
    assert find_deadlock([[message(1, DOWN), StreamWait(0), message(0, UP), READ], theirs])
    assert not find_deadlock([[message(1, DOWN), message(0, UP), StreamWait(0), READ], theirs])


@pytest.mark.parametrize(
    ("entry", "stuck"), [(READ, False), (DeviceSynchronise(), True)], ids=["read", "synchronise"]
)
def test_a_device_waits_for_receives_that_its_values_do_not_need(entry, stuck):
    """Each rank waits for its device, and so for a message that the other sends afterwards."""
    logs = [
        [message(1, DOWN), entry, message(0, UP)],
        [message(0, UP), entry, message(1, DOWN)],
    ]
    assert (find_deadlock(logs) is not None) == stuck


def test_collectives_must_come_in_one_order():
    first, second = total(what="first"), total(what="second")
    assert find_deadlock([[first, second], [first, second]]) is None
    assert "waits for rank 1" in find_deadlock([[first, second], [second, first]])


def test_a_communicator_made_at_first_use_waits_for_all_its_members():
    one, two = Connect(("one",), (0, 1)), Connect(("two",), (0, 1))
    assert find_deadlock([[one, two], [one, two]]) is None
    found = find_deadlock([[one, two], [two, one]])
    assert "rank 0: the host waits (connecting one) for rank 1" in found


def test_a_partner_that_never_comes_is_no_circle():
    found = find_deadlock([[message(0, UP)], []])
    assert found.startswith("no rank can go on, and not because of each other:")


def test_a_kernel_loaded_at_first_use_waits_for_receives_posted_before():
    """Each rank's first kernel makes what it sends, and the other waits for that."""
    logs = [
        [message(1, DOWN), FirstUse("mm"), message(0, UP), StreamWait(0)],
        [message(0, UP), FirstUse("mm"), message(1, DOWN), StreamWait(0)],
    ]
    assert find_deadlock(logs) is None
    assert "rank 0: the host waits (mm)" in find_deadlock(logs, Cuda(loads_lazily=True))


def test_on_one_connection_a_second_receive_holds_up_the_work_behind_it():
    two = [message(1, DOWN), message(1, DOWN)]
    theirs = [message(0, UP), StreamWait(0), message(1, DOWN), message(1, DOWN)]
    single = Cuda(has_one_connection=True)
    assert find_deadlock([[*two, message(0, UP)], theirs]) is None
    assert find_deadlock([[*two, message(0, UP)], theirs], single) is not None
    assert find_deadlock([[message(0, UP), *two], theirs], single) is None


def gloo(sender, receiver, number=1):
    return HostMeeting((f"gloo message {sender} to {receiver}", f"number {number}"), (0, 1))


def test_hosts_that_wait_for_a_message_over_gloo_and_for_a_device_are_shown_as_a_circle():
    """Rank 0 sends after it has read a value, for which rank 1 sends after that message."""
    theirs = [gloo(0, 1), message(1, DOWN)]
    assert not find_deadlock([[message(1, DOWN), StreamWait(0), gloo(0, 1), READ], theirs])
    found = find_deadlock([[message(1, DOWN), StreamWait(0), READ, gloo(0, 1)], theirs])
    assert found == (
        "ranks wait for each other in a circle:\n"
        "rank 0: the host waits (a value); message from 1, on down pair 0-1, waits for rank 1\n"
        "rank 1: the host waits (gloo message 0 to 1 number 1) for rank 0"
    )


def test_messages_over_gloo_come_in_one_order():
    first, second = gloo(0, 1, 1), gloo(1, 0, 1)
    assert find_deadlock([[first, second], [first, second]]) is None
    assert "circle" in find_deadlock([[first, second], [second, first]])


def test_threads_of_a_host_do_not_wait_for_each_other():
    """One thread sends, another receives; in one thread their order would block."""
    first, second = gloo(0, 1), gloo(1, 0)
    logs = [[InThread("out"), first, InThread("in"), second], [InThread("in"), second, first]]
    assert "thread 'in'" in find_deadlock([logs[0], [InThread("in"), second, gloo(0, 1, 2)]])
    assert find_deadlock(logs) is None


def test_a_stream_cannot_wait_for_what_another_thread_has_yet_to_launch():
    main = [InThread("MainThread"), Connect(("all",), (0, 1)), message(0, UP)]
    stage = [InThread("stage"), StreamWait(0), READ]
    theirs = [Connect(("all",), (0, 1)), message(0, UP)]
    assert find_deadlock([[*stage, *main], theirs]) is None
    assert "rank 0: the host waits (connecting all)" in find_deadlock([[*stage, *main], []])
