"""Published models have the published numbers of parameters."""

import pytest
import torch

from stagewright.core.errors import InvalidInput
from stagewright.core.requests.default_samples import default_sample
from stagewright.core.requests.presets import ALIASES, PRESETS, find_preset
from stagewright.profiler.models.families import build_model

ROUNDED = {"gpt3-175b": 1e-4}
"""Published as 174.6 billion."""


@pytest.mark.parametrize("name", PRESETS)
def test_number_of_parameters(name):
    if PRESETS[name].spec.family != "resnet":
        pytest.importorskip("transformers")
    with torch.device("meta"):
        model = build_model(PRESETS[name].spec)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PRESETS[name].num_parameters, rel=ROUNDED.get(name, 0), abs=0)


def test_other_names_lead_somewhere():
    assert {ALIASES[name] for name in ALIASES} <= set(PRESETS)
    assert find_preset("Llama-70B") is PRESETS["llama-2-70b"]


def test_unknown_name_offers_what_there_is():
    with pytest.raises(InvalidInput, match=r"did you mean 'gpt2-xl'.*estimate --models"):
        find_preset("gpt2-x")


@pytest.mark.parametrize("name", PRESETS)
def test_default_sample_fits(name):
    found = PRESETS[name]
    sample = default_sample(found.spec, 3, found.sequence_length)
    shapes = [entry.shape for entry in sample.inputs.values()]
    assert all(shape[0] == 3 for shape in shapes)
    if found.sequence_length is not None:
        assert shapes[0] == (3, found.sequence_length)


def test_a_sequence_too_long_is_refused():
    with pytest.raises(InvalidInput, match=r"2000 tokens exceed .* of 1024"):
        default_sample(PRESETS["gpt2"].spec, 1, 2000)
    with pytest.raises(InvalidInput, match="no sequence length"):
        default_sample(PRESETS["resnet50"].spec, 1, 128)
