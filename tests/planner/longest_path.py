"""The step time as the longest path of a graph, written apart from the simulator.

Nodes are pieces of work, messages and sums, their weight is how long they take; an edge leads to
what can begin only afterwards. Messages on a shared channel are put in the order in which they
are made, and everything is counted again, until that order no longer changes.
"""

from itertools import pairwise

import networkx


def step_graph(schedule, times):
    """All that happens in a step; each node has its ``duration``.

    Messages on a shared channel have the ``channel``, and nothing that orders them.
    """
    graph = networkx.DiGraph()
    for action in (action for actions in schedule.ranks for action in actions):
        node = (action.work.value, action.stage, action.microbatch)
        graph.add_node(node, duration=duration_of(action, times))
    for rank, actions in enumerate(schedule.ranks):
        messages = {"next": [], "previous": []}
        for action in actions:
            node = (action.work.value, action.stage, action.microbatch)
            for way, other, send_s, channel in messages_of(schedule, times, rank, action):
                target = ("F", other, action.microbatch)
                if way == "previous":
                    target = backward_of(graph, other, action.microbatch)
                send = ("send", *node, other)
                graph.add_node(send, duration=send_s)
                graph.add_edge(node, send)
                graph.add_edge(send, target)
                if channel < 0:
                    messages[way].append(send)
                else:
                    made = {"by": node, "rank": rank, "place": len(graph)}
                    graph.add_node(send, channel=channel, **made)
        graph.add_edges_from(pairwise([(a.work.value, a.stage, a.microbatch) for a in actions]))
        for queue in messages.values():
            graph.add_edges_from(pairwise(queue))
    for work, stage, index in [node for node in graph if node[0] in "FBI"]:
        if work == "F" and stage + 1 < schedule.num_stages:
            graph.add_edge((work, stage, index), ("F", stage + 1, index))
        if work != "F":
            graph.add_edge(("F", stage, index), (work, stage, index))
            if stage > 0:
                graph.add_edge((work, stage, index), backward_of(graph, stage - 1, index))
        if work == "I":
            graph.add_edge((work, stage, index), ("W", stage, index))
    if len(times.sync_s) and schedule.name != "forward_only":
        for work, stage, index in [node for node in graph if node[0] in "BW"]:
            graph.add_node(("sync", stage), duration=times.sync_s[stage])
            graph.add_edge((work, stage, index), ("sync", stage))
    everything = list(graph)
    graph.add_node("tied", duration=times.tied_sync_s)
    graph.add_edges_from((node, "tied") for node in everything)
    return graph


def backward_of(graph, stage, index):
    """The backward of that stage that waits for gradients: whole, or the input part."""
    return next(node for work in "BI" if (node := (work, stage, index)) in graph)


def duration_of(action, times):
    if action.work == "F":
        return times.forward_s[action.stage]
    if action.work == "B":
        return times.backward_s[action.stage]
    parts = times.backward_input_s if action.work == "I" else times.backward_weight_s
    return parts[action.stage] if len(parts) else times.backward_s[action.stage] / 2


def messages_of(schedule, times, rank, action):
    """Direction, the stage that waits, how long it travels and by which channel, nearest first."""
    work, stage, index = action.work.value, action.stage, action.microbatch
    found = []
    if work == "F":
        channels = times.forward_channel or [-1] * len(times.send_forward_s)
        if stage + 1 < schedule.num_stages and len(times.send_forward_s):
            found.append(("next", stage + 1, times.send_forward_s[stage], channels[stage]))
        found += [
            ("next", skip.target, skip.forward_s, skip.forward_channel)
            for skip in sorted(times.skips, key=lambda skip: skip.target)
            if skip.source == stage
        ]
    elif work in "BI":
        channels = times.backward_channel or [-1] * len(times.send_backward_s)
        if stage > 0 and len(times.send_backward_s):
            found.append(
                ("previous", stage - 1, times.send_backward_s[stage - 1], channels[stage - 1])
            )
        found += [
            ("previous", skip.source, skip.backward_s, skip.backward_channel)
            for skip in sorted(times.skips, key=lambda skip: -skip.source)
            if skip.target == stage
        ]
    return [message for message in found if travels(schedule, rank, index, message)]


def travels(schedule, rank, index, message):
    """Whether it goes to another rank and takes time."""
    ranks = schedule.stage_ranks[message[1]]
    return ranks[index % len(ranks)] != rank and message[2] > 0


def longest_path(schedule, times):
    """End of the step."""
    graph, order = step_graph(schedule, times), None
    while True:
        end_s = ends(graph)
        one_by_one = queues(graph, end_s)
        if one_by_one == order:
            return end_s["tied"]
        graph.remove_edges_from(order or [])
        graph.add_edges_from(one_by_one)
        order = one_by_one


def queues(graph, end_s):
    """Each shared message with the next one on its channel: made next, or at once on a later rank.

    A message's own place decides only between results a rank makes at the same moment.
    """
    channels = {}
    for node, data in graph.nodes(data=True):
        if "channel" in data:
            key = (end_s[data["by"]], data["rank"], data["place"])
            channels.setdefault(data["channel"], []).append((key, node))
    return [
        (one, other)
        for entries in channels.values()
        for (_, one), (_, other) in pairwise(sorted(entries))
    ]


def ends(graph):
    """When each node is done."""
    end_s = {}
    for node in networkx.topological_sort(graph):
        start_s = max((end_s[before] for before in graph.predecessors(node)), default=0.0)
        end_s[node] = start_s + graph.nodes[node]["duration"]
    return end_s
