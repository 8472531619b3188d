"""Models on the meta device: each stage gets memory for what it holds, and the right values."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import CaptureError, InvalidInput
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.price_split import plan_from_balance
from stagewright.runtime.checkpoint.save import save_checkpoint
from stagewright.runtime.meta_init.materialise import materialise, materialise_whole
from stagewright.runtime.meta_init.weights import Weights
from stagewright.runtime.partition.cut import cut_for_plan
from tests.runtime import odd_models

CPU = torch.device("cpu")


class Own(nn.Module):
    """Parameters of one module in different stages, and some that are used in two."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.empty(6)), nn.Parameter(torch.empty(6))
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Parameter(torch.empty(6, 6))
        self.d.weight = self.table  # initialised after d, and on ranks that do not hold d

    def reset_parameters(self):
        nn.init.normal_(self.table)
        nn.init.trunc_normal_(self.first)
        nn.init.normal_(self.last)
        with torch.no_grad():
            self.c.weight.copy_(torch.randn(6, 6))
        nn.init.orthogonal_(self.c.weight[:3])

    def forward(self, x):
        x = self.a(x @ self.table + self.first)
        return self.d(self.c(self.b(self.norm(x)).tanh())) * self.last


class Table(nn.Module):
    """A buffer that no checkpoint holds and nothing initialises."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.b(self.a(x) + self.table)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.a = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) * self.scale


def plan_for(model, sample, cuts, num_microbatches=1):
    """A plan of stages that end after so many layers, and at the end."""
    captured = trace(model, sample, check=False)
    graph = captured.graph
    profile = Profile(
        model=graph.model,
        inputs=graph.inputs,
        input_structure=captured.structure.to_json(),
        layers=tuple(
            LayerProfile(layer=layer, forward=Timing(median_s=1), backward=Timing(median_s=2))
            for layer in graph.layers
        ),
        boundaries=graph.boundaries,
        parameters=graph.parameters,
    )
    edges = [0, *cuts, len(graph.layers)]
    options = PlanOptions(num_microbatches=num_microbatches, schedule="gpipe")
    counts = [after - before for before, after in pairwise(edges)]
    return plan_from_balance(profile, Cluster.uniform(len(counts)), options, counts)


def is_on_meta(build):
    with torch.device("meta"):
        return build()


def stages_of(build, sample, cuts, weights):
    """Each stage as another rank would have it, of a model of its own."""
    plan = plan_for(build(), sample, cuts)
    found = []
    for index in range(plan.num_stages):
        model = is_on_meta(build)
        stage = cut_for_plan(model, plan, device=CPU).stages[index]
        materialise(model, [stage], weights, CPU)
        held = {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
        for tensor in (*model.parameters(), *model.buffers()):
            assert tensor.is_meta == (id(tensor) not in held)
        found.append(stage)
    return found


def state_of(stages):
    """All stages' tensors; where two hold one, they have to be the same numbers."""
    found = {}
    for stage in stages:
        for name, tensor in (
            *stage.named_parameters(remove_duplicate=False), *stage.named_buffers(),
        ):  # fmt: skip
            assert name not in found or torch.equal(found[name], tensor)
            found[name] = tensor.detach()
    return found


