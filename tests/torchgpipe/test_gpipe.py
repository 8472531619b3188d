"""`GPipe` as torchgpipe documents it."""

import copy
import gc
import pickle
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from stagewright.torchgpipe import GPipe, is_checkpointing, is_recomputing

MODES = ["always", "except_last", "never"]


def linears(count, size=2):
    return nn.Sequential(*[nn.Linear(size, size) for _ in range(count)])


def on_cpu(module, balance, **options):
    return GPipe(module, balance, devices=["cpu"] * len(balance), **options)


class Function(nn.Module):
    """A layer from a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def nodes_named(output, name):
    """Nodes of the graph behind a tensor, by class name."""
    found, todo, seen = 0, [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += type(node).__name__ == name
        todo += [source for source, _ in node.next_functions]
    return found


@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]])
def test_it_is_a_sequence_of_the_layers(balance):
    layers = linears(3)
    model = on_cpu(layers, balance)
    assert len(model) == 3
    assert list(model) == list(layers)
    assert [model[i] for i in (0, 1, 2, -1, -3)] == [layers[i] for i in (0, 1, 2, -1, -3)]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            model[outside]


def test_attributes():
    model = GPipe(linears(3), iter([1, 2]), devices=iter(["cpu"] * 5), chunks=4)
    assert (model.balance, model.chunks, model.checkpoint) == ([1, 2], 4, "except_last")
    assert model.devices == [torch.device("cpu")] * 2
    assert isinstance(model.partitions, nn.ModuleList)
    assert [type(part) for part in model.partitions] == [nn.Sequential] * 2


def test_names_are_torchgpipes():
    layers = OrderedDict(a=nn.Linear(1, 1), b=nn.BatchNorm1d(1), c=nn.Linear(1, 1, bias=False))
    model = on_cpu(nn.Sequential(layers), [2, 1])
    assert [name for name, _ in model.named_parameters()] == [
        "partitions.0.a.weight", "partitions.0.a.bias", "partitions.0.b.weight",
        "partitions.0.b.bias", "partitions.1.c.weight",
    ]  # fmt: skip
    assert "partitions.0.b.running_mean" in model.state_dict()
    with pytest.raises(AttributeError):
        model.a  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(balance=None), ValueError, "balance is required.*torchgpipe.balance"),
        (dict(balance=[1]), ValueError, r"module: 2, sum of balance: 1"),
        (dict(balance=[3]), ValueError, r"module: 2, sum of balance: 3"),
        (dict(balance=[0, 2]), ValueError, "must be positive integer"),
        (dict(balance=[-1, 3]), ValueError, "must be positive integer"),
        (dict(balance=[2], chunks=0), ValueError, "number of chunks must be positive integer"),
        (dict(balance=[2], chunks=-1), ValueError, "number of chunks must be positive integer"),
        (dict(balance=[2], chunks=None), TypeError, "NoneType"),
        (
            dict(balance=[2], checkpoint="sometimes"),
            ValueError,
            "checkpoint is not one of 'always', 'except_last', or 'never'",
        ),
        (dict(balance=[1, 1], devices=["cpu"]), IndexError, "devices: 1, partitions: 2"),
        (dict(balance=[1, 1], module=nn.ModuleList()), TypeError, "must be nn.Sequential"),
    ],
)
def test_arguments_that_are_refused(arguments, error, words):
    arguments = {"module": linears(2), "devices": ["cpu", "cpu"], **arguments}
    with pytest.raises(error, match=words):
        GPipe(**arguments)


def test_layers_and_parameters_may_not_be_there_twice():
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate children"):
        on_cpu(nn.Sequential(layer, layer), [1, 1])
    tied = nn.Linear(1, 1)
    tied.weight = layer.weight
    with pytest.raises(ValueError, match="duplicate parameters"):
        on_cpu(nn.Sequential(layer, tied), [1, 1])


def test_it_is_not_moved_but_converted():
    model = on_cpu(linears(2), [1, 1])
    for move in (
        model.cuda, model.cpu, lambda: model.to("cpu"), lambda: model.to(0),
        lambda: model.to(torch.device("cpu")), lambda: model.to(torch.rand(1)),
        lambda: model.to(device="cpu"), lambda: model.to(tensor=torch.rand(1)),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="denied to move"):
            move()
    for convert in (model.half, lambda: model.to(torch.double), lambda: model.to(dtype=torch.half)):
        convert()
        assert model[0].weight.dtype != torch.float


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(("size", "chunks"), [(8, 4), (7, 4), (9, 4), (2, 4), (1, 4), (5, 1)])
def test_outputs_and_gradients_are_the_modules(checkpoint, size, chunks):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    module = module.double()
    model = on_cpu(copy.deepcopy(module), [2, 2, 1], chunks=chunks, checkpoint=checkpoint)
    x = torch.rand(size, 3, dtype=torch.double, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, found = module(x), model(y)
    torch.testing.assert_close(found, expected)
    expected.pow(2).mean().backward()
    found.pow(2).mean().backward()
    torch.testing.assert_close(y.grad, x.grad)
    for ours, theirs in zip(model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_micro_batches_are_torch_chunks():
    sizes = []
    model = on_cpu(nn.Sequential(Function(lambda x: sizes.append(len(x)) or x)), [1], chunks=4)
    for size in (9, 2, 0):
        model(torch.rand(size, 1))
    assert sizes == [3, 3, 3, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("checkpoint", "count"), [("always", 3), ("except_last", 2), ("never", 0)])
def test_checkpoint_modes(checkpoint, count):
    model = on_cpu(linears(1), [1], chunks=3, checkpoint=checkpoint)
    x = torch.rand(3, 2)
    assert nodes_named(model(x), "CheckpointBackward") == count
    assert nodes_named(model(x), "RecomputeBackward") == count
    model.eval()
    assert nodes_named(model(x), "CheckpointBackward") == 0


def test_a_model_knows_when_it_is_computed_again():
    seen = []

    def look(x):
        seen.append((is_checkpointing(), is_recomputing()))
        return x

    model = on_cpu(nn.Sequential(Function(look), nn.Linear(1, 1)), [2], chunks=2)
    output = model(torch.rand(2, 1))
    assert seen == [(True, False), (False, False)]
    output.sum().backward()
    assert seen[2:] == [(False, True)]
    assert not is_checkpointing()
    assert not is_recomputing()


def test_without_gradients_nothing_is_recorded():
    model = on_cpu(linears(2), [1, 1], chunks=2)
    inner = []
    for part in model.partitions:
        part.register_forward_hook(lambda *found: inner.append(found[-1]))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert model(torch.rand(4, 2)).grad_fn is None
    assert len(inner) == 8
    assert all(value.grad_fn is None for value in inner)


@pytest.mark.parametrize("checkpoint", MODES)
def test_an_exception_ends_the_clock_it_happens_in(checkpoint):
    class Expected(Exception):
        pass

    def fail(x):
        raise Expected

    calls = []
    layers = [
        nn.Identity(),
        nn.Identity(),
        Function(lambda x: calls.append(1) or x),
        Function(fail),
    ]
    model = on_cpu(nn.Sequential(*layers), [1, 1, 1, 1], chunks=3, checkpoint=checkpoint)
    with pytest.raises(Expected) as caught:
        model(torch.rand(3, 1))
    assert len(calls) == 2
    assert caught.value.__notes__ == ["in stage 3, micro-batch 0"]
    assert not is_checkpointing()


def test_tuples_in_and_out():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, pair):
            a, b = pair
            return self.a(a), self.b(b)

    model = on_cpu(nn.Sequential(Two(), Two()), [1, 1], chunks=2)
    a, b = (torch.rand(10, 1, requires_grad=True) for _ in "ab")
    first, second = model((a, b))
    (first + second).mean().backward()
    assert a.grad is not None
    assert b.grad is not None

    single = on_cpu(nn.Sequential(Function(lambda x: (x[0] * 2,))), [1], chunks=2)
    assert isinstance(single((a,)), tuple)
    with pytest.raises(TypeError, match="positional argument"):
        model(a, b)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("returned", ["hello", None, 1.0, [torch.rand(1)], ()])
def test_layers_return_tensors(checkpoint, returned):
    model = on_cpu(nn.Sequential(Function(lambda x: returned)), [1], checkpoint=checkpoint)
    with pytest.raises(TypeError, match=r"expected Tensor.*the output of partition 0"):
        model(torch.rand(1))
    inner = on_cpu(nn.Sequential(Function(lambda x: (x, "hello")), nn.Identity()), [1, 1])
    with pytest.raises(TypeError, match="expected Tensor, but got str"):
        inner(torch.rand(1))


@pytest.mark.parametrize("value", ["hello", None, [torch.rand(1)], (torch.rand(1), 2), (), 42])
def test_inputs_are_tensors(value):
    for model in (on_cpu(linears(1), [1]), GPipe(nn.Sequential(), [])):
        with pytest.raises(TypeError, match="expected Tensor"):
            model(value)
    with pytest.raises(TypeError, match="got tuple"):
        on_cpu(linears(1), [1])(((torch.rand(1),),))


def test_inputs_have_as_many_micro_batches_each():
    """torchgpipe drops the rest of the longer ones."""
    model = on_cpu(nn.Sequential(Function(lambda x: x[0])), [1], chunks=4)
    assert model((torch.rand(8, 1), torch.rand(16, 1))).shape == (8, 1)
    with pytest.raises(ValueError, match=r"\[8, 2\] samples split into \[4, 2\] micro-batches"):
        model((torch.rand(8, 1), torch.rand(2, 1)))


def test_an_empty_module_returns_what_it_is_given():
    model = GPipe(nn.Sequential(), [])
    assert len(model) == 0
    x = torch.tensor([42])
    assert model(x) is x
    assert model((x,)) == (x,)


@pytest.mark.parametrize("checkpoint", MODES)
def test_tensors_without_gradients_pass(checkpoint):
    """Integers, constants, detached, twice the same, and an output the loss does not use."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x):
            y = self.linear(x)
            return torch.arange(len(x)), y.detach(), y, y, torch.ones(len(x)), x

    class Join(nn.Module):
        def forward(self, values):
            numbers, detached, first, second, ones, _ = values
            return first * numbers[:, None] + detached + 2 * second * ones[:, None], first

    def losses(run):
        torch.manual_seed(0)
        module = nn.Sequential(Fork(), Join())
        x = torch.rand(6, 1)
        output, _ = run(module)(x)
        output.sum().backward()
        return [output.sum(), *(parameter.grad for parameter in module.parameters())]

    def pipelined(module):
        return on_cpu(module, [1, 1], chunks=3, checkpoint=checkpoint)

    # Each micro-batch counts its own samples.
    whole = losses(lambda module: lambda x: tuple(
        torch.cat(parts) for parts in zip(*map(module, x.chunk(3)), strict=True)
    ))  # fmt: skip
    torch.testing.assert_close(losses(pipelined), whole)


