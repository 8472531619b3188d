"""The pieces of the planner's search that `ablation.py` switches off, each by patching one name.

The product has no switches: a piece is replaced here by what does nothing in its place.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from stagewright.planner.cost import banded_chain
from stagewright.planner.heuristics import candidates
from stagewright.planner.problem import problem
from stagewright.planner.search import branch_and_bound, step_graph, step_search
from stagewright.planner.search.branch_and_bound import BranchAndBound
from stagewright.planner.search.label_setting import SearchOutcome, search
from stagewright.planner.search.step_search import StepSearch
from stagewright.planner.solvers import (
    all_plans,
    cut_fitting,
    device_layouts,
    equal_pipelines,
    restrictions,
    simulated_bound,
    simulated_search,
    stage_moves,
    staged_search,
    step_proof,
    step_time,
    warmup_depth,
)


@dataclass(frozen=True)
class Piece:
    """A piece of the search.

    Attributes:
        part: The part of the search that it belongs to.
        changes: Object, name and stand-in of what is replaced.
        code: The functions, classes and modules that would go with it.
    """

    part: str
    name: str
    changes: tuple[tuple[object, str, object], ...]
    code: tuple[Any, ...] = ()

    @property
    def lines(self) -> int:
        """Count the lines of source that belong to it alone."""
        return sum(len(inspect.getsource(each).splitlines()) for each in self.code)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the piece off while this lasts."""
        with ExitStack() as stack:
            for owner, name, other in self.changes:
                stack.enter_context(patch.object(owner, name, other))
            yield


def _nothing(*_: object, **__: object) -> Iterator[Any]:
    return iter(())


def _none(*_: object, **__: object) -> None:
    return None


def _zero(*_: object, **__: object) -> float:
    return 0.0


def _first(value: Any, *_: object, **__: object) -> Any:
    return value


def _second(_: object, value: Any, *__: object) -> Any:
    return value


def _own_narrow(search: BranchAndBound, tolerance: float) -> float:
    """Return the bound that needs no bisection; the bound of the simulated step keeps its own."""
    if search.measure == "simulated_bound":
        return _narrow(search, tolerance)
    if search.least_weight == math.inf:
        return search.best_value
    return min(search._least_metric(), search._most_metric())


_narrow, _init = BranchAndBound.narrow, BranchAndBound.__init__


def _unmixed(search: BranchAndBound, *arguments: Any, **others: Any) -> None:
    _init(search, *arguments, **others)
    search.is_mixed = False


def _forget_reached(*arguments: Any, **others: Any) -> SearchOutcome:
    return replace(search(*arguments, **others), replicas=None)


def _one_best(pool: staged_search.PlanPool, most: int) -> list[Any]:
    return _best(pool, most)[:1]


_best = staged_search.PlanPool.best


def _front_first(request: Any, assignment: Any) -> Iterator[Any]:
    """Yield shifts of single cuts only."""
    with patch.object(simulated_search, "MAX_SHIFTED", 0):
        yield from list(_shift(request, assignment))


_shift = simulated_search._shift_cuts


def _kept_recompute(request: Any, assignment: Any) -> Iterator[Any]:
    """Yield variations but those of recomputation."""
    for other in _vary(request, assignment):
        if other.recompute == assignment.recompute or other.cuts != assignment.cuts:
            yield other


_vary = simulated_search._vary

