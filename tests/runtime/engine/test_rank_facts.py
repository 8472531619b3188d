"""What ranks compare: equal for one model built twice, different for what would train wrongly."""

import copy

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.runtime.engine.rank_facts import list_facts
from stagewright.schedules.plan_schedule import schedule_of
from tests.torch_models import SPECS, Case, make_case, make_plan


def facts_of(case, *, num_stages=2, **options):
    plan = make_plan(case, num_stages, **options)
    graph = trace(case.model, case.sample, check=False).graph
    return list_facts(case.model, graph, plan, schedule_of(plan), {"autocast": None})


@pytest.mark.parametrize("name", SPECS)
def test_a_model_built_again_has_equal_facts(name):
    assert facts_of(make_case(name)) == facts_of(make_case(name))


def differing(changed, **options):
    case = make_case("mlp")
    original = copy.deepcopy(case.model)
    changed(case.model)
    usual = facts_of(Case("mlp", case.spec, original, case.sample, case.loss_fn))
    other = facts_of(case, **options)
    return [name for name in usual if usual[name] != other[name]]


def nothing(model):
    pass


def replace_activation(model):
    index = next(i for i, each in enumerate(model) if isinstance(each, nn.ReLU))
    model[index] = nn.ReLU6()


def freeze(model):
    next(model.parameters()).requires_grad_(False)


@pytest.mark.parametrize(
    ("changed", "options", "first"),
    [
        (nothing, {"num_microbatches": 2}, "the number of micro-batches per step"),
        (nothing, {"num_stages": 3}, "the layers per stage"),
        (nothing, {"schedule": "gpipe"}, "the schedule"),
        (replace_activation, {}, "the model's modules"),
        (freeze, {}, "the model's parameters and buffers"),
        (lambda model: model.eval(), {}, "the model's modules"),
    ],
)
def test_what_would_train_wrongly_differs(changed, options, first):
    assert differing(changed, **options)[0] == first


def test_weights_may_start_unequal():
    assert differing(lambda model: nn.init.zeros_(next(model.parameters()))) == []


def test_the_code_of_layers_called_as_written_is_compared():
    class Before(nn.Module):
        def forward(self, x):
            return x * 2

    class After(nn.Module):
        def forward(self, x):
            return x * 3

    After.__qualname__ = Before.__qualname__
    found = []
    for kind in (Before, After):
        model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
        found.append(facts_of(Case("written", None, model, (torch.ones(2, 4),), None)))
    assert found[0]["the model's modules"] != found[1]["the model's modules"]
