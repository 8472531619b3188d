"""Stages side by side on threads, as on several devices: the same numbers, all threads ended."""

import threading

import pytest
import torch
from torch import nn

from stagewright.runtime.local.checkpoint_state import is_checkpointing
from stagewright.runtime.local.dependency import fork, join
from stagewright.runtime.local.run import DeviceThreads, LocalStage, clock_order, run_stages
from stagewright.runtime.local.streams import CopyStreams, StageDevice, full_device
from stagewright.runtime.local.thread_modes import ThreadModes


def apart(count):
    """Devices that count as several devices, all of them this CPU."""
    return [StageDevice(torch.device("cpu", index)) for index in range(count)]


def chain(modules, places, *, checkpointed=0):
    def function(module):
        return lambda microbatch, values: (module(*values),)

    return [
        LocalStage(function(module), module, place, checkpointed)
        for module, place in zip(modules, places, strict=True)
    ]


def count_stage_threads():
    # Not all threads: those that earlier tests of this process left behind may end at any time.
    return sum(thread.name.startswith("stage") for thread in threading.enumerate())


def test_the_clock():
    assert list(clock_order(3, 2)) == [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    assert list(clock_order(1, 3)) == [[(0, 0)], [(0, 1)], [(0, 2)]]


@pytest.mark.parametrize("checkpointed", [0, 2, 3])
def test_threads_change_no_number(checkpointed):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    x = torch.rand(6, 3, requires_grad=True)
    nn.Sequential(*modules)(x).pow(2).sum().backward()
    wanted = [x.grad, *(p.grad for module in modules for p in module.parameters())]
    y = x.detach().clone().requires_grad_()
    for module in modules:
        module.zero_grad()
    before = count_stage_threads()
    outputs = run_stages(
        chain(modules, apart(3), checkpointed=checkpointed), [(part,) for part in y.chunk(3)]
    )
    assert count_stage_threads() == before
    torch.cat([value for (value,) in outputs]).pow(2).sum().backward()
    found = [y.grad, *(p.grad for module in modules for p in module.parameters())]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_stages_of_a_clock_run_at_the_same_time():
    """Each waits for the other; one after the other they would wait for ever."""
    meeting = threading.Barrier(2, timeout=20)

    class Meet(nn.Module):
        def __init__(self, alone):
            super().__init__()
            self.alone = alone

        def forward(self, x):
            if int(x) != self.alone:
                meeting.wait()
            return x

    stages = chain([Meet(0), Meet(2)], apart(2))
    run_stages(stages, [(torch.tensor(float(i)),) for i in range(3)])


def test_what_is_left_is_taken_where_it_is_wanted():
    calls = []

    def first(microbatch, values):
        (x,) = values
        return x, x * 10

    def middle(microbatch, values):
        calls.append(len(values))
        return values

    def last(microbatch, values):
        x, left = values
        return (x + left,)

    module = nn.Identity()
    a, b, c = apart(3)
    stages = [
        LocalStage(first, module, a, 2, leaves=("ten times",)),
        LocalStage(middle, module, b, 2),
        LocalStage(last, module, c, 2, takes=("ten times",)),
    ]
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    outputs = run_stages(stages, [(part,) for part in x.chunk(2)])
    assert [value.item() for (value,) in outputs] == [11, 22]
    assert calls == [1, 1]
    sum(value for (value,) in outputs).sum().backward()
    assert x.grad.tolist() == [11, 11]


@pytest.mark.parametrize("checkpointed", [0, 2])
def test_the_first_error_of_a_clock_is_raised_and_threads_end(checkpointed):
    class Fail(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.error = error

        def forward(self, x):
            if self.error and int(x):
                raise self.error
            return x

    modules = [Fail(None), Fail(KeyError("a")), Fail(None)]
    before = count_stage_threads()
    with pytest.raises(KeyError) as caught:
        run_stages(
            chain(modules, apart(3), checkpointed=checkpointed),
            [(torch.tensor(float(i)),) for i in range(3)],
        )
    assert caught.value.__notes__ == ["in stage 1, micro-batch 1"]
    assert count_stage_threads() == before
    assert not is_checkpointing()


@pytest.mark.parametrize("devices", [[None] * 3, [torch.device("cpu", i) for i in range(3)]])
def test_tasks_of_a_clock_all_run_before_an_error_is_raised(devices):
    ran = []

    def fail():
        raise LookupError("first")

    def fail_too():
        raise ValueError("second")

    with DeviceThreads(devices) as workers, pytest.raises(LookupError):
        workers.run([(0, fail), (1, fail_too), (2, lambda: ran.append(2))])
    assert ran == [2]


def test_modes_of_the_caller_hold_on_the_threads():
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append((ThreadModes.current(), (x @ x).dtype, threading.current_thread().name))
            return x

    stages = chain([Look(), Look()], apart(2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = ThreadModes.current()
        run_stages(stages, [(torch.rand(2, 2),)])
    with torch.inference_mode():
        run_stages(stages, [(torch.rand(2, 2),)])
    assert [found for found, _, _ in seen[:2]] == [wanted] * 2
    assert [dtype for _, dtype, _ in seen[:2]] == [torch.bfloat16] * 2
    assert all(found.inference for found, _, _ in seen[2:])
    assert threading.current_thread().name not in {name for _, _, name in seen}


class Log(torch.autograd.Function):
    """Notes when its backward runs."""

    @staticmethod
    def forward(ctx, x, name, log):
        ctx.note = name, log
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        name, log = ctx.note
        log.append(name)
        return gradient, None, None


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_turns_the_order_of_backwards_round(tied):
    """The engine prefers what was made last, counted on every thread apart."""
    log = []
    first, second = (torch.rand(2, requires_grad=True) for _ in range(2))
    for _ in range(100):
        first = first * 1
    (a,), token = fork((Log.apply(first, "first", log),))
    made = []

    def make():
        (x,) = join((second,), token) if tied else (second,)
        made.append(Log.apply(x, "second", log))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    torch.cat([a, *made]).sum().backward()
    assert log == (["second", "first"] if tied else ["first", "second"])


def edges_to(output, name):
    """Edges of the graph behind a tensor that lead to nodes of a class."""
    count, todo, seen = 0, [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for source, _ in node.next_functions:
            count += type(source).__name__ == name
            todo.append(source)
    return count


@pytest.mark.parametrize("checkpointed", [0, 3])
@pytest.mark.parametrize("input_has_gradient", [True, False])
def test_micro_batches_of_every_stage_are_tied(checkpointed, input_has_gradient):
    modules = [nn.Linear(1, 1), nn.Linear(1, 1)]
    x = torch.rand(3, 1, requires_grad=input_has_gradient)
    stages = chain(modules, apart(2), checkpointed=checkpointed)
    outputs = run_stages(stages, [(part,) for part in x.chunk(3)])
    forks = edges_to(torch.cat([value for (value,) in outputs]), "_ForkBackward")
    outermost, between, tokens = 3, 3, 4
    if not input_has_gradient and not checkpointed:
        tokens = 2  # none of the first stage's, whose layers would compute an unwanted gradient
    assert forks == outermost + between + tokens


def test_devices_have_one_name():
    assert full_device("cpu:0") == full_device("cpu") == torch.device("cpu")
    assert full_device("meta") == torch.device("meta")
    (place,) = CopyStreams().stage_devices([torch.device("cpu")])
    assert place == StageDevice(torch.device("cpu"))
