"""Lower bounds that hold for every order of the layers and every cut of it.

Whatever a stage holds, all stages together do all the work, some stage does the heaviest node,
and what the devices can do is known. Memory and the sizes of cuts are left aside, but for the
smallest tensor that every cut of a connected graph has to send.

With W the model's work at the highest speed, h the heaviest node's, P the sum of the devices'
speeds, c the cheapest tensor of a connected graph over the fastest link, and n the micro-batches
of a replica of the stage with as many replicas as it may have, a 1F1B step is at least, over all
numbers of stages S,

    W + (S - 1) c + max((n - 1) max((W + (S - 1) c) / S, h), m W / P - W at the lowest speed);

GPipe's is that for forward and backward apart. Throughput is at least max(W / P, h / replicas),
latency W + (S - 1) c forward, memory the share of the weights or the largest node's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.models.training_memory import training_bytes
from ...core.plan.plan import PlanOptions
from ..cost.device_classes import Devices
from ..cost.sharing import divided_bytes
from .downsets import Contraction, nodes_of
from .layer_graph import LayerGraph
from .set_costs import ELEMENTS, GRADIENTS, SHAREABLE, WEIGHTS

ROUNDING = 1e-12


@dataclass(frozen=True)
class OrderFreeBounds:
    """Lower bounds of each objective for one request.

    Attributes:
        forward_s: Forward of the whole model, the loss included, on the device profiled.
        backward_s: Its backward, the loss included, plus all forwards if all are recomputed.
        heaviest: Forward and backward of the heaviest node by each.
        cut_s: Sending both ways over any cut takes at least this long.
        cut_forward_s: Sending forward does.
        state_bytes: The largest device holds at least this much.
    """

    devices: Devices
    options: PlanOptions
    num_nodes: int
    forward_s: float
    backward_s: float
    heaviest: tuple[float, float, float]
    cut_s: float
    cut_forward_s: float
    state_bytes: int

    @classmethod
    def of(
        cls, branches: LayerGraph, whole_s: tuple[float, float], devices: Devices,
        options: PlanOptions,
    ) -> OrderFreeBounds:  # fmt: skip
        costs, nodes = branches.costs, branches.nodes
        groups = [nodes_of(group) for group in nodes.members]
        forward = np.array([costs.forward_s[group].sum() for group in groups])
        backward = np.array([costs.backward_s[group].sum() for group in groups])
        forward_s, backward_s = whole_s
        if options.recompute == "always" and options.objective != "latency":
            backward, backward_s = backward + forward, backward_s + float(forward.sum())
        cut = cut_forward = 0.0
        if _is_connected(nodes) and len(groups) > 1:
            # Some tensor crosses every cut of a connected graph: at least the smallest, over the
            # fastest level.
            sends = [
                (
                    level.transfer_time_s(int(size)),
                    level.transfer_time_s(int(size)) + level.transfer_time_s(int(back)),
                )
                for size, back in zip(costs.sent, costs.sent_back, strict=True)
                for level in devices.bounding_levels
            ]
            cut_forward = min(send for send, _ in sends)
            cut = min(both for _, both in sends)
        heaviest = (float(forward.max()), float(backward.max()), float((forward + backward).max()))
        state_bytes = _least_state_bytes(branches, options, len(devices.cluster.devices))
        return cls(
            devices, options, len(groups), forward_s, backward_s, heaviest, cut, cut_forward,
            state_bytes,
        )  # fmt: skip

    @property
    def _replicas(self) -> int:
        """Return the largest number of replicas a stage may have."""
        options = self.options
        most = max(len(entry) for entry in self.devices.classes)
        return min(most, options.max_replicas or most, options.num_microbatches)

    @property
    def _power(self) -> float:
        return sum(len(entry) * entry.speed for entry in self.devices.classes)

    def _spread_s(self, work_s: float, spared: int = 1) -> float:
        """Bound the largest (n - spared) x any stage's work; see `BranchAndBound._least_metric`."""
        slowest = min(entry.speed for entry in self.devices.classes)
        m = self.options.num_microbatches
        return max(0.0, m * work_s / self._power - spared * work_s / slowest)

    def _stages(self) -> range:
        options = self.options
        if options.num_stages:
            return range(options.num_stages, options.num_stages + 1)
        most = min(self.num_nodes, len(self.devices.cluster.devices))
        return range(1, min(most, options.max_stages or most) + 1)

    def step_s(self) -> float:
        """Bound the closed-form step of 1F1B or GPipe."""
        fastest, m = self.devices.fastest, self.options.num_microbatches
        rounds = -(-m // self._replicas) - 1
        whole_s = (self.forward_s + self.backward_s) / fastest
        heavy_forward, heavy_backward, heavy = (time_s / fastest for time_s in self.heaviest)
        least = []
        for stages in self._stages():
            cuts_s = (stages - 1) * self.cut_s
            if self.options.schedule == "gpipe":
                slowest = max(
                    self._spread_s(self.forward_s),
                    rounds * max(self.forward_s / fastest / stages, heavy_forward),
                ) + max(
                    self._spread_s(self.backward_s),
                    rounds * max(self.backward_s / fastest / stages, heavy_backward),
                )
            else:
                slowest = max(
                    self._spread_s(self.forward_s + self.backward_s),
                    rounds * max((whole_s + cuts_s) / stages, heavy),
                )
            least.append(whole_s + cuts_s + slowest)
        return min(least, default=0.0) * (1 - ROUNDING)

    def throughput_s(self) -> float:
        """Bound the throughput objective by the work per device and by the heaviest node."""
        shared_s = (self.forward_s + self.backward_s) / self._power
        heavy_s = self.heaviest[2] / self.devices.fastest / self._replicas
        return max(shared_s, heavy_s) * (1 - ROUNDING)

    def latency_s(self) -> float:
        """Bound the latency by all forwards and the fewest cuts."""
        cuts_s = (min(self._stages(), default=1) - 1) * self.cut_forward_s
        return (self.forward_s / self.devices.fastest + cuts_s) * (1 - ROUNDING)

    def simulated_s(self) -> float:
        """Bound the simulated step by one micro-batch's passage, the work and the heaviest node."""
        if self.options.objective == "latency":
            return self.forward_s / self.devices.fastest * (1 - ROUNDING)
        m, whole_s = self.options.num_microbatches, self.forward_s + self.backward_s
        heavy_s = self.heaviest[2] / self.devices.fastest * -(-m // self._replicas)
        return max(whole_s / self.devices.fastest, m * whole_s / self._power, heavy_s) * (
            1 - ROUNDING
        )


def _least_state_bytes(branches: LayerGraph, options: PlanOptions, num_devices: int) -> int:
    """Bound the largest device's training state by an equal share and by any one node's."""
    costs = branches.costs
    factors = np.zeros(5, dtype=np.int64)
    factors[WEIGHTS] = factors[GRADIENTS] = 1
    # Whole bytes: a lower bound where an element's state is a fraction more.
    training = training_bytes(options.precision, options.optimizer)
    factors[ELEMENTS] = training.of(1)
    # Of a state that replicas share, each may hold as little as nothing; together they hold it.
    own = costs.alone @ factors
    shareable = (costs.alone[:, at] for at in (SHAREABLE, GRADIENTS, ELEMENTS))
    least = own - divided_bytes(options, *shareable)
    everything = int(own.sum()) + sum(int(np.dot(item.sizes, factors)) for item in costs.shared)
    nodes = [int(least[nodes_of(group)].sum()) for group in branches.nodes.members]
    return max([*nodes, -(-everything // num_devices)])


def _is_connected(nodes: Contraction) -> bool:
    """Return True if the graph is connected, so that an edge crosses every cut."""
    # Imported here: only requests that may reorder very many branches come here.
    import networkx

    graph = networkx.DiGraph(nodes.dag.edges)
    graph.add_nodes_from(range(nodes.dag.num_nodes))
    return bool(networkx.is_weakly_connected(graph))
