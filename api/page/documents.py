"""Pages of documents that are not stored: files dropped on a page, and the example."""

from __future__ import annotations

from functools import cache
from typing import Any
from urllib.parse import parse_qs

from markupsafe import Markup
from pydantic_core import from_json

from ...core.cluster.cluster import Cluster
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...planner.plan import plan as find_plan
from ...view.build_plan_view import build_plan_view
from ...view.html import data
from ...view.layer_columns import build_profile_layers
from ...view.profile_view import describe_quality

EXAMPLE_BLOCKS = 24
EXAMPLE_CLUSTER = "4x24GB"
EXAMPLE_TENSOR = {"shape": [2048, 1024], "dtype": "float32", "requires_grad": True}


def file_values(body: bytes) -> tuple[str, dict[str, Any]]:
    """Return the template and its values for a form with the field ``document``.

    Raises:
        InvalidInput: The document is neither a plan nor a profile, or a broken one.
    """
    text = (parse_qs(body.decode("utf-8", "replace"), max_num_fields=2).get("document") or [""])[0]
    try:
        schema = str(from_json(text).get("schema_version", ""))
    except (ValueError, AttributeError):
        raise InvalidInput("the file is not a JSON object; drop a plan.json or a profile") from None
    if schema.startswith("stagewright.plan/"):
        return "file-plan.html", _plan_values(Plan.from_json(text), None, None)
    if schema.startswith("stagewright.profile/"):
        profile = Profile.from_json(text)
        quality = describe_quality(profile)
        layers = build_profile_layers(profile)
        return "file-profile.html", {"profile": profile, "layers": layers, "quality": quality}
    raise InvalidInput(
        f"the file is no plan and no profile: its schema_version is {schema or 'missing'!r}; drop "
        "a file of 'stagewright plan' or 'stagewright profile'"
    )


@cache
def example_values() -> dict[str, Any]:
    """Return the values of an example's page: a transformer of made-up costs, planned here."""
    profile = _example_profile()
    cluster = Cluster.parse(EXAMPLE_CLUSTER)
    found = find_plan(profile, cluster, PlanOptions(num_microbatches=16))
    return _plan_values(found, profile, cluster)


def _plan_values(plan: Plan, profile: Profile | None, cluster: Cluster | None) -> dict[str, Any]:
    view = build_plan_view(plan, profile, cluster)
    step = "here" if view.boxes is not None else "never"
    block = Markup(data(view))
    return {"view": view, "block": block, "step": step, "live": False, "title": plan.model}


def _example_profile() -> Profile:
    """Build a profile of an embedding, equal blocks and a head, with round numbers."""
    mebibyte = 2**20
    names = ["embedding", *(f"blocks.{index}" for index in range(EXAMPLE_BLOCKS)), "head"]
    forward_s = [0.0005, *[0.004] * EXAMPLE_BLOCKS, 0.006]
    weights = [160 * mebibyte, *[60 * mebibyte] * EXAMPLE_BLOCKS, 160 * mebibyte]
    places = range(len(names))
    return Profile.model_validate(
        {
            "model": "An example: a transformer of 24 blocks",
            "layers": [
                {
                    "layer": {
                        "name": name,
                        "module_type": name.partition(".")[0].title(),
                        "module_fqns": [name],
                    },
                    "forward": {"median_s": time_s},
                    "backward": {"median_s": 2 * time_s},
                }
                for index, (name, time_s) in enumerate(zip(names, forward_s, strict=True))
            ],
            "boundaries": [
                {"after": after, "tensors": [{**EXAMPLE_TENSOR, "name": f"x{after}"}]}
                for after in places[:-1]
            ],
            "parameters": [
                {
                    "names": [f"{name}.weight"],
                    "size_bytes": size,
                    "numel": size // 4,
                    "layers": [index],
                }
                for index, (name, size) in enumerate(zip(names, weights, strict=True))
            ],
            "storages": [{"size_bytes": 96 * mebibyte, "layers": [index]} for index in places],
            "provenance": {"source": "estimated"},
            "notes": ["made-up costs, so that there is something to see"],
        }
    )
