"""Choice of the modules that become layers, from their paths and operations, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

LARGEST_SHARE = 0.25
"""Share of all operations above which a module outside any container is split into children."""

T = TypeVar("T")


class ModuleTree:
    """Modules of a model, by path.

    Containers only hold other modules, such as an ``nn.ModuleList``; ``undivided`` has the paths of
    modules that stay whole.
    """

    def __init__(
        self,
        children: Mapping[str, Collection[str]],
        containers: Collection[str],
        undivided: Collection[str] = (),
    ) -> None:
        self._children, self._containers, self._undivided = children, containers, undivided
        # Modules above a container of modules that have children: always opened.
        self._composite = {
            ancestor
            for path in containers
            if any(children.get(child) for child in children[path])
            for ancestor in list_ancestors(path)
        }

    def choose_blocks(
        self, operations: Sequence[T], find: Callable[[T, set[str]], str | None]
    ) -> set[str]:
        """Return the paths of the modules that become layers.

        Elements of a container become layers at any depth; outside the containers, every child
        does. ``find`` returns the block of an operation among some.
        """
        # Large modules without containers (a hand-written encoder, say) would be single layers and
        # leave nothing to balance. Open them, one level per round, until none is too large.
        opened = {""}
        while True:
            blocks = set(self._iterate_blocks(opened))
            counts = Counter(find(operation, blocks) for operation in operations)
            large = {
                path
                for path in blocks - opened
                if counts[path] > LARGEST_SHARE * len(operations)
                and self._children.get(path)
                and path not in self._undivided
                and path.rpartition(".")[0] not in self._containers
            }
            if not large:
                return blocks
            opened |= large

    def _iterate_blocks(
        self, opened: set[str], path: str = "", is_element: bool = False
    ) -> Iterator[str]:
        children, is_container = self._children.get(path), path in self._containers
        stays = (path and path in self._undivided) or (is_element and not is_container)
        is_open = is_container or path in opened or path in self._composite
        if children and is_open and not stays:
            for child in children:
                yield from self._iterate_blocks(opened, child, is_container)
        else:
            yield path


def list_ancestors(path: str) -> list[str]:
    """Return the root (an empty path), all modules above a path, and the path itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
