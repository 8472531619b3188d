"""What pages say of plans: their names, why one is the fastest, and files that are dropped."""

from urllib.parse import urlencode

import pytest

from stagewright.api.http.examples import example_profile
from stagewright.api.page.compare_words import explain_fastest
from stagewright.api.page.documents import example_values, file_values
from stagewright.api.page.plan_names import name_plan, name_summary
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.models.families import CausalLMConfig, CausalLMSpec
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.presets import PRESETS
from stagewright.core.service.documents import ComparedPlan, Comparison, PlanSummary
from stagewright.planner.plan import plan


def summary(**values):
    given = {"id": "plan_1", "created_at": "2026-01-01T00:00:00Z", "status": "planned"}
    return PlanSummary.model_validate({**given, "profile_id": "profile_1", **values})


def test_a_plan_in_a_list_has_its_own_name_or_that_of_its_model_and_devices():
    size = PRESETS["gpt2-xl"].num_parameters
    known = summary(family="gpt2", num_parameters=size, devices="4 x RTX4090")
    assert name_summary(known) == "gpt2-xl, 4 × RTX4090"
    assert name_summary(known.model_copy(update={"name": "mine"})) == "mine"


def test_two_published_models_of_one_size_are_not_guessed_between():
    size = PRESETS["llama-3-8b"].num_parameters
    assert size == PRESETS["llama-3.1-8b"].num_parameters
    found = name_summary(summary(family="llama", num_parameters=size, devices="8 x H100"))
    assert found == "llama, 8 × H100"


def test_a_causal_language_model_is_named_by_its_class_or_type():
    """Thirty-eight types share a family, whose name would say nothing of any."""
    own = summary(family="causal_lm", num_parameters=7, model="Qwen3ForCausalLM", devices="2 x A40")
    assert name_summary(own) == "Qwen3ForCausalLM, 2 × A40"
    spec = CausalLMSpec(family="causal_lm", config=CausalLMConfig(model_type="gemma2"))
    profile = Profile.model_validate(example_profile()).model_copy(update={"spec": spec})
    assert name_plan(plan(profile, "2x24GB", num_microbatches=2), profile, None) == "gemma2"


def test_a_plan_with_its_profile_names_tokens_too():
    profile = Profile.model_validate(example_profile())
    inputs = (TensorSpec(name="input_ids", shape=(1, 2048), dtype="int64"),)
    known = profile.model_copy(update={"spec": PRESETS["gpt2-xl"].spec, "inputs": inputs})
    made = plan(profile, "2x24GB", num_microbatches=2)
    assert name_plan(made, known, "2 x 24GB") == "gpt2-xl, 2,048 tokens, 2 × 24GB"
    assert name_plan(made, profile, "2 x 24GB") == "Example, 2 × 24GB"


def compared(name, step_s, bubble, samples_per_s=None):
    return ComparedPlan(
        id=name, status="planned", profile_id="p", num_devices=2, schedule="1f1b",
        step_time_s=step_s, bubble_fraction=bubble, samples_per_s=samples_per_s,
    )  # fmt: skip


def explained(*plans):
    fastest = min(plans, key=lambda one: one.step_time_s).id
    return explain_fastest(Comparison(plans=plans, fastest=fastest, same_profile=True))


def test_why_one_wins_is_split_into_computing_and_waiting():
    (words,) = explained(compared("a", 1.0, 0.1), compared("b", 1.5, 0.4))
    assert words == (
        "Plan 2 takes 50.0 % longer per step than plan 1: its devices wait 600 ms instead of "
        "100 ms (the mean of all devices)."
    )
    (words,) = explained(compared("a", 1.0, 0.1), compared("b", 1.2, 0.0))
    assert "its devices compute 1.2 s instead of 900 ms, but wait 0 us instead of 100 ms" in words


def test_plans_of_different_batches_are_compared_by_sample():
    plans = (compared("a", 1.0, 0.0, 100.0), compared("b", 1.5, 0.0, 200.0))
    found = Comparison(plans=plans, fastest="b", same_profile=True)
    (words,) = explain_fastest(found)
    assert words.startswith("Plan 1 takes 2.0 times as long per sample as plan 2: ")


def form(text):
    return urlencode({"document": text}).encode()


def test_a_dropped_plan_or_profile_is_shown():
    profile = Profile.model_validate(example_profile())
    template, shown = file_values(form(profile.to_json()))
    assert (template, shown["profile"].model) == ("file-profile.html", "Example")
    made = plan(profile, "2x24GB", num_microbatches=2)
    template, shown = file_values(form(made.to_json()))
    assert template == "file-plan.html"
    assert shown["view"].header.step_time_s == made.step_time_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("{}", "no plan and no profile"),
        ('{"schema_version": "stagewright.cluster/1"}', "stagewright.cluster/1"),
        ('{"schema_version": "stagewright.plan/1"}', "stagewright.plan/1"),
    ],
)
def test_any_other_file_is_refused_by_name(text, words):
    with pytest.raises(InvalidInput, match=words):
        file_values(form(text))


def test_the_example_says_that_it_is_made_up():
    view = example_values()["view"]
    assert view.header.estimated
    assert any("made-up" in note for note in view.notes)
    assert view.boxes is not None
