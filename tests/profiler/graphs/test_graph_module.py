"""A graph written down and put together again is the model it was captured from."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from stagewright.capture.capture import trace
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.allowed_ops import MODULES, OPERATORS
from stagewright.core.graph.graph import Graph
from stagewright.profiler.graphs.graph_module import function_of, rebuild
from stagewright.profiler.graphs.rebuilt_capture import rebuild_captured
from tests.portable_models import MODELS, awkward, gpt2, mlp


def captured(build):
    """A model in training mode, its sample, and its graph after a way through JSON."""
    torch.manual_seed(0)
    model, sample = build()
    found = trace(model.train(), sample, check=False)
    return model, sample, found.structure, Graph.from_json(found.graph.to_json())


def behaviour(model, arguments):
    """Flat outputs, gradients and buffers from fixed random numbers."""
    torch.manual_seed(7)
    model.zero_grad()
    args, kwargs = arguments
    output = model(*args, **kwargs)
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    weighted = [
        (tensor.double() * torch.linspace(0.5, 1.5, tensor.numel()).reshape(tensor.shape)).sum()
        for tensor in tensors
        if tensor.requires_grad
    ]
    sum(weighted).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output, tensors, gradients, dict(model.named_buffers())


def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_with_the_original_weights_it_is_the_model(build):
    """Outputs, gradients and buffers, dropout by equal seeds; names are the model's."""
    model, sample, structure, graph = captured(build)
    found = rebuild(graph).model
    assert list(found.state_dict()) == list(model.state_dict()) or set(found.state_dict()) == set(
        model.state_dict()
    )
    found.load_state_dict(model.state_dict())
    assert {n: p.requires_grad for n, p in found.named_parameters()} == {
        n: p.requires_grad for n, p in model.named_parameters()
    }
    args, kwargs = (), sample if isinstance(sample, dict) else {}
    if not kwargs:
        args = sample
    flat = structure.flatten(args, kwargs)
    ours = behaviour(found, ((), dict(zip(structure.names, flat, strict=True))))
    theirs = behaviour(model, (args, kwargs))
    assert len(ours[1]) == len(theirs[1])
    same(ours[1], theirs[1])
    same(ours[2], theirs[2])
    for name, buffer in theirs[3].items():
        if not name.startswith("_"):
            same(ours[3][name], buffer)


def test_outputs_are_nested_as_the_model_s():
    *_, graph = captured(awkward)
    found = rebuild(graph)
    output = found.model(**found.sample)
    assert list(output) == ["out", "more", "same"]
    assert isinstance(output["more"], tuple)
    assert output["same"] is found.sample["right"]


@pytest.mark.parametrize("build", [gpt2, mlp, awkward], ids=lambda build: build.__name__)
def test_weights_are_random_and_outputs_have_the_stated_shapes(build):
    model, _, _, graph = captured(build)
    found, again, other = rebuild(graph), rebuild(graph), rebuild(graph, seed=1)
    own = dict(model.named_parameters())
    for name, parameter in found.model.named_parameters():
        assert parameter.shape == own[name].shape
        assert not torch.equal(parameter, own[name])
        assert torch.equal(parameter, again.model.get_parameter(name))
        assert not torch.equal(parameter, other.model.get_parameter(name))
    tensors = pytree.tree_leaves(found.model(**found.sample))
    assert [tuple(tensor.shape) for tensor in tensors] == [spec.shape for spec in graph.outputs]


def test_a_tied_weight_is_one_weight():
    *_, graph = captured(gpt2)
    model = rebuild(graph).model
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")


def test_every_listed_operator_and_module_exists():
    for name in sorted(OPERATORS):
        if name.startswith("aten."):
            library, operator, overload = name.split(".")
            getattr(getattr(getattr(torch.ops, library), operator), overload)
    assert all(hasattr(nn, name) for name in MODULES if name != "AttentionDropout")


def test_an_operator_this_installation_has_not_is_named():
    *_, graph = captured(awkward)
    operation = graph.operations[0].model_copy(
        update={"kind": "function", "target": "aten.of_next_year.default"}
    )
    with pytest.raises(InvalidInput, match=r"aten\.of_next_year.*torch"):
        function_of(operation)


def test_a_bottomless_input_structure_is_refused():
    *_, graph = captured(mlp)
    nested = graph.model_copy(update={"input_structure": "[" * 50_000})
    with pytest.raises(InvalidInput, match="does not say how"):
        rebuild_captured(nested, torch.device("cpu"))
