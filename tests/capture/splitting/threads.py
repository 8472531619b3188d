"""Ranks that are threads, and a model split over them."""

import copy
import threading

import torch
from torch import nn

from stagewright.capture.capture import trace
from stagewright.capture.splitting.find_split import find_split
from stagewright.capture.splitting.rewrite import Exchange, join_parts, rewrite, take_part


class Threads:
    """As many ranks in threads, which hand each other tensors."""

    def __init__(self, count):
        self.count, self.barrier, self.given = count, threading.Barrier(count), [None] * count
        self.seen = {"enter": [], "add": [], "gather": []}

    def collect(self, rank, value, kind):
        if rank == 0:
            pieces = self.count if kind == "gather" else 1
            self.seen[kind].append(value.nbytes * pieces)
        self.given[rank] = value
        self.barrier.wait(60)
        found = list(self.given)
        self.barrier.wait(60)
        return found

    def exchange(self, rank):
        class Enter(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return value.view_as(value)

            @staticmethod
            def backward(ctx, gradient):
                return sum(self.collect(rank, gradient, "enter"))

        class Add(torch.autograd.Function):
            @staticmethod
            def forward(ctx, value):
                return sum(self.collect(rank, value, "add"))

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        def gather(layout):
            class Gather(torch.autograd.Function):
                @staticmethod
                def forward(ctx, value):
                    return join_parts(self.collect(rank, value, "gather"), layout)

                @staticmethod
                def backward(ctx, gradient):
                    return take_part(gradient, layout.dim, layout.parts, rank, self.count)

            def joined(value):
                return Gather.apply(value)

            return joined

        def enter(value):
            return Enter.apply(value)

        def add(value):
            return Add.apply(value)

        def nothing():
            pass

        return Exchange(rank, self.count, enter, add, gather, nothing, nothing)


def split_of(captured, degree):
    return find_split([(captured.program, captured.layers)], [degree] * len(captured.layers))


def run_split(model, sample, degree, ranks=None, *, autocast=False):
    """Outputs of every rank, whole gradients by name, and the names of divided weights."""
    ranks = ranks or Threads(degree)
    models, segments, layouts = [], [], {}
    for rank in range(degree):
        own = copy.deepcopy(model)
        captured = trace(own, sample, check=False)
        split = split_of(captured, degree)
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
        segments.append(captured.segment(0, len(captured.layers)))
    outputs = [None] * degree

    def work(rank):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            made = segments[rank](*sample)[0]
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
