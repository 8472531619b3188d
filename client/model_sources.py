"""The forms in which a caller may give a model, as fields of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pydantic import BaseModel

from ..core.errors import CaptureError, InvalidInput
from ..core.graph.graph import Graph
from ..core.graph.tensors import Sample
from ..core.models.families import ModelSpec
from ..core.profile.profile import Profile
from ..core.requests.default_samples import default_sample
from ..core.requests.model_input import is_shorthand
from ..core.requests.presets import find_preset
from ..core.requests.requests import FactoryCall
from ..core.service.documents import Stored, StoredGraph, StoredProfile
from ..core.units import name_type
from .request_builders import drop_none, to_json_value


class Module(Protocol):
    """An ``nn.Module``, declared without importing torch."""

    @property
    def named_parameters(self) -> Callable[..., Any]: ...


ModelLike: TypeAlias = (
    Module
    | Graph
    | Profile
    | Sequence[Profile]
    | ModelSpec
    | FactoryCall
    | Stored
    | Mapping[str, Any]
    | str
    | Path
)
"""Every form in which a model can be given; `Client.plan` describes them."""

STORED_ID = re.compile(r"(profile|graph)_[0-9a-f]{32}")

FORMS = (
    "an nn.Module with its sample, a Graph, a Profile or several, a family such as "
    "{'family': 'gpt2'}, a Hugging Face config as a mapping, a published model's name, the id of a "
    "stored profile or graph, or the path of a .pt2 or .json file"
)


OTHER_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".py")
"""Endings of files that are not taken for the names of published models."""


def describe_model(model: ModelLike, sample: Any = None) -> dict[str, Any]:
    """Return the request fields that describe a model.

    A module or a ``.pt2`` file is captured on this machine; only its graph is sent, without weights
    or code.
    """
    if hasattr(model, "named_parameters"):
        return {"graph": to_json_value(capture_graph(model, sample))}
    if isinstance(model, str | Path):
        found = _named(model)
        if "model" not in found:
            _reject_sample(sample, model)
            return found
        return {**found, "sample": found["sample"] if sample is None else _sample(sample)}
    if isinstance(model, Mapping):
        if "family" not in model and not is_shorthand(dict(model)):
            raise InvalidInput(f"the mapping has no 'family'; give {FORMS}", field="/model")
        return drop_none(model=dict(model), sample=_sample(sample))
    if isinstance(model, BaseModel) and hasattr(model, "family"):
        return drop_none(model=to_json_value(model), sample=_sample(sample))
    if isinstance(model, FactoryCall):
        return drop_none(factory=to_json_value(model), sample=_sample(sample))
    _reject_sample(sample, type(model).__name__)
    return _document(model)


def _document(model: object) -> dict[str, Any]:
    if isinstance(model, StoredProfile | StoredGraph) or type(model) is Stored:
        return _by_id(model.id)
    if isinstance(model, Graph):
        return {"graph": to_json_value(model)}
    if isinstance(model, Profile):
        return {"profile": to_json_value(model)}
    if isinstance(model, Sequence) and model and all(isinstance(one, Profile) for one in model):
        return {"profiles": [to_json_value(one) for one in model]}
    raise InvalidInput(f"{name_type(model)} does not describe a model; give {FORMS}")


def _by_id(identifier: str) -> dict[str, Any]:
    found = STORED_ID.fullmatch(identifier)
    if found is None:
        raise InvalidInput(f"{identifier!r} is not the id of a profile or a graph")
    return {f"{found[1]}_id": identifier}


def _named(name: str | Path) -> dict[str, Any]:
    text = str(name)
    if isinstance(name, str) and name.startswith(("profile_", "graph_")):
        return _by_id(name)
    if text.endswith(".pt2"):
        return {"graph": to_json_value(_capture_file(Path(name)))}
    if text.endswith(".json"):
        return _document(read_file(Path(name)))
    if isinstance(name, Path) or Path(name).suffix in OTHER_FILES or Path(name).is_file():
        raise InvalidInput(
            f"{name} is neither a .pt2 nor a .json file. Weights and pickled modules are not read: "
            f"save the model by torch.export.save as .pt2, or give {FORMS}"
        )
    found = find_preset(name)
    sample = default_sample(found.spec, 1, found.sequence_length)
    return {"model": to_json_value(found.spec), "sample": to_json_value(sample)}


def read_file(path: Path) -> Graph | Profile:
    """Read a graph or a profile, whichever the file holds."""
    try:
        schema = json.loads(path.read_bytes()).get("schema_version", "")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, AttributeError, RecursionError):
        raise InvalidInput(f"{path} is not the JSON document of a graph or a profile") from None
    return Graph.read(path) if schema == Graph.SCHEMA else Profile.read(path)


def _sample(sample: Any) -> Any:
    if sample is None or isinstance(sample, Sample | Mapping):
        return to_json_value(sample)
    raise InvalidInput(
        f"the sample of a model family is a description (shape, dtype, fill), not a "
        f"{type(sample).__name__}; give a stagewright.core.graph.tensors.Sample, or the module "
        "itself with its tensors",
        field="/sample",
    )


def _reject_sample(sample: Any, what: object) -> None:
    if sample is not None:
        raise InvalidInput(
            f"{what} already describes its inputs; leave the sample out", field="/sample"
        )


def capture_graph(module: Any, sample: Any) -> Graph:
    """Capture a module as a graph that can be rebuilt without the module's code."""
    if sample is None:
        raise InvalidInput(
            "capturing a module needs a sample: the inputs of one micro-batch", field="/sample"
        )
    from ..capture.capture import capture

    graph = capture(module, sample)
    if graph.rebuildable:
        return graph
    reasons = graph.not_rebuildable
    where = f": {reasons[0].layer or reasons[0].operation}: {reasons[0].reason}" if reasons else ""
    raise CaptureError(
        f"{graph.model} cannot be sent without its code{where}; measure it on this machine with "
        "stagewright.profile(model, sample), and give the profile instead of the model"
    )


def _capture_file(path: Path) -> Graph:
    try:
        from ..capture.exported_program import load_exported
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"capturing {path} needs {error.name}; run: pip install -e '.[torch]' (in the "
            "checkout), or capture it on another machine: stagewright capture "
            f"{path.name} -o graph.json",
            name=error.name,
        ) from None
    return capture_graph(*load_exported(path))