@pytest.mark.parametrize("checkpoint", MODES)
def test_random_numbers_are_drawn_once(checkpoint):
    class Dropouts(nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = nn.functional.dropout(x)
            return x

    model = on_cpu(nn.Sequential(Dropouts(), Dropouts()), [1, 1], chunks=10, checkpoint=checkpoint)
    x = torch.rand(10, 4000, requires_grad=True)
    torch.manual_seed(0)
    output = model(x)
    after_forward = torch.get_rng_state()
    output.norm().backward()
    assert torch.equal(torch.get_rng_state(), after_forward)
    assert output.count_nonzero() > 0
    assert torch.equal(output != 0, x.grad != 0)
    torch.manual_seed(0)
    assert torch.equal(model(x), output)


def test_autocast_reaches_the_second_run():
    dtypes = []
    model = on_cpu(
        nn.Sequential(nn.Linear(2, 2), Function(lambda x: dtypes.append(x.dtype) or x)),
        [2],
        checkpoint="always",
    )
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.rand(2, 2))
    output.sum().backward()
    assert dtypes == [torch.bfloat16] * 2


@pytest.mark.parametrize("checkpoint", MODES)
def test_batch_norm_counts_a_micro_batch_once(checkpoint):
    """torchgpipe's statistics move once more in the backward of checkpointed micro-batches."""
    norm = nn.BatchNorm1d(3)
    model = on_cpu(nn.Sequential(copy.deepcopy(norm)), [1], chunks=4, checkpoint=checkpoint)
    for _ in range(2):
        x = torch.randn(8, 3) + 5
        model(x).pow(2).sum().backward()
        for part in x.chunk(4):
            norm(part)
    for ours, theirs in zip(model.buffers(), norm.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_in_place_on_a_checkpointed_input_that_has_a_gradient_fails_in_the_backward():
    model = on_cpu(
        nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True)), [1, 1], checkpoint="always"
    )
    output = model(torch.rand(1))
    with pytest.raises(
        RuntimeError, match=r"a leaf Variable that requires grad .* in-place operation"
    ):
        output.backward()


