"""Models with branches: random ones, and the shapes people build."""

from __future__ import annotations

import random
from itertools import permutations

from stagewright.core.graph.graph import MODEL_INPUT, Boundary, Edge
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.profile.profile import Profile
from stagewright.planner.dag.reorder import reorder_profile
from tests.builders import chain_profile, random_profile
from tests.planner.instances import Instance, bound_memory, draw_cluster, draw_options
from tests.planner.oracle import Search


def with_edges(profile, edges, *, handed_out=(), illegal=()):
    """The profile with edges, and what crosses each gap by them.

    Args:
        edges: (source, target, tensor); a tensor has one source.
        handed_out: Names of tensors the model returns.
        illegal: Gaps where no cut may be.
    """
    last = len(profile.layers) - 1
    tensors = {tensor.name: (source, tensor) for source, _, tensor in edges}
    read = {
        name: max(target for _, target, tensor in edges if tensor.name == name) for name in tensors
    }
    boundaries = tuple(
        Boundary(
            after=after,
            tensors=tuple(
                tensor
                for name, (source, tensor) in tensors.items()
                if source <= after and (read[name] > after or name in handed_out)
            ),
            legal=after not in illegal,
            reason="a test forbids it" if after in illegal else "",
        )
        for after in range(last)
    )
    found = tuple(Edge(source=one, target=two, tensor=tensor) for one, two, tensor in edges)
    fields = {"edges": found, "boundaries": boundaries}
    return Profile.model_validate({**dict(profile), **fields})


def tensor(name, size_bytes, requires_grad=True):
    return TensorSpec(name=name, shape=(size_bytes,), dtype="uint8", requires_grad=requires_grad)


def random_branches(seed, num_layers, *, ties=0, illegal=0.0):
    """Each layer reads a few earlier ones, some read the model's input as well."""
    draw = random.Random(seed)
    profile = random_profile(seed, num_layers, ties=ties, illegal=0, storages=draw.random() < 0.8)
    sizes = [draw.choice([0, draw.randrange(1, 4000)]) for _ in range(num_layers)]
    outputs = [tensor(f"t{i}", sizes[i], draw.random() < 0.8) for i in range(num_layers)]
    image = tensor("x", 1000, requires_grad=False)
    density = draw.choice([0.2, 0.4, 0.6])
    edges = []
    for target in range(num_layers):
        sources = [source for source in range(target) if draw.random() < density]
        edges += [(source, target, outputs[source]) for source in sources]
        if not sources or draw.random() < 0.15:
            edges.append((MODEL_INPUT, target, image))
    handed_out = {f"t{i}" for i in range(num_layers) if draw.random() < 0.1}
    forbidden = [gap for gap in range(num_layers - 1) if draw.random() < illegal]
    return with_edges(profile, edges, handed_out=handed_out, illegal=forbidden)


def branch_instance(seed, *, layers=(2, 3, 4, 4, 5, 5), devices=(1, 2, 2, 3, 3, 4), **asked):
    """As `instances.instance`, of a model with branches that may be reordered."""
    draw = random.Random(seed)
    profile = random_branches(
        seed,
        draw.choice(layers),
        ties=draw.choice([0, 0, 0, 1]),
        illegal=draw.choice([0.0, 0.0, 0.2]),
    )
    cluster = draw_cluster(draw, draw.choice(devices))
    options = draw_options(draw, profile, cluster)
    found = Instance(profile, cluster, options).asked(layer_order="any", **asked)
    return bound_memory(draw, found) if draw.random() < 0.5 else found


def every_order(profile):
    """The profile in every order its edges and its illegal cuts allow."""
    before = {(edge.source, edge.target) for edge in profile.edges if edge.source != MODEL_INPUT}
    glued = [gap.after for gap in profile.boundaries if not gap.legal]
    for order in permutations(range(len(profile.layers))):
        place = {layer: index for index, layer in enumerate(order)}
        if all(place[one] < place[two] for one, two in before) and all(
            place[one] + 1 == place[one + 1] for one in glued
        ):
            yield reorder_profile(profile, order)


def least_of_all_orders(problem):
    """The smallest rank of any usable plan of any order; `None` without any.

    That no stage ends behind a layer means here that the next one of the profile's own order is
    in its stage, and that the last one stays last.
    """
    names = [entry.layer.name for entry in problem.profile.layers]
    pairs = [
        (name, names[names.index(name) + 1])
        for name in problem.options.no_cut_after
        if name != names[-1]
    ]
    asked = problem.asked(together=(*problem.options.together, *pairs), no_cut_after=())
    best = None
    for profile in every_order(problem.profile):
        is_last = profile.layers[-1].layer.name == names[-1]
        if names[-1] in problem.options.no_cut_after and not is_last:
            continue
        search = Search(Instance(profile, problem.cluster, asked.options), asked.options.objective)
        search.best = best
        for choices in search.plans():
            rank = search.rank(choices)
            if (best is None or rank < best) and search.split(choices).is_usable():
                best = search.best = rank
    return best


def unet(levels, *, step_s=1e-3):
    """An encoder, a bottom and a decoder; each level's output is read again on the way up."""
    work = [step_s * (1 + level) for level in range(levels)]
    profile = chain_profile([*work, step_s * 2, *work[::-1]], saved_bytes=1000)
    count = len(profile.layers)
    outputs = [tensor(f"t{i}", 1 << (12 - min(i, count - 1 - i))) for i in range(count)]
    edges = [(MODEL_INPUT, 0, tensor("x", 64, requires_grad=False))]
    edges += [(index, index + 1, outputs[index]) for index in range(count - 1)]
    edges += [(level, count - 1 - level, outputs[level]) for level in range(levels)]
    return with_edges(profile, edges)


def inception(modules, *, branches=4, depth=2):
    """Modules of side-by-side branches between a split and a concatenation."""
    draw = random.Random(7)
    edges, source, count = [], 0, 1
    for _ in range(modules):
        ends = []
        for _ in range(branches):
            before = source
            for _ in range(draw.randint(1, depth)):
                edges.append((before, count))
                before, count = count, count + 1
            ends.append(before)
        edges += [(end, count) for end in ends]
        source, count = count, count + 1
    return _from_pairs(count, edges, draw)


def two_towers(blocks, *, forward_s=None):
    """Two chains of blocks that read the same input and meet in a head."""
    draw = random.Random(11)
    one = [(index, index + 1) for index in range(blocks - 1)]
    two = [(blocks + index, blocks + index + 1) for index in range(blocks - 1)]
    head = [(blocks - 1, 2 * blocks), (2 * blocks - 1, 2 * blocks)]
    return _from_pairs(2 * blocks + 1, [*one, *two, *head], draw, forward_s)


def _from_pairs(count, pairs, draw, forward_s=None):
    """Layers of random work and weights, every output read by the targets of its pairs."""
    profile = chain_profile(
        forward_s or [draw.uniform(0.5, 2) * 1e-3 for _ in range(count)],
        parameter_bytes=4000,
        saved_bytes=1000,
    )
    outputs = [tensor(f"t{i}", draw.randrange(100, 2000)) for i in range(count)]
    reading = {target for _, target in pairs}
    edges = [
        (MODEL_INPUT, target, tensor("x", 500, requires_grad=False))
        for target in range(count)
        if target not in reading
    ]
    edges += [(source, target, outputs[source]) for source, target in sorted(pairs)]
    return with_edges(profile, edges)
