"""Optimizers of a rank's parameters: groups by name, and a probe of what an optimizer looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import InvalidInput
from ..core.models.training_memory import Recipe
from .random_state import preserve_random_state
from .recipe import keep_master_weights
from .replicas.shared_optimizer import UpdateOwners, drop_foreign_gradients, spread_weights

Groups = Sequence[Mapping[str, Any]]
"""Parameter groups as torch has them; ``params`` may list names and patterns such as ``*.bias``."""


def make_optimizer(
    kind: Callable[..., Optimizer],
    parameters: Mapping[str, nn.Parameter],
    groups: Groups | None,
    options: Mapping[str, Any],
    *,
    names: Iterable[str],
    holds: str = "",
    owned: Mapping[int, UpdateOwners] | None = None,
    recipe: Recipe | None = None,
) -> Optimizer:
    """Create an optimizer of a rank's ``parameters``, which are some of the model's ``names``.

    ``holds`` says whether this rank has ``other weights`` than others have, or ``parts`` of them.

    Raises:
        InvalidInput: A group names no parameter, or the optimizer would compute something else than
            of the whole model's weights.
    """
    _check_kind(kind, options, holds)
    made = kind(_group(parameters, groups, [*names]), **options)
    drop_foreign_gradients(made, owned or {})
    keep_master_weights(made, recipe)
    spread_weights(made, owned or {})
    return made


def _group(
    parameters: Mapping[str, nn.Parameter], groups: Groups | None, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the groups with this rank's parameters; those in none come last, by themselves."""
    left, found, has_names = dict(parameters), [], False
    for group in groups or ():
        wanted = group["params"]
        wanted = [wanted] if isinstance(wanted, str | Tensor) else [*wanted]
        for each in wanted:
            has_names = has_names or isinstance(each, str)
            if isinstance(each, str) and not any(fnmatchcase(name, each) for name in names):
                raise InvalidInput(f"no parameter of the model is named {each!r}; see its names")
        chosen = [
            name
            for name, weight in left.items()
            if any(
                fnmatchcase(name, each) if isinstance(each, str) else weight is each
                for each in wanted
            )
        ]
        found.append({**group, "params": [left.pop(name) for name in chosen]})
    # Groups are as many on all ranks, whatever a rank has for each: torch refuses an empty list of
    # parameters, not an empty group.
    if left or has_names or not found:
        found.append({"params": [*left.values()]})
    return found


def _check_kind(kind: Callable[..., Optimizer], options: Mapping[str, Any], holds: str) -> None:
    """Compare steps on two small weights with those on each alone, and on parts of them."""
    with preserve_random_state(torch.device("cpu")):
        try:
            _compare_steps(kind, options, holds)
        except InvalidInput:
            raise
        except Exception:  # noqa: BLE001 (it takes none of these, as SparseAdam)
            return


def _compare_steps(kind: Callable[..., Optimizer], options: Mapping[str, Any], holds: str) -> None:
    name = getattr(kind, "__name__", None) or type(kind).__name__
    weights_and_gradients = torch.randn(2, 3, 8, 8, dtype=torch.float64)  # of two steps
    values = weights_and_gradients.unbind()
    try:
        whole = _step(kind, options, values)
    except TypeError as error:
        if "closure" not in str(error):
            raise
        raise InvalidInput(
            f"{name} evaluates the loss several times an update, and each rank would search a "
            "direction of its own weights alone; use an optimizer whose step needs no closure"
        ) from None
    if not _are_equal(whole, _step(kind, options, values)):
        return  # it draws random numbers
    if holds and not _are_equal(whole, [_step(kind, options, [each])[0] for each in values]):
        raise InvalidInput(
            f"{name} updates a weight by what it computes of other weights, and ranks hold "
            "different ones; use an optimizer that treats weights by themselves, or plan one stage"
        )
    for dim in (1, 2) if holds == "parts" else ():
        halves = _step(kind, options, values[0].chunk(2, dim))
        if not _are_equal(whole[:1], [torch.cat(halves, dim - 1)]):
            raise InvalidInput(
                f"{name} updates a weight by what it computes of all its elements, and ranks hold "
                "parts of weights; use an optimizer that treats elements by themselves, such as "
                "AdamW, or plan with --tensor 1 and without fully_shard"
            )


def _step(
    kind: Callable[..., Optimizer], options: Mapping[str, Any], values: Sequence[Tensor]
) -> list[Tensor]:
    """Return what two steps of an optimizer of their own change about weights."""
    weights = [nn.Parameter(value[0].clone()) for value in values]
    made = kind([{"params": weights}], **options)
    for number in (1, 2):
        for weight, value in zip(weights, values, strict=True):
            weight.grad = value[number].clone()
        made.step()
    return [weight.detach() - value[0] for weight, value in zip(weights, values, strict=True)]


def _are_equal(found: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = zip(found, others, strict=True)
    return all(float((one - other).norm()) <= 1e-6 * float(one.norm()) for one, other in pairs)
