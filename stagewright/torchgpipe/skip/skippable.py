"""Layers that pass tensors to later layers, bypassing those in between."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from .namespace import Namespace, SkipName
from .tracker import current_skip_tracker

__all__ = ["pop", "skippable", "stash", "verify_skippables"]


class stash:
    """Command that stashes a tensor: ``yield stash("name", tensor)``.

    Args:
        name: Name declared in ``@skippable(stash=[...])``.
        tensor: The tensor; `None` is allowed.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:
    """Command that pops a tensor: ``tensor = yield pop("name")``.

    Args:
        name: Name declared in ``@skippable(pop=[...])``.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """Base of layers that stash or pop; created by `skippable`."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def namespaced(self, name: str) -> SkipName:
        """Return a name with its namespace, if any."""
        return self.namespaces.get(name), name

    def stashable(self) -> list[SkipName]:
        """Return the names that the layer must stash."""
        return [self.namespaced(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[SkipName]:
        """Return the names that the layer must pop."""
        return [self.namespaced(name) for name in sorted(self.poppable_names)]

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Move skip tensors into a namespace, so that other layers may use equal names.

        Args:
            ns: The namespace.
            only: Names to move; all if `None`.

        Returns:
            This module.
        """
        names = self.stashable_names | self.poppable_names if only is None else only
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def forward(self, input: Any) -> Any:
        """Call the module and execute the commands it yields.

        Raises:
            RuntimeError: The stashed and popped names are not those declared, or a popped name
                was never stashed.
        """
        tensors = current_skip_tracker().tensors
        for name in self.poppable():
            if name not in tensors:
                raise RuntimeError(f"'{name[1]}' has not been stashed")
        given = {name: tensors.pop(self.namespaced(name)) for name in sorted(self.poppable_names)}
        made: dict[str, Tensor | None] = {}
        output = self._dispatch(self.module(input), made, given)
        _check_all_done(self.stashable_names - made.keys(), "stashed")
        _check_all_done(given.keys(), "popped")
        # Last, so that a layer that fails its checks has stashed nothing.
        tensors.update({self.namespaced(name): tensor for name, tensor in made.items()})
        return output

    def _dispatch(
        self, started: Any, made: dict[str, Tensor | None], given: dict[str, Tensor | None]
    ) -> Any:
        """Run a generator to its end, stashing into ``made`` and popping from ``given``."""
        if not isinstance(started, Generator):
            return started
        # `send(None)` starts the generator; later ones answer its latest command.
        answer: Tensor | None = None
        while True:
            try:
                wish = started.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(wish, stash):
                self._check_declared(wish.name, self.stashable_names, "stashable")
                made[wish.name] = wish.tensor
            elif isinstance(wish, pop):
                self._check_declared(wish.name, self.poppable_names, "poppable")
                if wish.name not in given:
                    raise RuntimeError(f"'{wish.name}' has been popped already")
                answer = given.pop(wish.name)
            else:
                raise TypeError(
                    f"'{wish!r}' is not a command from @skippable; yield stash(...) or pop(...)"
                )

    def _check_declared(self, name: str, declared: frozenset[str], what: str) -> None:
        if name not in declared:
            raise RuntimeError(f"'{name}' has not been declared as {what}")


def _check_all_done(missing: Iterable[str], what: str) -> None:
    if names := ", ".join(f"'{name}'" for name in sorted(missing)):
        raise RuntimeError(f"{names} must be {what} but have not")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Make a module class whose ``forward`` may yield `stash` and `pop`.

    ::

        @skippable(stash=["1to3"])
        class Layer1(nn.Module):
            def forward(self, input):
                yield stash("1to3", input)
                return f1(input)

        @skippable(pop=["1to3"])
        class Layer3(nn.Module):
            def forward(self, input):
                return f3(input) + (yield pop("1to3"))

    In a `GPipe`, the tensor is sent directly from the partition that stashes it to the one that
    pops it. The layers also work without a pipeline.

    Args:
        stash: Names stashed in every call.
        pop: Names popped in every call.

    Returns:
        A class decorator that returns a `Skippable`.
    """

    def extend(module_cls: type[nn.Module]) -> type[Skippable]:
        return type(
            module_cls.__name__,
            (Skippable,),
            {
                "__doc__": module_cls.__doc__,
                "__module__": module_cls.__module__,
                "module_cls": module_cls,
                "stashable_names": frozenset(stash),
                "poppable_names": frozenset(pop),
            },
        )

    return extend


def verify_skippables(module: nn.Sequential) -> None:
    """Check that every skip tensor is stashed by one layer and popped by one later layer.

    Raises:
        TypeError: Some do not match; the message lists all of them.
    """
    waiting: dict[SkipName, None] = {}
    stashed: set[SkipName] = set()
    popped: set[SkipName] = set()
    wrong: list[str] = []
    for label, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        wrong += [
            f"'{label}' declared '{name}' both as stashable and as poppable"
            for name in sorted(both)
        ]
        for name in layer.stashable():
            if name[1] in both:
                continue
            if name in stashed:
                wrong.append(_again(label, name, "stashable"))
                continue
            stashed.add(name)
            waiting[name] = None
        for name in layer.poppable():
            if name[1] in both:
                continue
            if name in popped:
                wrong.append(_again(label, name, "poppable"))
            elif name not in stashed:
                wrong.append(f"'{label}' declared '{name[1]}' as poppable but it was not stashed")
            else:
                popped.add(name)
                del waiting[name]
    wrong += [f"no module declared '{name}' as poppable but stashed" for _, name in waiting]
    if wrong:
        listed = "\n".join(f"* {line}" for line in wrong)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _again(label: str, name: SkipName, what: str) -> str:
    return f"'{label}' redeclared '{name[1]}' as {what} but not isolated by namespace"


@dataclass
class SkipRoutes:
    """Routes of the skip tensors that cross partitions: where each is stashed and popped."""

    ends: dict[SkipName, tuple[int, int]] = field(default_factory=dict)

    def into(self, partition: int) -> tuple[SkipName, ...]:
        """Return the skip tensors popped in a partition, in the order of stashing partitions."""
        found = [(ends[0], name) for name, ends in self.ends.items() if ends[1] == partition]
        return tuple(name for _, name in sorted(found, key=lambda pair: pair[0]))

    def out_of(self, partition: int) -> tuple[SkipName, ...]:
        """Return the skip tensors stashed in a partition for later ones."""
        return tuple(name for name, ends in self.ends.items() if ends[0] == partition)


def skip_routes(partitions: Sequence[nn.Module]) -> SkipRoutes:
    """Find the routes between the layers of partitions, nested layers included."""
    stashed: dict[SkipName, int] = {}
    routes = SkipRoutes()
    for index, partition in enumerate(partitions):
        for layer in partition.modules():
            if not isinstance(layer, Skippable):
                continue
            for name in layer.poppable():
                source = stashed.pop(name, index)
                # Within a partition, the tracker passes the tensor, and no route is needed.
                if source != index:
                    routes.ends[name] = source, index
            stashed.update(dict.fromkeys(layer.stashable(), index))
    return routes
