"""Layers split over ranks that are threads here: outputs and gradients of the unsplit model."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.splitting.find_split import find_split
from stagewright.capture.splitting.rewrite import Exchange, join_parts, rewrite, take_part

EXACT = 1e-12


class Threads:
    """As many ranks in threads, which hand each other tensors."""

    def __init__(self, count):
        self.count, self.barrier, self.given = count, threading.Barrier(count), [None] * count

    def collect(self, rank, value):
        self.given[rank] = value
        self.barrier.wait(60)
        found = list(self.given)
        self.barrier.wait(60)
        return found

    def exchange(self, rank):
        class Enter(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.view_as(value)

            @staticmethod
            def backward(ctx, gradient):
                return sum(self.collect(rank, gradient))

        class Add(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return sum(self.collect(rank, value))

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        def gather(layout):
            class Gather(torch.autograd.Function):
                @staticmethod
                def forward(ctx, value):
                    return join_parts(self.collect(rank, value), layout)

                @staticmethod
                def backward(ctx, gradient):
                    return take_part(gradient, layout.dim, layout.parts, rank, self.count)

            def joined(value):
                return Gather.apply(value)

            return joined

        def enter(value):
            return Enter.apply(value)

        def add(value):
            return Add.apply(value)

        def nothing():
            pass

        return Exchange(rank, self.count, enter, add, gather, nothing, nothing)


def split_of(captured, degree):
    return find_split([(captured.program, captured.layers)], [degree] * len(captured.layers))


def run_split(model, sample, degree):
    """Outputs of every rank, whole gradients by name, and the names of divided weights."""
    ranks = Threads(degree)
    models, segments, layouts = [], [], {}
    for rank in range(degree):
        own = copy.deepcopy(model)
        captured = trace(own, sample, check=False)
        split = split_of(captured, degree)
        exchange = ranks.exchange(rank)
        rewrite(captured.program, captured.layers, split, lambda layer, own=exchange: own)
        parts = {}
        for module in own.modules():
            for key, weight in module._parameters.items():
                if id(weight) in split.weights:
                    layout = split.weights[id(weight)].layout
                    part = take_part(weight.detach(), layout.dim, layout.parts, rank, degree)
                    parts.setdefault(id(weight), (weight, nn.Parameter(part.clone())))
                    module._parameters[key] = parts[id(weight)][1]
        layouts = {
            name: split.weights[key].layout
            for name, weight in own.named_parameters()
            for key, (_, part) in parts.items()
            if part is weight
        }
        models.append(own)
        segments.append(captured.segment(0, len(captured.layers)))
    outputs = [None] * degree

    def work(rank):
        made = segments[rank](*sample)[0]
        made.mul(torch.arange(made.numel()).reshape(made.shape).sin()).sum().backward()
        outputs[rank] = made.detach()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gradients = {}
    for name in dict(models[0].named_parameters()):
        held = [model.get_parameter(name).grad for model in models]
        gradients[name] = [join_parts(held, layouts[name])] if name in layouts else held
    return outputs, gradients, set(layouts)


def check(model, sample, degree):
    """Compare with the unsplit model; return the names of divided weights."""
    model = model.double()
    whole = copy.deepcopy(model)
    made = whole(*sample)
    made.mul(torch.arange(made.numel()).reshape(made.shape).sin()).sum().backward()
    outputs, gradients, divided = run_split(model, sample, degree)
    for output in outputs:
        assert (output - made).abs().max() <= EXACT
    for name, weight in whole.named_parameters():
        for found in gradients[name]:
            assert (found - weight.grad).abs().max() <= EXACT, name
    return divided


class Block(nn.Module):
    """A layer with a forward of its own, so that its operations are traced."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._run = forward

    def forward(self, x):
        return self._run(self, x)


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def feed_forward(self, x):
    return x + self.down(F.silu(self.gate(x)) * self.up(x))


def fused_attention(self, x):
    query, key, value = self.qkv(x).split(8, -1)
    query, key, value = (
        each.view(*x.shape[:2], 4, 2).transpose(1, 2) for each in (query, key, value)
    )
    weights = torch.softmax(query @ key.transpose(-1, -2) / 2, -1)
    return self.out((weights @ value).transpose(1, 2).reshape(x.shape))


def make_feed_forward():
    return Block(
        feed_forward, gate=nn.Linear(8, 16), up=nn.Linear(8, 16, bias=False), down=nn.Linear(16, 8)
    )