PIECES = (
    # --- levels ---
    Piece("levels", "coarse levels", ((staged_search, "COARSE_ATOMS", ()),),
          (staged_search._coarsen,)),
    Piece("levels", "level around the best plan", ((staged_search, "_refine", _none),),
          (staged_search._refine,)),
    Piece("levels", "stages of better plans only", ((staged_search, "_list_better", _none),),
          (staged_search._list_better, staged_search._limit_work)),
    Piece("levels", "band of a long chain", ((problem, "band", _none),), (banded_chain,)),
    # --- branch and bound ---
    Piece("branch and bound", "first plan by rising caps",
          ((BranchAndBound, "find_first", BranchAndBound.find_fewest_devices),),
          (BranchAndBound.find_first, BranchAndBound._ideal_metric)),
    Piece("branch and bound", "bisection of the first metric",
          ((BranchAndBound, "narrow", _own_narrow),), (BranchAndBound.narrow,)),
    Piece("branch and bound", "pruning of arcs", ((BranchAndBound, "_prune", _none),),
          (BranchAndBound._prune,)),
    Piece("branch and bound", "widening ranges",
          ((branch_and_bound, "FIRST_RANGE", 1),)),
    Piece("branch and bound", "boxes closed before the search for better plans ends",
          ((branch_and_bound, "CLOSING", 0.0),)),
    Piece("branch and bound", "halving boxes that are too long to search",
          ((BranchAndBound, "_split_budget", lambda _: 400_000_000),),
          (BranchAndBound._split_budget,)),
    Piece("branch and bound", "arcs reached by a box's own search",
          ((branch_and_bound, "search", _forget_reached),)),
    Piece("branch and bound", "a plan just above the bound of a long chain",
          ((BranchAndBound, "_find_near", _none),), (BranchAndBound._find_near,)),
    Piece("branch and bound", "beams of several kinds", ((BranchAndBound, "__init__", _unmixed),)),
    # --- pool ---
    Piece("pool", "all but the search's best plan", ((staged_search.PlanPool, "best", _one_best),)),
    Piece("pool", "whole groups of last stages", ((staged_search, "round_up_replicas", _first),),
          (staged_search.round_up_replicas, staged_search._missing_replicas,
           staged_search._is_as_good)),
    Piece("pool", "uniform grids", ((step_time, "uniform_grids", _nothing),),
          (candidates.uniform_grids, candidates._promising)),
    Piece("pool", "equal pipelines", ((step_time, "list_equal_pipelines", _nothing),),
          (equal_pipelines, step_time._list_leaders)),
    Piece("pool", "faster baselines", ((step_time, "_take_baseline", _second),),
          (step_time._take_baseline, candidates.take_faster_baseline)),
    Piece("pool", "plans under narrower options",
          ((restrictions, "list_restrictions", _nothing),), (restrictions,)),
    # --- step search ---
    Piece("step search", "step search",
          ((step_time, "search_steps", _zero), (simulated_search, "search_steps", _zero)),
          (step_proof, step_search,
           step_graph)),
    Piece("step search", "beam behind it", ((StepSearch, "beam", _nothing),), (StepSearch.beam,)),
    Piece("step search", "bound on any simulated step",
          ((step_time, "bound_simulated_step", _zero),), (staged_search.bound_simulated_step,)),
    # --- local search ---
    Piece("local search", "all moves", ((step_time, "_vary", _nothing),
                                        (simulated_search, "_vary", _nothing)),
          (step_time._vary, stage_moves, simulated_search._vary, simulated_search._shift_cuts)),
    Piece("local search", "one cut moved", ((step_time, "move_cuts", _nothing),),
          (stage_moves.move_cuts,)),
    Piece("local search", "devices moved",
          ((step_time, "move_devices", _nothing), (simulated_search, "move_devices", _nothing)),
          (stage_moves.move_devices, stage_moves._reshape, stage_moves._change_replicas,
           stage_moves._split, stage_moves._merge, stage_moves.Shape)),
    Piece("local search", "replicas changed", ((stage_moves, "_change_replicas", _nothing),),
          (stage_moves._change_replicas,)),
    Piece("local search", "stages split", ((stage_moves, "_split", _nothing),),
          (stage_moves._split,)),
    Piece("local search", "stages merged", ((stage_moves, "_merge", _nothing),),
          (stage_moves._merge,)),
    Piece("local search", "kinds exchanged", ((stage_moves, "combinations", _nothing),)),
    Piece("local search", "deeper warm-up", ((step_time, "extend_warmup", _none),),
          (warmup_depth,)),
    Piece("local search", "deeper warm-up of single stages", ((warmup_depth, "STEPS", ()),),
          (warmup_depth._change_depths,)),
    Piece("local search", "extra depth of all stages", ((warmup_depth, "_deepen_all", _nothing),),
          (warmup_depth._deepen_all,)),
    # --- schedules without a closed form ---
    Piece("local search", "extra depth trimmed", ((warmup_depth, "_trim", _second),),
          (warmup_depth._trim,)),
    Piece("other schedules", "cuts fitted to speed and memory",
          ((simulated_search, "fit_cuts", _none),)),
    Piece("other schedules", "layouts of several kinds",
          ((device_layouts, "permutations", _nothing),)),
    Piece("other schedules", "layouts of pinned kinds", ((device_layouts, "_of_kinds", _nothing),),
          (device_layouts._of_kinds,)),
    Piece("other schedules", "memory repaired", ((simulated_search, "repair_memory", _nothing),),
          (cut_fitting.repair_memory, cut_fitting._RepairSearch)),
    Piece("other schedules", "all plans, where few", ((simulated_search, "simulate_all", _zero),),
          (all_plans,)),
    Piece("other schedules", "runs of cuts moved",
          ((simulated_search, "_shift_cuts", _front_first),)),
    Piece("other schedules", "recomputation of one stage",
          ((simulated_search, "_vary", _kept_recompute),)),
    *(Piece("other schedules", f"bound: {name}",
            ((simulated_bound.SimulatedStepBound, method, _zero),),
            (getattr(simulated_bound.SimulatedStepBound, method),))
      for name, method in (("wait", "_waiting_s"), ("heaviest layer", "_heaviest_s"),
                           ("one micro-batch", "_through_s"))),
)  # fmt: skip
"""In the order in which a plan passes them."""
