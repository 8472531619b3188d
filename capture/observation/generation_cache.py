"""Key-value caches of ``transformers`` models, which training does without.

A causal language model returns a cache unless its configuration says ``use_cache=False``. A cache
is no tensor, cannot be sent over a cut, and is of use to generation alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...core.errors import CaptureError

NOTE = (
    "key-value caches are left out (use_cache=True in the model's configuration): only generation "
    "needs them"
)


@contextmanager
def switch_off_caches(model: nn.Module) -> Iterator[bool]:
    """Set ``use_cache`` to False in every configuration of the model; put it back on exit.

    Yields:
        Whether any configuration had it on.
    """
    configs = _list_caching_configs(model)
    for config in configs:
        config.use_cache = False
    try:
        yield bool(configs)
    finally:
        for config in configs:
            config.use_cache = True


def check_no_cache(module: nn.Module, reason: str) -> None:
    """Refuse an opaque module that looks up ``use_cache`` whenever it is called.

    Caches are off only while a model is captured and measured. A `PreTrainedModel` reads its
    configuration in each forward; the layers inside are handed a cache or none.

    Args:
        module: A module that runs as written.
        reason: Why it could not be taken apart.

    Raises:
        CaptureError: It would return a cache when the pipeline calls it.
    """
    for each in module.modules():
        is_model = any(base.__name__ == "PreTrainedModel" for base in type(each).__mro__)
        if is_model and hasattr(getattr(each, "config", None), "use_cache"):
            raise CaptureError(
                f"{type(each).__name__} runs as written ({reason}), and would make a key-value "
                "cache in every step: set model.config.use_cache = False"
            )


def _caches(config: Any) -> bool:
    return getattr(config, "use_cache", None) is True


def _list_caching_configs(model: nn.Module) -> list[Any]:
    """Return the configurations of all modules, and those inside them, that switch a cache on."""
    waiting = [getattr(module, "config", None) for module in model.modules()]
    found: dict[int, Any] = {}
    seen: set[int] = set()
    while waiting:
        config = waiting.pop()
        # Of a dict, attributes are no settings; of a class, they are those of every model.
        if id(config) in seen or not hasattr(config, "__dict__") or isinstance(config, type):
            continue
        seen.add(id(config))
        if _caches(config):
            found[id(config)] = config
        inside = vars(config).items()
        waiting += [value for name, value in inside if name.endswith("config")]
    return list(found.values())
