"""Global variables that code writes are found whether a trial run sees them change or not."""

import pytest
import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.observation.global_writes import find_global_writes

CACHE, NESTED, COUNTS, TABLE, KINDS = {}, {"a": {}}, [], {"one": 1.0}, {"relu": torch.relu}
CALLS = 0


class Settings:
    """A plain object in a global variable."""


SETTINGS = Settings()


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        NESTED["made"] = 1  # no forward makes modules

    def forward(self, x):
        return torch.add(KINDS["relu"](x), TABLE["one"])


class Fills(Module):
    def forward(self, x):
        size = x.shape[-1]
        if size not in CACHE:
            CACHE[size] = torch.ones(size)
        return x * CACHE[size]


class FillsInside(Module):
    def forward(self, x):
        NESTED["a"]["b"] = 1
        return x


class FillsByMethod(Module):
    def forward(self, x):
        COUNTS.append(1)
        return x


class FillsByAlias(Module):
    def forward(self, x):
        counts = COUNTS
        counts += [1]
        counts[0] = 2
        return x


class Assigns(Module):
    def forward(self, x):
        return self.count(x)

    def count(self, x):
        global CALLS
        CALLS += 1
        return x


class SetsAttribute(Module):
    def forward(self, x):
        return keep(x)


def keep(x):
    SETTINGS.last = x.shape
    return x


class HasItsOwn(Module):
    """Its names are those of globals, its variables are not."""

    def forward(self, x, CACHE=None):
        CACHE = CACHE or {}
        CACHE[1] = x
        COUNTS = [x]
        COUNTS.append(x)
        return x

    def forget(self):
        CACHE.clear()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Fills, "CACHE"),
        (FillsInside, "NESTED"),
        (FillsByMethod, "COUNTS"),
        (FillsByAlias, "COUNTS"),
        (Assigns, "CALLS"),
        (SetsAttribute, "SETTINGS"),
        (HasItsOwn, ""),
        (Module, ""),
    ],
)
def test_written_globals_are_found_in_code(kind, names):
    found = find_global_writes(nn.Sequential(kind(), nn.Linear(4, 4)))
    assert found == {f"{__name__}.{name}" for name in names.split()}


class Branches(Fills):
    """Called as written, since it branches on its data."""

    def forward(self, x):
        x = x / 2 if float(x.detach().abs().amax()) > 1e6 else x
        return super().forward(x)


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_cache_is_seen_alike_empty_or_filled(is_warm, monkeypatch):
    """A plan made where it was filled was refused by ranks, whose cache was empty."""
    monkeypatch.setitem(globals(), "CACHE", {})
    model, x = nn.ModuleList([nn.Linear(4, 4), Branches(), nn.Linear(4, 4)]), torch.randn(3, 4)
    model = Chain(model)
    if is_warm:
        model(x)
    (layer,) = trace(model, x).graph.layers
    assert "variable outside the model" in layer.opaque
    assert layer.stateful == f"{__name__}.CACHE"


class Chain(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x
