"""The best contiguous split for a number of stages: branch and bound, exact."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

import numpy as np

from ..core.errors import Infeasible, InvalidInput
from .cost import StageCosts
from .intervals import Floats, IntervalProgram, Level, Mask, Path
from .objective import objective_s, terms
from .schedules import in_flight, too_many_stages
from .ties import TiePattern, tie_patterns

ROUNDING = 1e-12
"""Objectives closer than this, relatively, are equal."""

MAX_SOLVES = 5_000
"""Dynamic programs per number of stages before the search settles for a gap."""


@dataclass(frozen=True)
class SearchResult:
    """The best split found for one number of stages, and what no split can be below.

    ``lower_bound_s`` is infinite where no split fits; ``cuts`` is `None` then.
    """

    cuts: tuple[int, ...] | None
    objective_s: float
    lower_bound_s: float


class PipelineSearch:
    """Splits of one profile over the first S devices of a cluster, stage s on device s."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        starts = np.array([0, *costs.legal_cuts], dtype=np.intp)
        ends = np.array([*costs.legal_cuts, costs.num_layers], dtype=np.intp)
        last, first = np.meshgrid(ends, starts, indexing="ij")
        real = first < last
        self.first, self.last = first[real], last[real]
        self._patterns = tie_patterns(costs)
        self._weights: dict[int, tuple[Floats, tuple[Floats, ...]]] = {}
        self._memory: dict[int, Floats] = {}

    @property
    def max_stages(self) -> int:
        """As many as there are devices and legal cuts for."""
        return min(len(self.costs.cluster.devices), len(self.costs.legal_cuts) + 1)

    def stage_counts(self) -> list[int]:
        """The numbers of stages to try: those that devices, cuts and the schedule allow.

        Raises:
            InvalidInput: A number is asked for that the schedule needs more micro-batches for.
            Infeasible: A number is asked for that devices or legal cuts do not suffice for.
        """
        options = self.costs.options
        schedule, num_microbatches = options.schedule, options.num_microbatches
        wanted = options.num_stages
        if wanted is None:
            counts = range(1, self.max_stages + 1)
            return [s for s in counts if not too_many_stages(schedule, s, num_microbatches)]
        refusal = too_many_stages(schedule, wanted, num_microbatches)
        if refusal:
            raise InvalidInput(refusal, field="/options/num_stages")
        if wanted <= self.max_stages:
            return [wanted]
        num_devices = len(self.costs.cluster.devices)
        if wanted > num_devices:
            raise Infeasible(
                f"{wanted} stages need {wanted} devices, the cluster has {num_devices}; "
                "ask for fewer stages or add devices",
                constraint="devices",
                required=wanted,
                available=num_devices,
            )
        raise Infeasible(
            f"the {self.costs.num_layers} layers can be cut into at most {self.max_stages} stages "
            f"({self.max_stages - 1} legal cuts), not {wanted}; ask for fewer stages",
            constraint="legal_cuts",
            required=wanted,
            available=self.max_stages,
        )

    def best_split(self, num_stages: int, *, exact: bool = True) -> SearchResult:
        """The split with the smallest objective for that many stages, if any fits.

        Args:
            num_stages: S, from 1 to `max_stages`.
            exact: Whether to search until proven; otherwise stop at the first bound.
        """
        program = self.program(num_stages)
        best = SearchResult(None, np.inf, np.inf)
        for pattern in self._patterns:
            mask = pattern.allows(self.first, self.last)
            found = _Search(self.costs, program.keep(mask), pattern, best, exact).run()
            best = SearchResult(
                found.cuts, found.objective_s, min(best.lower_bound_s, found.lower_bound_s)
            )
        return best

    def smallest_excess(self, num_stages: int) -> Path | None:
        """The split whose worst stage exceeds its device's memory least (bytes, may be < 0)."""
        levels = []
        for stage in range(num_stages):
            excess = self._excess_bytes(stage, num_stages)
            levels.append(Level(excess, (excess,), self._place(stage, num_stages)))
        program = IntervalProgram(self.costs.num_layers, self.first, self.last, tuple(levels))
        return program.smallest_largest(0)

    def program(self, num_stages: int) -> IntervalProgram:
        """Every interval at every level, those that do not fit their device forbidden."""
        levels = []
        for stage in range(num_stages):
            weight, metrics = self._terms(stage, num_stages)
            fits = self._excess_bytes(stage, num_stages) <= 0
            levels.append(Level(weight, metrics, self._place(stage, num_stages) & fits))
        return IntervalProgram(self.costs.num_layers, self.first, self.last, tuple(levels))

    def _place(self, stage: int, num_stages: int) -> Mask:
        """The front stage begins at layer 0, the last one ends at L, no other does."""
        begins: Mask = (self.first == 0) == (stage == 0)
        ends: Mask = (self.last == self.costs.num_layers) == (stage == num_stages - 1)
        return begins & ends

    def _terms(self, stage: int, num_stages: int) -> tuple[Floats, tuple[Floats, ...]]:
        """Weight and metrics as this stage; stages with equal links share the arrays."""
        costs = self.costs
        sends = None if stage == num_stages - 1 else costs.send_forward_s[stage]
        if id(sends) not in self._weights:
            span = (self.first, self.last)
            outgoing_s = np.zeros(len(self.last))
            if sends is not None:
                outgoing_s = (sends + costs.send_backward_s[stage])[self.last]
            self._weights[id(sends)] = terms(
                costs.options.schedule, costs.forward_s[span], costs.backward_s[span], outgoing_s
            )
        return self._weights[id(sends)]

    def _excess_bytes(self, stage: int, num_stages: int) -> Floats:
        """Memory needed beyond the device's limit; minus infinity where there is no limit."""
        options = self.costs.options
        held = in_flight(options.schedule, stage, num_stages, options.num_microbatches)
        if held not in self._memory:
            table = self.costs.memory_bytes(held)
            self._memory[held] = table[self.first, self.last].astype(np.float64)
        limit = self.costs.limits_bytes[stage]
        return self._memory[held] - (np.inf if limit is None else float(limit))


