"""Outputs in parts, as losses read them: the values and gradients of whole outputs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from stagewright.capture.splitting.layout import Shard
from stagewright.capture.splitting.rewrite import join_parts
from stagewright.runtime.tensor_parallel.exchange import ShardGroup
from stagewright.runtime.tensor_parallel.split_output import OutputParts

RANKS, CLASSES = 2, 6
EXACT = 1e-12


class ThreadGroup(ShardGroup):
    """Ranks in threads, which count the whole tensors that they join."""

    def __init__(self, shard, shared):
        super().__init__(shard, RANKS, torch.device("cpu"))
        self.shared, self.joins = shared, 0

    def _all(self, value):
        self.shared["given"][self.shard] = value
        self.shared["barrier"].wait(20)
        found = list(self.shared["given"])
        self.shared["barrier"].wait(20)
        return found

    def sum(self, value):
        return sum(self._all(value))

    def maximum(self, value):
        return torch.stack(self._all(value)).amax(0)

    def join(self, value, layout):
        self.joins += 1
        return join_parts(self._all(value), layout)


def compare(loss, whole, layout, exact=EXACT):
    """Compare a loss of parts with that of the whole; return how often a rank joined them."""
    leaf = whole.clone().requires_grad_()
    expected = loss([leaf])
    expected.backward()
    shared = {"given": [None] * RANKS, "barrier": threading.Barrier(RANKS)}
    groups = [ThreadGroup(rank, shared) for rank in range(RANKS)]

    def work(rank):
        part = groups[rank].take(whole, layout).clone().requires_grad_()
        made = OutputParts([layout], groups[rank]).compute(loss, [part])
        made.backward()
        return made.detach(), part.grad

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(work, range(RANKS)))
    for rank in range(RANKS):
        assert (found[rank][0] - expected).abs() <= exact
        assert found[rank][0].dtype == expected.dtype
    gradient = join_parts([found[rank][1] for rank in range(RANKS)], layout)
    assert (gradient - leaf.grad).abs().max() <= exact
    return groups[0].joins


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(2, 5, CLASSES, dtype=torch.float64) * 30


@pytest.fixture
def target():
    return torch.tensor([[0, 5, 2, -100, 1], [3, 3, -100, 4, 5]])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_parts(logits, target, reduction, smoothing):
    def loss(outputs):
        made = F.cross_entropy(
            outputs[0].flatten(0, 1), target.flatten(), reduction=reduction,
            label_smoothing=smoothing,
        )  # fmt: skip
        return made.mul(torch.arange(made.numel()).reshape(made.shape) + 1).sum()

    assert compare(loss, logits, Shard(2)) == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_cross_entropy_has_the_type_of_torch(target, autocast):
    def loss(outputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return F.cross_entropy(outputs[0].flatten(0, 1), target.flatten())

    logits = torch.randint(-2, 2, (2, 5, CLASSES)).to(torch.bfloat16)
    assert compare(loss, logits, Shard(2), exact=0.01) == 0


def test_classes_of_images(logits):
    def loss(outputs):
        return F.cross_entropy(outputs[0], torch.ones(2, CLASSES, dtype=torch.long) * 3)

    assert compare(loss, torch.randn(2, 4, CLASSES, dtype=torch.float64), Shard(1)) == 0


def shifted(outputs, target):
    """As transformers' losses of language models."""
    logits = outputs[0].float().double()
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.shape[-1]), target[..., 1:].reshape(-1)
    )


def test_what_leaves_classes_alone_keeps_the_parts(logits, target):
    assert compare(lambda outputs: shifted(outputs, target), logits.float().double(), Shard(2)) == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, target: (y[0] ** 2).mean(),
        lambda y, target: F.cross_entropy(y[0].transpose(1, 2), target),
        lambda y, target: F.cross_entropy(y[0][..., :4].flatten(0, 1), target.flatten() % 4),
        lambda y, target: F.cross_entropy(
            y[0].flatten(0, 1), target.flatten(), weight=torch.arange(1.0, 7.0).double()
        ),
        lambda y, target: F.cross_entropy(y[0].flatten(0, 1), y[0].flatten(0, 1).softmax(-1)),
        lambda y, target: y[0].reshape(3, -1).logsumexp(1).sum(),
        lambda y, target: (y[0].float().view(torch.int32) % 7).sum() + y[0].mean(),
        lambda y, target: y[0][0].sum() + y[0].view(2, -1).sin().sum(),
        lambda y, target: torch.stack([y[0].argmax(-1).sum() * y[0].mean(), y[0].max()]).sum(),
    ],
)
def test_other_operations_see_the_whole(logits, target, loss):
    assert compare(lambda outputs: loss(outputs, target), logits, Shard(2)) > 0


class Squared(torch.autograd.Function):
    """A loss that torch does not ask whether its arguments are in parts."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return (value**2).sum()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


def test_functions_of_autograd_see_the_whole(logits):
    assert compare(lambda outputs: Squared.apply(outputs[0]), logits, Shard(2)) == 2


def test_rows_are_joined(logits):
    assert compare(lambda y: (y[0].softmax(-1) ** 2).sum(), logits[:, :4], Shard(1)) == 1


def test_a_target_that_is_no_class_is_refused(logits):
    group = ThreadGroup(0, {"given": [None], "barrier": threading.Barrier(1)})
    parts = OutputParts([Shard(2)], group)
    wrong = torch.full((10,), CLASSES)
    with pytest.raises(RuntimeError, match="none of 6 classes"):
        parts.compute(lambda y: F.cross_entropy(y[0].flatten(0, 1), wrong), [logits[..., :3]])


def test_classes_masked_by_minus_infinity(logits, target):
    logits[..., 1::2] = -torch.inf
    target = target.div(2, rounding_mode="floor").mul(2).clamp_min(-100)
    assert compare(lambda outputs: F.cross_entropy(outputs[0].flatten(0, 1), target.flatten()),
                   logits, Shard(2)) == 0  # fmt: skip


IN_PLACE = {
    "method": lambda x: x.div_(2),
    "item": lambda x: x.__setitem__((0, 1), 0.0),
    "operator": lambda x: x.__imul__(3),
    "argument": lambda x: F.relu(x, inplace=True),
    "hook": lambda x: x.register_hook(lambda gradient: gradient * 2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_loss_that_changes_an_output_sees_the_change(logits, target, name):
    def loss(outputs):
        changed = (
            outputs[0]
            if outputs[0].grad_fn is not None and not outputs[0].is_leaf
            else (outputs[0] * 1)
        )
        IN_PLACE[name](changed)
        return F.cross_entropy(changed.flatten(0, 1), target.flatten())

    compare(loss, logits, Shard(2))


def test_autocast_computes_the_loss_in_full_precision(logits, target):
    def loss(outputs):
        with torch.autocast("cpu", torch.bfloat16):
            made = F.cross_entropy(outputs[0].flatten(0, 1), target.flatten())
        assert made.dtype == torch.float32
        return made.double()

    whole = logits.bfloat16()
    leaf = whole.clone().requires_grad_()
    loss([leaf]).backward()
    shared = {"given": [None] * RANKS, "barrier": threading.Barrier(RANKS)}

    def work(rank):
        group = ThreadGroup(rank, shared)
        part = group.take(whole, Shard(2))
        return OutputParts([Shard(2)], group).compute(loss, [part])

    with ThreadPoolExecutor(RANKS) as pool:
        for made in pool.map(work, range(RANKS)):
            assert (made - loss([whole])).abs() <= 1e-5