def tensors_of(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def check_equal(found, expected):
    assert found.keys() <= expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("cuts", [[2], [1, 3]], ids=str)
def test_initial_values_do_not_depend_on_the_plan(cuts):
    whole = is_on_meta(Own)
    materialise_whole(whole, Weights(seed=5), CPU)
    found = state_of(stages_of(Own, torch.randn(3, 6), cuts, Weights(seed=5)))
    assert found.keys() == tensors_of(whole).keys()
    check_equal(found, tensors_of(whole))


def test_initialisation_leaves_the_generators_alone_and_follows_the_seed():
    before = torch.get_rng_state()
    models = []
    for seed in (1, 1, 2):
        models.append(is_on_meta(Own))
        materialise_whole(models[-1], Weights(seed=seed), CPU)
    assert torch.equal(before, torch.get_rng_state())
    one, again, other = (model.first.detach() for model in models)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert models[0].a.weight is models[0].b.weight
    assert float(models[0].norm.running_var.sum()) == 6


def test_init_by_a_library_with_its_own_rules_and_buffers():
    """Of transformers, whose parents initialise their children again, and whose tables it fills."""
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, use_cache=False
    )
    llama = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=8, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    for model_class, config in (
        (transformers.GPT2LMHeadModel, gpt2), (transformers.LlamaForCausalLM, llama),
    ):  # fmt: skip
        sample = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}

        def build(model_class=model_class, config=config):
            return model_class(config)

        whole = is_on_meta(build)
        materialise_whole(whole, Weights(init=whole._init_weights), CPU)
        model, plan = is_on_meta(build), plan_for(build(), sample, [2])
        last = cut_for_plan(model, plan, device=CPU).stages[-1]
        materialise(model, [last], Weights(init=model._init_weights), CPU)
        check_equal(tensors_of(last), tensors_of(whole))
        real = tensors_of(build())
        for name, value in tensors_of(whole).items():
            if name in dict(whole.named_buffers()):
                torch.testing.assert_close(value, real[name])  # rotary tables
            elif value.numel() > 60 and float(value.detach().std()):  # drawn as the library draws
                assert 0.5 < float(value.detach().std() / real[name].detach().std()) < 2, name


@pytest.fixture(scope="module")
def real():
    torch.manual_seed(3)
    model = odd_models.TiedThrice()
    model.seen.copy_(torch.randn(4))
    return model