@dataclass(order=True)
class _Box:
    """Splits with every metric's largest value between ``lower`` and ``upper``.

    ``path`` has the least total weight among splits within ``upper``; ``realised`` are its
    largest metric values. ``bound_s`` is below every objective in the box.
    """

    bound_s: float
    order: int
    lower: tuple[float, ...] = field(compare=False)
    upper: tuple[float, ...] = field(compare=False)
    path: Path = field(compare=False)
    realised: tuple[float, ...] = field(compare=False)


class _Search:
    """Best-first branch and bound over the largest metric values of one tie pattern.

    In a box a <= (largest values) <= b no split is below V(b) + (m - 1) sum a + tied, where V(b)
    is the least total weight with every metric within b. The best path at b is a split of its
    own; halving the box between a and what that path realised closes the rest. With one metric
    this is the interval search of design section 5.3, with two it is exact for GPipe.
    """

    def __init__(
        self,
        costs: StageCosts,
        program: IntervalProgram,
        pattern: TiePattern,
        incumbent: SearchResult,
        exact: bool,
    ) -> None:
        self.costs = costs
        self.program = program
        self.tied_s = pattern.least_sync_s
        self.repeats = costs.options.num_microbatches - 1
        self.num_metrics = len(program.levels[0].metrics)
        self.cuts = incumbent.cuts
        self.best_s = incumbent.objective_s
        self.max_solves = MAX_SOLVES if exact else 0
        self.unproven_s = np.inf  # least bound of the boxes that could not be closed
        self.open: list[_Box] = []
        self._order = count()

    def run(self) -> SearchResult:
        unlimited = (np.inf,) * self.num_metrics
        narrowest = [self.program.smallest_largest(k) for k in range(self.num_metrics)]
        lower = []
        for path in narrowest:
            if path is None:
                return self._result()
            self._offer(path)
            lower.append(path.value)
        self._solve(tuple(lower), tuple(lower))
        root = self._solve(tuple(lower), unlimited)
        assert root is not None, "a split within no limits exists, as a narrowest one does"
        if self._closed(root.bound_s) or not self.max_solves:
            self.unproven_s = root.bound_s
            return self._result()
        self._drop_hopeless(root)
        candidates = [self._values(k) for k in range(self.num_metrics)]
        self._push(self._solve(tuple(lower), unlimited))
        for _ in range(self.max_solves):
            if not self.open or self._closed(self.open[0].bound_s):
                break
            self._branch(heapq.heappop(self.open), candidates)
        return self._result()

    def _result(self) -> SearchResult:
        """With every box closed, nothing is below the best split."""
        bound_s = min([self.unproven_s, self.best_s, *(box.bound_s for box in self.open)])
        return SearchResult(self.cuts, self.best_s, bound_s)

    def _push(self, box: _Box | None) -> None:
        if box is not None and not self._closed(box.bound_s):
            heapq.heappush(self.open, box)

    def _closed(self, bound_s: float) -> bool:
        return bound_s >= self.best_s * (1 - ROUNDING)

    def _solve(self, lower: tuple[float, ...], upper: tuple[float, ...]) -> _Box | None:
        """Solve a box at its upper corner; `None` if it holds no split."""
        path = self.program.smallest_sum(upper)
        if path is None:
            return None
        self._offer(path)
        return _Box(self._bound_s(path, lower), next(self._order), lower, upper, path,
                    self._realised(path))  # fmt: skip

    def _bound_s(self, path: Path, lower: tuple[float, ...]) -> float:
        return path.value + self.repeats * sum(lower) + self.tied_s

    def _offer(self, path: Path) -> None:
        value = objective_s(self.costs, path.cuts)
        if value < self.best_s:
            self.cuts, self.best_s = path.cuts, value

    def _realised(self, path: Path) -> tuple[float, ...]:
        """The path's largest value of each metric."""
        largest = [-np.inf] * self.num_metrics
        for level, (first, last) in zip(self.program.levels, pairwise(path.cuts), strict=True):
            low, high = np.searchsorted(self.program.last, [last, last + 1])
            entry = low + int(np.searchsorted(self.program.first[low:high], first))
            for k, metric in enumerate(level.metrics):
                largest[k] = max(largest[k], float(metric[entry]))
        return tuple(largest)

    def _drop_hopeless(self, root: _Box) -> None:
        """Forget intervals whose metric alone lifts every split above the best one."""
        if not self.repeats:
            return
        slack = (self.best_s - root.bound_s) / self.repeats * (1 + 1e-9)
        keep = np.zeros(len(self.program.first), dtype=np.bool_)
        for level in self.program.levels:
            usable = level.allowed
            for low, metric in zip(root.lower, level.metrics, strict=True):
                usable = usable & (metric <= (low + slack) * (1 + 1e-9))
            keep |= usable
        self.program = self.program.keep(keep)

    def _values(self, metric: int) -> Floats:
        """Every value a metric can take, ascending."""
        columns = [level.metrics[metric] for level in self.program.levels]
        distinct = {id(column): column for column in columns}
        return np.unique(np.concatenate(list(distinct.values())))

    def _branch(self, box: _Box, candidates: list[Floats]) -> None:
        """Halve a box at the metric whose value is least certain.

        The half above needs no solving: the same path is best there, and its bound rises. A box
        whose path realises its lower corner is settled; its bound can stay below the path's
        objective only by what the tie pattern leaves out.
        """
        gaps = [high - low for low, high in zip(box.lower, box.realised, strict=True)]
        k = int(np.argmax(gaps))
        if gaps[k] <= 0:
            self.unproven_s = min(self.unproven_s, box.bound_s)
            return
        values = candidates[k]
        begin, end = (int(x) for x in np.searchsorted(values, [box.lower[k], box.realised[k]]))
        middle = (begin + end) // 2
        if begin < end:
            upper = (*box.upper[:k], float(values[middle]), *box.upper[k + 1 :])
            self._push(self._solve(box.lower, upper))
            middle += 1
        lower = (*box.lower[:k], float(values[middle]), *box.lower[k + 1 :])
        bound_s = self._bound_s(box.path, lower)
        above = replace(box, bound_s=bound_s, order=next(self._order), lower=lower)
        self._push(above)
