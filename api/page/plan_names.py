"""Names of plans that nobody has named: the model, its tokens and the devices."""

from __future__ import annotations

from ...core.models.families import CausalLMSpec
from ...core.plan.plan import Plan
from ...core.profile.profile import Profile
from ...core.requests.presets import PRESETS
from ...core.service.documents import PlanSummary


def name_summary(summary: PlanSummary) -> str:
    """Name a plan of a list: its own name, or ``gpt2-xl, 4 × 24GB``."""
    if summary.name:
        return summary.name
    family = summary.family or ""
    fitting = [
        name
        for name, preset in PRESETS.items()
        if preset.spec.family == family and preset.num_parameters == summary.num_parameters
    ]
    # Several published models may have as many parameters, such as Llama 3 and 3.1.
    # A family of many types says less than the class.
    known = summary.model if family == "causal_lm" else family
    model = fitting[0] if len(fitting) == 1 else known or summary.model or "Model"
    return _join(model, None, summary.devices)


def name_plan(plan: Plan, profile: Profile, devices: str | None) -> str:
    """Name a plan whose profile is known: ``gpt2-xl, 1,024 tokens, 4 × 24GB``."""
    published = (name for name, preset in PRESETS.items() if preset.spec == profile.spec)
    spec = profile.spec
    known = spec.config.model_type if isinstance(spec, CausalLMSpec) else spec and spec.family
    model = next(published, known or plan.model or "Model")
    return _join(model, _tokens(profile), devices)


def _tokens(profile: Profile) -> int | None:
    """Return the tokens of a sample: the second dimension of the first input, if of integers."""
    first = profile.inputs[0] if profile.inputs else None
    is_text = first is not None and first.dtype == "int64" and len(first.shape) == 2
    return first.shape[1] if first is not None and is_text else None


def _join(model: str, tokens: int | None, devices: str | None) -> str:
    words = [model]
    if tokens is not None:
        words.append(f"{tokens:,} tokens")
    if devices:
        words.append(devices.replace(" x ", " × "))
    return ", ".join(words)