def write(form, model, folder):
    """A checkpoint of one of the forms there are."""
    if form == "pt":
        torch.save(model.state_dict(), folder / "model.pt")
        return folder / "model.pt"
    if form == "saved":
        save_checkpoint(folder / "run", model, step=3)
        return folder / "run"
    safetensors = pytest.importorskip("safetensors.torch")
    if form == "safetensors":
        safetensors.save_model(model, folder / "x.safetensors")  # ties under one name
        return folder / "x.safetensors"
    parts = {"1.safetensors": ["a.weight", "a.bias", "seen"], "2.safetensors": ["b.bias", "c.bias"]}
    for name, keys in parts.items():
        safetensors.save_file({key: model.state_dict()[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("form", ["pt", "saved", "safetensors", "index"])
def test_a_checkpoint_of_any_form_is_read(form, real, tmp_path):
    model = is_on_meta(odd_models.TiedThrice)
    materialise_whole(model, Weights(write(form, real, tmp_path)), CPU)
    check_equal(tensors_of(model), tensors_of(real))
    assert model.a.weight is model.c.weight


def test_a_stage_reads_only_what_it_holds(real, tmp_path, monkeypatch):
    from stagewright.runtime.meta_init import weight_files as files

    path, asked = write("safetensors", real, tmp_path), []
    fill = files._Safetensors.fill
    monkeypatch.setattr(
        files._Safetensors, "fill", lambda self, wanted: (asked.extend(wanted), fill(self, wanted))
    )
    found = stages_of(odd_models.TiedThrice, torch.randn(2, 4), [1], Weights(path))
    check_equal(state_of(found), tensors_of(real))
    assert sorted(asked) == ["a.bias", "a.weight", "a.weight", "b.bias", "c.bias", "seen"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("b.bias"), "lacks b.bias"),
        (lambda state: state.update(more=torch.ones(1)), "has no more"),
        (lambda state: state.update(seen=torch.ones(3)), r"seen is \[4\] in the model, \[3\]"),
        (lambda state: state.update(epoch=3), "is not a state_dict"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, said, real, tmp_path):
    state = dict(real.state_dict())
    change(state)
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(InvalidInput, match=said):
        materialise_whole(is_on_meta(odd_models.TiedThrice), Weights(tmp_path / "model.pt"), CPU)


def test_what_a_checkpoint_lacks_may_be_initialised(real, tmp_path):
    state = dict(real.state_dict())
    del state["b.bias"]
    torch.save(state, tmp_path / "model.pt")
    model, fresh = is_on_meta(odd_models.TiedThrice), is_on_meta(odd_models.TiedThrice)
    materialise_whole(model, Weights(tmp_path / "model.pt", seed=7, strict=False), CPU)
    materialise_whole(fresh, Weights(seed=7, init=lambda m: reset(m)), CPU)
    assert torch.equal(model.b.bias, fresh.b.bias)
    assert torch.equal(model.b.weight, real.b.weight)


def enlarge(module):
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(torch.ones(5, 4))
        module.bias.zero_()
    else:
        module.scale.fill_(1)


def reset(module):
    if isinstance(module, nn.Linear):
        module.reset_parameters()
    elif isinstance(module, odd_models.Base):
        module.seen.zero_()


@pytest.mark.parametrize(
    ("build", "weights", "said"),
    [
        (Table, Weights(), r"buffer table \(of Table\).*reset_parameters.*init=.*on the CPU"),
        (Bare, Weights(), r"parameter scale \(of Bare\).*Weights\(init=.*load a checkpoint"),
        (Bare, Weights(init=reset), r"parameter scale .*init= did not set it"),
        (Bare, Weights("nowhere"), "nowhere is not a checkpoint"),
        (Bare, Weights(init=enlarge), r"init= made a.weight a tensor of shape \[5, 4\]"),
    ],
)
def test_a_value_from_nowhere_is_named(build, weights, said):
    with pytest.raises(InvalidInput, match=said):
        materialise_whole(is_on_meta(build), weights, CPU)


def test_a_buffer_with_values_is_used_as_it_is(tmp_path):
    real, sample = Table(), torch.randn(2, 4)
    torch.save(real.state_dict(), tmp_path / "model.pt")
    plan = plan_for(real, sample, [1])
    model = is_on_meta(Table)
    model.table = torch.arange(4.0)
    stages = cut_for_plan(model, plan, device=CPU).stages
    materialise(model, stages, Weights(tmp_path / "model.pt"), CPU)
    assert torch.equal(stages[1](*stages[0](sample))[0], real(sample))


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_named():
    class Plain(Table):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(4)  # a buffer's name may be set; a new one is a plain tensor
            self.plain = torch.ones(4)

        def forward(self, x):
            return super().forward(x) * self.plain

    model = is_on_meta(Plain)
    plan = plan_for(Plain(), torch.randn(2, 4), [1])
    stages = cut_for_plan(model, plan, device=CPU).stages
    with pytest.raises(InvalidInput, match=r"plain.*not registered there as a parameter or buffer"):
        materialise(model, stages, Weights(init=lambda module: fill(module)), CPU)


def fill(module):
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.zero_()


def test_python_that_looks_at_values_is_told_that_there_are_none():
    class Looking(Table):
        def forward(self, x):
            return self.b(self.a(x) * float(self.a.weight.abs().max()))

    plan = plan_for(Table(), torch.randn(2, 4), [1]).model_copy(update={"model": "Looking"})
    with pytest.raises(CaptureError, match=r"meta device.*cannot read values"):
        cut_for_plan(is_on_meta(Looking), plan, device=CPU)


def test_nothing_of_other_stages_is_ever_allocated():
    """Counted at every operation, from capture to the last initial value."""

    class Allocations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.sizes = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(made):
                if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
                    self.sizes.add(tensor.untyped_storage().nbytes())
            return made

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 101), nn.Linear(101, 211)
            self.c, self.d = nn.Linear(211, 103), nn.Linear(103, 67)

        def forward(self, x):
            return self.d(self.c(self.b(self.a(x))))

    plan = plan_for(Wide(), torch.randn(2, 64), [2])
    for index in range(2):
        model = is_on_meta(Wide)
        with Allocations() as seen:
            stage = cut_for_plan(model, plan, device=CPU).stages[index]
            materialise(model, [stage], Weights(), CPU)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                is_here = (name[0] in "cd") == bool(index)
                assert (parameter.numel() * 4 in seen.sizes) == is_here, name