def test_in_place_within_a_partition_and_without_checkpoints():
    for balance, mode in (([2], "always"), ([1, 1], "never")):
        model = on_cpu(
            nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True)), balance, checkpoint=mode
        )
        model(torch.rand(2, 1)).sum().backward()
        assert model[0].weight.grad is not None


def test_in_place_on_an_input_without_gradient():
    """The same twice is harmless; what adds up, where torchgpipe computes wrongly, is refused."""
    relu = on_cpu(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(1, 1)), [2], checkpoint="always")
    relu(torch.randn(4, 1)).sum().backward()

    class Add(nn.Module):
        def forward(self, pair):
            value, other = pair
            other.add_(1)
            return value * other

    model = on_cpu(nn.Sequential(Add()), [1], checkpoint="always")
    output = model((torch.ones(1, requires_grad=True), torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"in-place operation.*checkpoint='never'"):
        output.backward()


def test_a_graph_can_be_gone_through_twice():
    model = on_cpu(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), [2], chunks=2)
    output = model(torch.rand(4, 2)).sum()
    output.backward(retain_graph=True)
    once = model[0].weight.grad.clone()
    output.backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * once)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_python_function_that_returns_its_input(checkpoint):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    model = on_cpu(nn.Sequential(Function(Same.apply), Function(Same.apply)), [1, 1],
                   checkpoint=checkpoint)  # fmt: skip
    x = torch.rand(4, requires_grad=True)
    assert torch.equal(model(x), x)


