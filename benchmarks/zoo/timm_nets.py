"""Nets of ``timm`` at their default settings: a seeded draw, one of a family."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .architecture import Architecture

SEED, BATCH, PIXELS, CLASSES = 16, 2, 64, 10
LARGEST = 12_000_000
"""Most parameters of a net that is small enough for a table made on two cores."""

FOLDER = Path(__file__).resolve().parents[2] / ".timm"
"""Where `make timm` installs it: beside a torch without CUDA, torchvision in the environment itself
would break every import of ``transformers``."""


def import_timm() -> Any:
    """Import timm, installed or from its folder.

    Raises:
        ImportError: It is in neither place.
    """
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    for name in ("nms", "qnms"):
        # torchvision's own kernels need CUDA's torch; without them it still imports if the two
        # operators exist that it describes whether or not they were loaded.
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    import timm

    return timm


def draw(seed: int = SEED) -> Iterator[Architecture]:
    """Yield a net of each family in a drawn order."""
    timm = import_timm()
    names = sorted(timm.list_models())
    random.Random(seed).shuffle(names)
    families: set[str] = set()
    for name in names:
        family = name.partition("_")[0].rstrip("0123456789")
        if family not in families:
            families.add(family)
            yield Architecture(name, "timm", _builder(name), _sampler(name))


def _builder(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        timm = import_timm()
        with torch.device("meta"):
            shown = timm.create_model(name, num_classes=CLASSES)
        size = sum(parameter.numel() for parameter in shown.parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} parameters are not small")
        model: nn.Module = timm.create_model(name, num_classes=CLASSES)
        return model

    return build


def _sampler(name: str) -> Callable[[], Tensor]:
    def sample() -> Tensor:
        settings = import_timm().get_pretrained_cfg(name).to_dict()
        channels, height, width = settings.get("input_size") or (3, 224, 224)
        if not settings.get("fixed_input_size"):
            _, height, width = settings.get("min_input_size") or (channels, PIXELS, PIXELS)
        return torch.randn(BATCH, channels, height, width)

    return sample
