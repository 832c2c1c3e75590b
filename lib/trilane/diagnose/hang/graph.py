"""Graphs of who waits for whom: what leads where, and which ranks wait for each other in a ring."""

from collections import defaultdict
from collections.abc import Iterable

Edges = dict[int, set[int]]


def reaching(edges: Edges, targets: Iterable[int]) -> set[int]:
    """The ranks from which a chain of waiting leads to one of the targets."""
    back: defaultdict[int, set[int]] = defaultdict(set)
    for rank, others in edges.items():
        for other in others:
            back[other].add(rank)
    found: set[int] = set()
    queue = list(targets)
    while queue:
        for rank in back[queue.pop()] - found:
            found.add(rank)
            queue.append(rank)
    return found


def components(edges: Edges) -> list[set[int]]:
    """The strongly connected components of a graph (Tarjan 1972, without recursion)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on: set[int] = set()
    found = []
    for root in edges:
        if root in order:
            continue
        work = [(root, iter(edges[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on.add(root)
        while work:
            node, targets = work[-1]
            fresh = next((t for t in targets if t in edges and (t not in order or t in on)), None)
            if fresh is not None and fresh not in order:
                order[fresh] = low[fresh] = len(order)
                stack.append(fresh)
                on.add(fresh)
                work.append((fresh, iter(edges[fresh])))
            elif fresh is not None:
                low[node] = min(low[node], order[fresh])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    cut = stack.index(node)
                    found.append(set(stack[cut:]))
                    on -= set(stack[cut:])
                    del stack[cut:]
    return found
