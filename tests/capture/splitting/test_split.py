"""Layers split over ranks that are threads here: outputs and gradients of the unsplit model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.report import find_inside
from stagewright.capture.splitting.find_split import find_split, list_outputs
from stagewright.capture.splitting.layout import Shard
from stagewright.capture.splitting.product_rules import LookUp
from stagewright.capture.splitting.rewrite import join_parts, take_part
from tests.capture.splitting.blocks import Block, Model, check
from tests.capture.splitting.threads import run_split, split_of


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


def test_what_other_layers_read_stays_divided(tokens):
    one, two = nn.Linear(8, 12), nn.Linear(12, 8)
    lone = Block(lambda self, x: self.own(x), own=one)
    model = Model(lone, Block(lambda self, x: self.own(F.gelu(x)), own=two))
    divided = check(model, tokens, 2)
    assert divided == {"blocks.0.own.weight", "blocks.0.own.bias", "blocks.1.own.weight"}
    split = split_of(trace(model, tokens, check=False), 2)
    assert [change.layout for change in split.changes.values() if change.sums] == [None]


def test_stages_of_other_numbers_of_ranks_get_whole_values(tokens):
    one, two = nn.Linear(8, 12), nn.Linear(12, 8)
    lone = Block(lambda self, x: self.own(x), own=one)
    model = Model(lone, Block(lambda self, x: self.own(F.gelu(x)), own=two)).double()
    captured = trace(model, tokens, check=False)
    traced = [(captured.program, captured.layers, captured.cuts)]
    same, other = (find_split(traced, degrees, [0, 1]) for degrees in ([2, 2], [2, 4]))
    assert list(same.gathered.values()) == []
    assert list(other.gathered.values()) == [Shard(2)]
    assert list_outputs(captured.program, other) == [Shard(2)]


def test_outputs_of_the_model_are_whole_where_later_stages_read_them_too(even_tokens):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Block(lambda self, x: self.own(x), own=nn.Linear(8, 8))
            self.second = Block(lambda self, x: self.own(F.gelu(x)), own=nn.Linear(8, 8))

        def forward(self, x):
            y = self.first(x)
            return self.second(y) + 0, y

    check(Both(), even_tokens, 2, stages=[0, 1])


@pytest.fixture
def even_tokens():
    torch.manual_seed(0)
    return (torch.randn(2, 4, 8, dtype=torch.float64),)


def residual(self, x):
    x = x + self.out(F.silu(self.up(x)))
    return x + self.down(F.silu(self.gate(self.norm(x))))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("stages", [[0, 0], [0, 1]])
def test_rows_of_sums_flow_through_norms(even_tokens, norm, stages):
    blocks = [
        Block(
            residual, up=nn.Linear(8, 16), out=nn.Linear(16, 8), norm=norm(8),
            gate=nn.Linear(8, 16), down=nn.Linear(16, 8),
        )
        for _ in range(2)
    ]  # fmt: skip
    model = Model(*blocks)
    divided = check(model, even_tokens, 2, stages=stages)
    split = split_of(trace(model, even_tokens, check=False), 2, stages)
    sums = [change.layout for change in split.changes.values() if change.sums]
    assert sums == [Shard(1)] * 4
    assert split.gathered == {}
    norms = [node for node in split.changes if "norm" in str(node.target)]
    assert len(norms) == 2
    assert not any("norm" in name for name in divided)


def test_rows_that_are_changed_in_place_are_not_gathered(even_tokens):
    def run(self, x):
        y = self.down(F.silu(self.up(x)))
        z = torch.cumsum(y, 1)
        y.add_(x.flip(1))
        return y.sin() + z

    block = Block(run, up=nn.Linear(8, 16), down=nn.Linear(16, 8))
    check(Model(block), even_tokens, 2)


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


def unflattened(self, x):
    y = self.up(x).unflatten(-1, (4, 2)).unflatten(-2, (2, 2))
    return self.down(F.gelu(y).flatten(2))


def test_a_dimension_is_taken_apart_by_its_own_sizes(tokens):
    block = Block(unflattened, up=nn.Linear(8, 8), down=nn.Linear(8, 8))
    assert {"blocks.0.up.weight", "blocks.0.down.weight"} <= check(Model(block), tokens, 2)


REDUCTIONS = {
    "var": lambda y: torch.var(y),
    "var, biased": lambda y: y.var(False),
    "var of the last": lambda y: torch.var(y, -1).sum(),
    "var of rows": lambda y: torch.var(y, -2).sum(),
    "sum": torch.sum,
    "mean of the last": lambda y: torch.mean(y, -1).sum(),
    "std of all": lambda y: torch.std(y, (0, 1, 2)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_see_all_of_the_dimensions_that_they_reduce(tokens, name):
    def reduced(self, x):
        y = F.gelu(self.up(x))
        return self.down(y) * REDUCTIONS[name](y)

    check(Model(Block(reduced, up=nn.Linear(8, 8), down=nn.Linear(8, 8))), tokens, 2)


def test_a_bias_keeps_the_type_that_autocast_gives_its_product(tokens):
    block = Block(lambda self, x: self.down(F.gelu(self.up(x))), up=nn.Linear(8, 16),
                  down=nn.Linear(16, 8))  # fmt: skip
    model, sample = Model(block), (tokens[0].float(),)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(*sample)
    outputs, _, divided = run_split(model, sample, 2, autocast=True)
    assert "blocks.0.down.weight" in divided
    for output in outputs:
        assert output.dtype == expected.dtype
        assert (output - expected).abs().max() <= 0.05


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
    whole = torch.arange(size * 3).reshape(3, size)
    held = [take_part(whole, 1, parts, rank, 4) for rank in range(4)]
    assert torch.equal(join_parts(held, Shard(1, parts)), whole)


def ups_and_downs(run, **modules):
    """A block that runs on what two linear layers make of its input, of which ranks hold rows."""
    return Block(lambda self, x: run(self, self.down(F.gelu(self.up(x)))), up=nn.Linear(8, 16),
                 down=nn.Linear(16, 8), **modules)  # fmt: skip


@pytest.mark.parametrize(
    "module",
    [nn.ZeroPad2d((0, 0, 1, -1)), nn.AdaptiveAvgPool2d((1, 8)), nn.AvgPool2d((3, 1), 1, (1, 0))],
)
def test_three_dimensions_have_no_channels_behind_samples(even_tokens, module):
    check(Model(ups_and_downs(lambda self, y: self.own(y * 2), own=module)), even_tokens, 2)


def test_convolutions_of_one_sample_stay_whole(even_tokens):
    block = Block(lambda self, x: x + self.two(F.relu(self.one(self.table))).transpose(0, 1),
                  one=nn.Conv1d(4, 16, 1), two=nn.Conv1d(16, 8, 1))  # fmt: skip
    block.table = nn.Parameter(torch.randn(4, 4))
    assert check(Model(block), even_tokens, 2) == set()


def test_a_weight_of_rows_that_is_read_whole_elsewhere_stays_whole(even_tokens):
    block = ups_and_downs(lambda self, y: y * 2 + self.places + self.places.sum())
    block.places = nn.Parameter(torch.randn(4, 8))
    assert "blocks.0.up.weight" in check(Model(block), even_tokens, 2)


@pytest.mark.parametrize(
    "product",
    [lambda own: own(own.weight), lambda own: own.weight @ own.weight.T,
     lambda own: own.weight @ own.weight],
)  # fmt: skip
def test_a_weight_multiplied_by_itself_stays_whole(tokens, product):
    block = Block(lambda self, x: x + product(self.own).square().sum(0), own=nn.Linear(8, 8))
    block.own.bias = None
    assert check(Model(block), tokens, 2) == set()


def add_product(self, x):
    return torch.addmm(x, F.gelu(self.up(x)), self.weight)


def multiply_with_computed_bias(self, x):
    return F.linear(F.gelu(self.up(x)), self.weight.transpose(0, 1), self.bias(x[0]).tanh())


def normalize_with_computed_weight(self, x):
    return F.layer_norm(F.gelu(self.up(x)) @ self.weight, (8,), self.bias(x[0]).tanh())


@pytest.mark.parametrize(
    ("forward", "divided"),
    [
        (add_product, set()),
        (multiply_with_computed_bias, {"up.weight", "up.bias", "bias.weight"}),
        (normalize_with_computed_weight, {"up.weight", "up.bias", "weight"}),
    ],
)
def test_a_rule_gets_no_divided_value_that_it_does_not_expect(forward, divided):
    """Ranks failed with shapes that did not match."""
    torch.manual_seed(0)
    model = Block(forward, up=nn.Linear(8, 16))
    if forward is not add_product:
        model.bias = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(torch.randn(16, 8))
    assert check(model, (torch.randn(4, 8, dtype=torch.float64),), 2) == divided


def test_tensors_that_are_plain_attributes_are_not_divided(tokens):
    block = Block(lambda self, x: self.down(self.up(x) * self.scale), up=nn.Linear(8, 16),
                  down=nn.Linear(16, 8))  # fmt: skip
    block.scale = torch.rand(16, dtype=torch.float64)
    assert "blocks.0.up.weight" in check(Model(block), tokens, 2)


def test_gradients_of_complex_values_are_summed(even_tokens):
    block = ups_and_downs(lambda self, y: (y * torch.complex(self.a, self.b)).abs())
    block.a, block.b = (nn.Parameter(torch.randn(8)) for _ in range(2))
    assert "blocks.0.up.weight" in check(Model(block), even_tokens, 2)


def test_modules_with_hooks_stay_whole(tokens):
    block = Block(lambda self, x: self.down(F.gelu(self.up(x))), up=nn.Linear(8, 16),
                  down=nn.Linear(16, 8))  # fmt: skip
    block.up.register_forward_hook(lambda module, given, made: made.cumsum(-1))
    assert not any(".up." in name for name in check(Model(block), tokens, 2))


def test_views_of_rows_are_changed_in_place(even_tokens):
    def first_row(self, y):
        y[:, 0] = 0
        return y * 2

    check(Model(ups_and_downs(first_row)), even_tokens, 2)


def test_rows_are_added_to_columns(even_tokens):
    def add(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) + self.own(x)

    shared = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "own": nn.Linear(8, 8),
              "norm": nn.LayerNorm(8)}  # fmt: skip
    check(Model(*(Block(add, **shared) for _ in range(3))), even_tokens, 2)


def test_indices_outside_of_a_table_are_refused():
    rows = LookUp(4, 2, None)
    with pytest.raises(RuntimeError, match="none of 8 rows"):
        rows(torch.tensor([8]), torch.ones(4, 2))


def grouped_attention(self, x, repeat):
    query, key, value = (
        each(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for each in (self.q, self.k, self.v)
    )
    key, value = (repeat(each) for each in (key, value))
    made = F.scaled_dot_product_attention(query, key, value)
    return self.out(made.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(
    "repeat",
    [
        lambda x: x.repeat_interleave(2, 1),
        lambda x: torch.repeat_interleave(x, repeats=2, dim=-3),
        lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2),
    ],
)
def test_heads_of_keys_and_values_are_repeated(tokens, repeat):
    modules = {"q": nn.Linear(8, 8), "k": nn.Linear(8, 4), "v": nn.Linear(8, 4)}
    block = Block(
        lambda self, x: grouped_attention(self, x, repeat), **modules, out=nn.Linear(8, 8)
    )
    divided = check(Model(block), tokens, 2)
    assert {f"blocks.0.{name}.weight" for name in ("q", "k", "v", "out")} <= divided


def test_repetitions_along_what_is_not_divided(tokens):
    block = Block(
        lambda self, x: self.down(F.gelu(self.up(x)).repeat_interleave(2, 1)),
        up=nn.Linear(8, 8), down=nn.Linear(8, 8),
    )  # fmt: skip
    assert {"blocks.0.up.weight", "blocks.0.down.weight"} <= check(Model(block), tokens, 2)


def repeat_parts(self, x):
    first, second = self.up(x).repeat_interleave(2, -1).chunk(2, -1)
    return self.down(first * second)


def repeat_by_tensor(self, x):
    return self.down(self.up(x).repeat_interleave(torch.tensor([2] * 8), -1, output_size=16))


@pytest.mark.parametrize("forward", [repeat_parts, repeat_by_tensor])
def test_other_repetitions_are_not_split(tokens, forward):
    width = 8 if forward is repeat_parts else 16
    block = Block(forward, up=nn.Linear(8, 8), down=nn.Linear(width, 8))
    assert "blocks.0.up.weight" not in check(Model(block), tokens, 2)


def unbound_attention(self, x):
    made = self.qkv(x).view(*x.shape[:2], 3, 4, 2).permute(2, 0, 3, 1, 4)
    query, key, value = made.unbind(0)
    out = F.scaled_dot_product_attention(query, key, value)
    return self.out(out.transpose(1, 2).reshape(x.shape))


def unflattened_attention(self, x):
    query, key, value = self.qkv(x).unflatten(-1, (3, 4, 2)).unbind(dim=-3)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value)
    return self.out(out.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("forward", [unbound_attention, unflattened_attention])
def test_fused_queries_keys_and_values_are_unbound(tokens, forward, degree):
    block = Block(forward, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))
    divided = check(Model(block), tokens, degree)
    assert {"blocks.0.qkv.weight", "blocks.0.qkv.bias", "blocks.0.out.weight"} <= divided


def test_an_unbound_dimension_is_not_split(tokens):
    def forward(self, x):
        first, second = self.up(x).view(*x.shape[:2], 2, 4).unbind(2)
        return self.down(first + second)

    block = Block(forward, up=nn.Linear(8, 8), down=nn.Linear(4, 8))
    check(Model(block), tokens, 2)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


def test_what_children_of_a_sequential_do_inside_is_split(tokens):
    """Children are called whole, and were not split, though the same blocks in a list were."""
    model = nn.Sequential(Whole(), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU()))
    captured = trace(model.double(), tokens)
    assert captured.program.mode == "sequential"
    assert captured.inside.program.mode == "export"
    assert captured.inside.layers.names == captured.layers.names
    split = split_of(captured.inside, 2)
    divided = {n for n, weight in model.named_parameters() if id(weight) in split.weights}
    assert {"0.up.weight", "0.down.weight", "1.weight", "2.0.weight"} <= divided
    again = trace(model, tokens, check=False, recipe=find_inside(captured.structure.recipe))
    assert (again.program.mode, again.inside) == ("export", None)
    same = trace(model, tokens, check=False, recipe=captured.structure.recipe)
    assert (same.program.mode, same.inside) == ("sequential", None)


def test_children_that_are_called_whole_say_so(tokens):
    class Branches(Whole):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x * self.up.weight.sum()

    captured = trace(nn.Sequential(Branches(), nn.Linear(8, 8)).double(), tokens, check=False)
    split = split_of(captured.inside or captured, 2)
    assert set(split.reasons.values()) == {"Branches is called whole"}


class Rotated(Block):
    """Attention with rotary embeddings as products of complex numbers, as Llama was published."""

    def __init__(self):
        super().__init__(rotated_attention, qkv=nn.Linear(8, 48), out=nn.Linear(16, 8))
        turns = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones(4, 2), turns))


def rotated_attention(self, x):
    query, key, value = (each.view(*x.shape[:2], 4, 4) for each in self.qkv(x).chunk(3, -1))
    query, key = (
        torch.view_as_real(
            torch.view_as_complex(each.reshape(*each.shape[:-1], -1, 2)) * self.turns[:, None]
        ).flatten(3)
        for each in (query, key)
    )
    made = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (query, key, value)))
    return self.out(made.transpose(1, 2).reshape(*x.shape[:2], 16))


@pytest.mark.parametrize("degree", [2, 4])
def test_heads_are_turned_as_complex_numbers(even_tokens, degree):
    divided = check(Model(Rotated()), even_tokens, degree)
    assert {"blocks.0.qkv.weight", "blocks.0.out.weight"} <= divided


def test_real_and_imaginary_parts_are_not_divided(even_tokens):
    def forward(self, x):
        made = torch.view_as_complex(self.up(x)) * 1j
        return self.down(torch.view_as_real(made))

    check(Model(Block(forward, up=nn.Linear(8, 2), down=nn.Linear(2, 8))), even_tokens, 2)