def test_backward_takes_the_last_micro_batch_first():
    seen = []

    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(ctx.name)
            return gradient, None

    def log(name):
        return Function(lambda x: Log.apply(x, (name, int(x[0, 0]) // 2)))

    for checkpoint in MODES:
        seen.clear()
        model = on_cpu(nn.Sequential(log("a"), log("b")), [1, 1], chunks=3, checkpoint=checkpoint)
        x = torch.tensor([[0.0], [2.0], [4.0]], requires_grad=True)
        model(x).sum().backward()
        for name in "ab":
            assert [number for found, number in seen if found == name] == [2, 1, 0]


def test_memory_of_one_micro_batch_at_a_time_is_recomputed():
    """The second micro-batch is computed again when the backward of the first has ended."""
    events = []

    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if is_recomputing():
                events.append("again")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            events.append("backward")
            return gradient

    model = on_cpu(nn.Sequential(Function(Log.apply), nn.Linear(1, 1), Function(Log.apply)), [3],
                   chunks=3, checkpoint="always")  # fmt: skip
    model(torch.rand(3, 1, requires_grad=True)).sum().backward()
    assert events == ["again", "again", "backward", "backward"] * 3


def test_it_is_copied_and_pickled():
    model = on_cpu(linears(2), [1, 1], chunks=2)
    x = torch.rand(4, 2)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)


def test_no_thread_is_left():
    model = on_cpu(linears(2), [1, 1], chunks=2)
    before = threading.active_count()
    model(torch.rand(4, 2))
    assert threading.active_count() == before


@pytest.mark.parametrize(("checkpoint", "alive"), [("always", 0), ("except_last", 1), ("never", 3)])
def test_what_is_kept_for_the_backward_and_that_nothing_is_after_it(checkpoint, alive):
    made = []

    def exponential(x):
        result = x.exp()  # which its own backward wants
        made.append(StorageWeakRef(result.untyped_storage()))
        return result.sum(1, keepdim=True)

    def count():
        return sum(not storage.expired() for storage in made)

    layers = [nn.Linear(2, 2), Function(exponential), nn.Linear(1, 2), Function(exponential)]
    model = on_cpu(nn.Sequential(*layers), [2, 2], chunks=3, checkpoint=checkpoint)
    gc.disable()  # what only a collection would free is memory a GPU does not have
    try:
        output = model(torch.rand(3, 2))
        assert count() == 2 * alive
        output.sum().backward()
        assert count() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpoint", MODES)
def test_after_an_exception_nothing_is_kept(checkpoint):
    made = []

    def note(x):
        made.append(StorageWeakRef((y := x.exp()).untyped_storage()))
        if len(made) == 4:
            raise ArithmeticError
        return y

    model = on_cpu(
        nn.Sequential(nn.Linear(2, 2), Function(note), Function(note)), [2, 1], chunks=3,
        checkpoint=checkpoint,
    )  # fmt: skip
    with pytest.raises(ArithmeticError):
        model(torch.rand(3, 2))
    gc.collect()
    assert all(storage.expired() for storage in made)
