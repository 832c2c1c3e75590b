"""Communication rates: all_reduce within a host and among all, and messages between two processes."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trilane.engine.bench.device_rates import once_s
from trilane.engine.distributed.world import World

LARGE_CALLS, SMALL_CALLS = 40, 200


@dataclass(frozen=True, kw_only=True)
class Link:
    """Rates among `ranks` processes: a large and a small all_reduce, and a message between two.

    `bytes_per_s` is what each sends in a ring; `hop_s` the latency of one of its 2 (n - 1) steps.
    """

    ranks: int
    bytes_per_s: float
    hop_s: float
    pair_bytes_per_s: float
    pair_s: float


def large_bytes(device: torch.device) -> int:
    """Bytes of the large message: a small GPT's gradient bucket on a CPU, enough to fill NVLink on a GPU."""
    return 2**28 if device.type == "cuda" else 2**22


def links(world: World, hosts: list[str]) -> tuple[Link | None, Link | None]:
    """(within the hosts, among all); None where a host has one rank, or where there is one host. Collective.

    `hosts` names the host of every rank; each has the same number of ranks. Within, all hosts work at once, and two
    ranks of the first host exchange messages; among all, the first ranks of the first two hosts do.
    """
    groups = {host: [rank for rank, h in enumerate(hosts) if h == host] for host in hosts}
    first = next(iter(groups.values()))
    # new_group is collective over all ranks.
    by_host = {host: dist.new_group(ranks) for host, ranks in groups.items()}
    inside = among = None
    if len(first) > 1:
        inside = _link(world, by_host[hosts[world.rank]], len(first), (first[0], first[1]))
    if len(groups) > 1:
        _, second, *_ = groups.values()
        among = _link(world, dist.group.WORLD, len(hosts), (first[0], second[0]))
    return inside, among


def _link(world: World, group: dist.ProcessGroup | None, n: int, pair: tuple[int, int]) -> Link:
    large = large_bytes(world.device)
    large_s = reduce_s(world, group, large, LARGE_CALLS)
    small_s = reduce_s(world, group, 4, SMALL_CALLS)
    message_large_s = message_s(world, pair, large, LARGE_CALLS)
    message_small_s = message_s(world, pair, 4, SMALL_CALLS)
    return Link(
        ranks=n,
        bytes_per_s=ring_bytes_per_s(large, n, large_s),
        hop_s=small_s / (2 * (n - 1)),
        pair_bytes_per_s=large / message_large_s,
        pair_s=message_small_s,
    )


def ring_bytes_per_s(bytes_: int, n: int, seconds: float) -> float:
    """What each of `n` ranks sends per second while a ring all_reduce of `bytes_` takes `seconds`.

    2 (n - 1) / n bytes / seconds, as nccl-tests defines bus bandwidth; over several hosts this is also what a whole
    host sends, because each ring enters and leaves it once. Left out: trees, which NCCL uses for small messages.
    """
    return 2 * (n - 1) / n * bytes_ / seconds


def reduce_s(world: World, group: dist.ProcessGroup | None, bytes_: int, calls: int) -> float:
    """Median seconds of an all_reduce of `bytes_` in `group`, on every rank of it."""
    tensor = torch.zeros(bytes_ // 4, device=world.device)
    return median_s(lambda: dist.all_reduce(tensor, group=group), world.device, calls)


def message_s(world: World, pair: tuple[int, int], bytes_: int, calls: int) -> float:
    """Median seconds of a message of `bytes_` from one rank of the pair to the other, on all ranks."""
    tensor, (here, there) = torch.zeros(bytes_ // 4, device=world.device), pair

    def there_and_back() -> None:
        if world.rank == here:
            dist.send(tensor, there)
            dist.recv(tensor, there)
        else:
            dist.recv(tensor, here)
            dist.send(tensor, here)

    seconds = median_s(there_and_back, world.device, calls) / 2 if world.rank in pair else 0.0
    result = torch.tensor([seconds], dtype=torch.float64, device=world.device)
    dist.broadcast(result, here)
    return float(result.item())


def median_s(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Median seconds of `calls` calls, after as many to warm up: gloo's first calls are slow."""
    for _ in range(calls):
        once_s(work, device)
    return statistics.median(once_s(work, device) for _ in range(calls))
