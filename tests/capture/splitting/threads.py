"""Ranks that are threads, and a model split over them."""

import copy
import threading
from collections import Counter
from itertools import pairwise

import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.splitting.find_split import find_split, list_outputs
from stagewright.capture.splitting.rewrite import Exchange, join_parts, rewrite, take_part


class Threads:
    """As many ranks in threads, which hand each other tensors."""

    def __init__(self, count):
        self.count, self.barrier, self.given = count, threading.Barrier(count), [None] * count
        self.seen = Counter()

    def collect(self, rank, value, kind):
        """Return all ranks' tensors; ``kind`` counts the bytes of the whole of them."""
        if rank == 0:
            self.seen[kind, value.nbytes * (self.count if kind == "join" else 1)] += 1
        self.given[rank] = value
        self.barrier.wait(60)
        found = list(self.given)
        self.barrier.wait(60)
        return found

    def exchange(self, rank):
        def take(value, layout):
            return take_part(value, layout.dim, layout.parts, rank, self.count)

        def join(value, layout):
            return join_parts(self.collect(rank, value, "join"), layout)

        def add(value, layout):
            return sum(self.collect(rank, value, "add"))

        def add_part(value, layout):
            return take(sum(self.collect(rank, value, "add_part")), layout)

        def keep(value, layout):
            return value.clone()

        def pair(forward, backward):
            class Pair(torch.autograd.Function):
                @staticmethod
                def forward(ctx, value, layout):
                    ctx.layout = layout
                    return forward(value, layout)

                @staticmethod
                def backward(ctx, gradient):
                    return backward(gradient, ctx.layout), None

            return lambda layout: lambda value: Pair.apply(value, layout)

        def nothing():
            pass

        return Exchange(
            rank=rank,
            degree=self.count,
            enter=pair(keep, add)(None),
            take=pair(take, join),
            add=pair(add, keep)(None),
            add_part=pair(add_part, join),
            gather=pair(join, take),
            gather_entered=pair(join, add_part),
            draw_apart=nothing,
            draw_alike=nothing,
        )


def join_outputs(made):
    """One tensor of a model's outputs, flat if there are several."""
    made = (made,) if isinstance(made, torch.Tensor) else made
    return made[0] if len(made) == 1 else torch.cat([each.flatten() for each in made])


def split_of(captured, degree, stages=()):
    traced = [(captured.program, captured.layers, captured.cuts)]
    return find_split(traced, [degree] * len(captured.layers), stages)


def run_split(model, sample, degree, ranks=None, *, stages=(), autocast=False):
    """Outputs of every rank, whole gradients by name, and the names of divided weights."""
    ranks = ranks or Threads(degree)
    models, segments, layouts = [], [], {}
    for rank in range(degree):
        own = copy.deepcopy(model)
        captured = trace(own, sample, check=False)
        split = split_of(captured, degree, stages)
        exchange = ranks.exchange(rank)
        rewrite(captured.program, captured.layers, split, lambda layer, own=exchange: own)
        parts = {}
        for module in own.modules():
            for table in (module._parameters, module._buffers):
                for key, weight in table.items():
                    if id(weight) in split.weights:
                        layout = split.weights[id(weight)].layout
                        part = take_part(weight.detach(), layout.dim, layout.parts, rank, degree)
                        own_part = part.clone()
                        if isinstance(weight, nn.Parameter):
                            own_part = nn.Parameter(own_part)
                        parts.setdefault(id(weight), (weight, own_part))
                        table[key] = parts[id(weight)][1]
        layouts = {
            name: split.weights[key].layout
            for name, weight in own.named_parameters()
            for key, (_, part) in parts.items()
            if part is weight
        }
        models.append(own)
        ends = [at for at, pair in enumerate(pairwise(stages), 1) if pair[0] != pair[1]]
        edges = [0, *ends, len(captured.layers)]
        segments.append([captured.segment(*pair) for pair in pairwise(edges)])
    outputs = [None] * degree
    shards = list_outputs(captured.program, split)
    # What is in parts is joined by other ranks than those that count what is exchanged.
    joining = Threads(degree)

    def work(rank):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            made = sample
            for segment in segments[rank]:
                made = segment(*made)
            join = joining.exchange(rank).gather
            made = [
                value if layout is None else join(layout)(value)
                for value, layout in zip(made, shards, strict=True)
            ]
            made = join_outputs(made)
        made.mul(torch.arange(made.numel()).reshape(made.shape).sin()).sum().backward()
        outputs[rank] = made.detach()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gradients = {}
    for name in dict(models[0].named_parameters()):
        held = [model.get_parameter(name).grad for model in models]
        gradients[name] = [join_parts(held, layouts[name])] if name in layouts else held
    return outputs, gradients, set(layouts)
