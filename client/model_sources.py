"""What somebody gives as the model, as fields of a request."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pydantic import BaseModel

from ..core.errors import CaptureError, InvalidInput
from ..core.graph.graph import Graph
from ..core.graph.sample import Sample
from ..core.models.families import ModelSpec
from ..core.profile.profile import Profile
from ..core.requests.default_samples import default_sample
from ..core.requests.presets import preset
from ..core.requests.requests import FactoryCall, ModelCode
from ..core.service.documents import StoredGraph, StoredProfile
from ..core.service.stored import Stored
from .request_builders import given, plain


class Module(Protocol):
    """An ``nn.Module``, as far as this has to know it: no torch here."""

    @property
    def named_parameters(self) -> Callable[..., Any]: ...


ModelLike: TypeAlias = (
    Module
    | Graph
    | Profile
    | Sequence[Profile]
    | ModelSpec
    | FactoryCall
    | ModelCode
    | Stored
    | Mapping[str, Any]
    | str
    | Path
)
"""Whatever says what a model is; `Client.plan` lists the forms."""

STORED_ID = re.compile(r"(profile|graph)_[0-9a-f]{24}")

FORMS = (
    "an nn.Module with its sample, a Graph, a Profile or several, a family such as "
    "{'family': 'gpt2'}, a published model's name, the id of a stored profile or graph, or the "
    "path of a .pt2 or .json file"
)


@dataclass(frozen=True)
class Upload:
    """An exported program that has to be sent first."""

    path: Path


def source_of(model: ModelLike, sample: Any = None) -> dict[str, Any] | Upload:
    """The fields that say what the model is.

    A module is captured here: what leaves this machine is its graph, without weights and code.

    Raises:
        InvalidInput: It is nothing of that kind, or does not go with the sample.
        CaptureError: The module cannot be captured, or only with its code.
    """
    if hasattr(model, "named_parameters"):
        return {"graph": plain(captured(model, sample))}
    if isinstance(model, str | Path):
        found = _named(model)
        if isinstance(found, Upload) or "model" not in found:
            _no_sample(sample, model)
            return found
        return {**found, "sample": found["sample"] if sample is None else _sample(sample)}
    if isinstance(model, Mapping):
        if "family" not in model:
            raise InvalidInput(f"the mapping names no 'family'; give {FORMS}", field="/model")
        return given(model=dict(model), sample=_sample(sample))
    if isinstance(model, BaseModel) and hasattr(model, "family"):
        return given(model=plain(model), sample=_sample(sample))
    if isinstance(model, FactoryCall | ModelCode):
        name = "factory" if isinstance(model, FactoryCall) else "code"
        return given(**{name: plain(model)}, sample=_sample(sample))
    _no_sample(sample, type(model).__name__)
    return _document(model)


def _document(model: object) -> dict[str, Any]:
    if isinstance(model, StoredProfile | StoredGraph) or type(model) is Stored:
        return _by_id(model.id)
    if isinstance(model, Graph):
        return {"graph": plain(model)}
    if isinstance(model, Profile):
        return {"profile": plain(model)}
    if isinstance(model, Sequence) and model and all(isinstance(one, Profile) for one in model):
        return {"profiles": [plain(one) for one in model]}
    raise InvalidInput(f"a {type(model).__name__} says of no model what it costs; give {FORMS}")


def _by_id(identifier: str) -> dict[str, Any]:
    found = STORED_ID.fullmatch(identifier)
    if found is None:
        raise InvalidInput(f"{identifier!r} is the id of neither a profile nor a graph")
    return {f"{found[1]}_id": identifier}


def _named(name: str | Path) -> dict[str, Any] | Upload:
    """What a text or a path stands for."""
    text = str(name)
    if isinstance(name, str) and name.startswith(("profile_", "graph_")):
        return _by_id(name)
    if text.endswith(".pt2"):
        return Upload(Path(name))
    if text.endswith(".json"):
        return _document(read_file(Path(name)))
    if isinstance(name, Path):
        raise InvalidInput(f"{name} is neither a .pt2 nor a .json file; give {FORMS}")
    found = preset(name)
    sample = default_sample(found.spec, 1, found.sequence_length)
    return {"model": plain(found.spec), "sample": plain(sample)}


def read_file(path: Path) -> Graph | Profile:
    """A graph or a profile, whichever the file holds.

    Raises:
        InvalidInput: It holds neither.
    """
    try:
        schema = json.loads(path.read_bytes()).get("schema_version", "")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, AttributeError, RecursionError):
        raise InvalidInput(f"{path} is no JSON document of a graph or a profile") from None
    return Graph.read(path) if schema == Graph.SCHEMA else Profile.read(path)


def _sample(sample: Any) -> Any:
    if sample is None or isinstance(sample, Sample | Mapping):
        return plain(sample)
    raise InvalidInput(
        f"the sample of a family is data (shape, dtype, fill), not a {type(sample).__name__}; give "
        "a stagewright.core.graph.sample.Sample, or the module itself with its tensors",
        field="/sample",
    )


def _no_sample(sample: Any, what: object) -> None:
    if sample is not None:
        raise InvalidInput(
            f"{what} says itself what its inputs are; leave the sample out", field="/sample"
        )


def captured(module: Any, sample: Any) -> Graph:
    """A module's graph, complete as data.

    Raises:
        InvalidInput: There is no sample, or not one that the module takes.
        CaptureError: It cannot be captured, or only with its code.
    """
    if sample is None:
        raise InvalidInput(
            "a module is captured with a sample; give the inputs of one micro-batch",
            field="/sample",
        )
    from ..capture.capture import capture

    graph = capture(module, sample)
    if graph.rebuildable:
        return graph
    reasons = graph.not_rebuildable
    where = f": {reasons[0].layer or reasons[0].operation}: {reasons[0].reason}" if reasons else ""
    raise CaptureError(
        f"{graph.model} does not go without its code{where}; measure it here with "
        "stagewright.profile(model, sample), and give the profile instead of the model"
    )


def read_pt2(path: Path) -> bytes:
    """An exported program without its weights, which the service has no use for.

    Nothing is unpickled or unpacked: members are copied from one archive to another.

    Raises:
        InvalidInput: It cannot be read, or is no such archive.
    """
    target = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as kept:
            for entry in archive.infolist():
                if "/data/" not in f"/{entry.filename}":
                    kept.writestr(entry, archive.read(entry))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise InvalidInput(f"{path} is not what torch.export.save writes: {error}") from None
    return target.getvalue()
