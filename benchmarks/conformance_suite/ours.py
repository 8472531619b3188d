"""Our column: `DistributedPipeline` on a plan with the table's cuts."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from conformance_suite.cell import NUM_MICROBATCHES, Cell
from conformance_suite.models import ROWS, Model
from conformance_suite.reference import BY_NAME, STEPS, StepState, batch_of, state_of
from stagewright.capture.capture import trace
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.plan import plan
from stagewright.runtime.distributed import DistributedPipeline


class OurTrial:
    """One rank's part of a cell."""

    def __init__(self, cell: Cell) -> None:
        self._model = BY_NAME[cell.model]
        self._cell = cell
        self.states: list[StepState] = []

    def prepare(self) -> None:
        """Plan and cut.

        Raises:
            StagewrightError: It is refused.
        """
        self._pipeline = DistributedPipeline(
            self._model.fresh(),
            plan_for(self._cell),
            loss_fn=self._model.loss,
            aux_losses=dict(self._model.aux_losses),
        )

    def run(self) -> None:
        for step in range(STEPS):
            inputs, target = batch_of(self._model, step)
            if self._cell.trains:
                loss = self._pipeline.step(*inputs, target=target)
            else:
                _, loss = self._pipeline.evaluate(*inputs, target=target)
            module = self._pipeline.module
            self.states.append(state_of(None if loss is None else float(loss), [module]))

    def close(self) -> None:
        self._pipeline.close()


def plan_for(cell: Cell) -> Plan:
    """Return the plan whose cuts are the table's and whose schedule is the cell's."""
    model = BY_NAME[cell.model]
    profile = _profile(model)
    names = [entry.layer.name for entry in profile.layers]
    first = [_first_layer(names, cut) for cut in model.cuts_into(cell.stages)]
    allowed = {names[index - 1] for index in first}
    options = PlanOptions(
        num_microbatches=NUM_MICROBATCHES,
        num_stages=cell.stages,
        no_cut_after=tuple(name for name in names[:-1] if name not in allowed),
        **_schedule_options(cell),
    )
    made = plan(profile, Cluster.uniform(cell.ranks), options)
    balance = tuple(last - begin for begin, last in pairwise([0, *first, len(names)]))
    if made.balance != balance:
        raise AssertionError(f"{cell} is cut into {made.balance}, not {balance}")
    # The planner prices one forward; the table pipelines several.
    return made.model_copy(update={"num_microbatches": NUM_MICROBATCHES})


def _schedule_options(cell: Cell) -> dict[str, object]:
    if not cell.trains:
        return {"objective": "latency"}
    return {"schedule": cell.schedule} | ({"chunks": cell.chunks} if cell.chunks > 1 else {})


def _first_layer(names: list[str], module: str) -> int:
    return next(i for i, name in enumerate(names) if f"{name}.".startswith(f"{module}."))


@lru_cache
def _profile(model: Model) -> Profile:
    """Made-up times: where the cuts are is given, so that times decide nothing."""
    inputs, _ = model.batch(ROWS)
    captured = trace(model.fresh(), inputs, check=False)
    graph = captured.graph
    return Profile(
        model=graph.model,
        inputs=graph.inputs,
        input_structure=captured.structure.to_json(),
        layers=tuple(
            LayerProfile(layer=layer, forward=Timing(median_s=1), backward=Timing(median_s=2))
            for layer in graph.layers
        ),
        edges=graph.edges,
        boundaries=graph.boundaries,
        parameters=graph.parameters,
    )