def make_attention():
    return Block(fused_attention, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return (torch.randn(2, 3, 8, dtype=torch.float64),)


@pytest.mark.parametrize("degree", [2, 4])
def test_columns_then_rows(tokens, degree):
    divided = check(Model(make_feed_forward(), make_feed_forward()), tokens, degree)
    assert divided == {
        f"blocks.{index}.{name}"
        for index in (0, 1)
        for name in ("gate.weight", "gate.bias", "up.weight", "down.weight")
    }


@pytest.mark.parametrize("degree", [2, 4])
def test_heads_of_fused_queries_keys_and_values(tokens, degree):
    divided = check(Model(make_attention(), make_attention()), tokens, degree)
    assert {"blocks.0.qkv.weight", "blocks.0.qkv.bias", "blocks.0.out.weight"} <= divided


def test_a_product_whose_output_other_layers_read_is_gathered(tokens):
    one, two = nn.Linear(8, 12), nn.Linear(12, 8)
    lone = Block(lambda self, x: self.own(x), own=one)
    divided = check(Model(lone, Block(lambda self, x: self.own(F.gelu(x)), own=two)), tokens, 2)
    assert divided == {"blocks.0.own.weight", "blocks.0.own.bias", "blocks.1.own.weight",
                       "blocks.1.own.bias"}  # fmt: skip


def test_what_has_no_rule_stays_whole_and_is_said(tokens):
    model = Model(Block(lambda self, x: torch.cumsum(self.own(x), -1), own=nn.Linear(8, 8)))
    assert check(model, tokens, 2) == set()
    captured = trace(model.double(), tokens, check=False)
    (reason,) = split_of(captured, 2).reasons.values()
    assert "cumsum has no rule" in reason


def test_sizes_that_do_not_divide_stay_whole_and_are_said(tokens):
    model = Model(Block(lambda self, x: self.own(x), own=nn.Linear(8, 6))).double()
    (reason,) = split_of(trace(model, tokens, check=False), 4).reasons.values()
    assert "has 6 to be divided by 4" in reason


def test_a_weight_that_is_read_in_two_ways_stays_whole(tokens):
    shared = nn.Linear(8, 8, bias=False)
    model = Model(
        Block(lambda self, x: F.relu(self.own(x)), own=shared),
        Block(lambda self, x: x * self.own.weight.sum(), own=shared),
    )
    assert check(model, tokens, 2) == set()


def test_memory_that_others_view_is_not_changed_in_place(tokens):
    def views(self, x):
        y = self.up(x)
        z = y.view(-1)
        y.relu_()
        return self.down(y) + z.sum()

    model = Model(Block(views, up=nn.Linear(8, 8), down=nn.Linear(8, 8)))
    check(model, tokens, 2)


@pytest.mark.parametrize("degree", [2, 4])
def test_groups_of_convolutions_and_their_norms(degree):
    torch.manual_seed(0)
    block = Block(
        lambda self, x: x + self.last(F.relu(self.norm(self.grouped(self.first(x))), inplace=True)),
        first=nn.Conv2d(8, 16, 1),
        grouped=nn.Conv2d(16, 16, 3, padding=1, groups=4),
        norm=nn.GroupNorm(4, 16),
        last=nn.Conv2d(16, 8, 1),
    )
    images = (torch.randn(2, 8, 5, 5, dtype=torch.float64),)
    divided = check(Model(block), images, degree)
    assert {"blocks.0.grouped.weight", "blocks.0.norm.weight", "blocks.0.last.weight"} <= divided


@pytest.mark.parametrize("padding", [None, 0, 5])
def test_rows_of_a_table(padding):
    torch.manual_seed(0)
    block = Block(lambda self, x: self.table(x), table=nn.Embedding(12, 6, padding_idx=padding))
    model = Model(block, Block(lambda self, x: self.own(x), own=nn.Linear(6, 8)))
    ids = (torch.tensor([[0, 5, 11], [3, 0, 7]]),)
    assert "blocks.0.table.weight" in check(model, ids, 2)


@pytest.mark.parametrize(("size", "parts"), [(12, ()), (12, (4, 8)), (12, (4, 4, 4))])
def test_parts_join_to_the_whole(size, parts):
    from stagewright.capture.splitting.layout import Shard

    whole = torch.arange(size * 3).reshape(3, size)
    held = [take_part(whole, 1, parts, rank, 4) for rank in range(4)]
    assert torch.equal(join_parts(held, Shard(1, parts)), whole)
