"""Rendezvous: how long the processes of a run wait for one another at its start, and which of them did not come.

At 128 nodes the first import of torch from a shared file system takes minutes, and not the same on each node. torch
2.13 waits 60 s for the first node (read_timeout in c10d_rendezvous_backend.py), then 600 s for all
(dynamic_rendezvous.py).
"""

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

# from the first node that waits to the last that comes; then the same from the first rank to the last
WAIT_S = 600
# torch takes a node out whose last sign of life is 15 s old, by the clock of each node, and nothing ever replaces it
KEEP_ALIVE_ATTEMPTS = 120  # of 5 s
# of a collective: longer than the slowest work of one rank while the others wait, preparing a corpus on a shared disk
TIMEOUT = timedelta(minutes=30)
HOSTS = "TRAIN_HOSTS"  # the nodes that train, as SLURM names them, in their order; set by the job script


def settings(given: str, env: Mapping[str, str] = os.environ) -> str:
    """torchrun's --rdzv-conf, with ours where it names none.

    In a job the first node hosts the store by SLURM's names: torch compares host names and addresses, and where they
    differ from SLURM's none does, or two.
    """
    named = {part.partition("=")[0].strip() for part in given.split(",")}
    ours = {"join_timeout": WAIT_S, "read_timeout": WAIT_S, "keep_alive_max_attempt": KEEP_ALIVE_ATTEMPTS}
    if (hosts := env.get(HOSTS, "").split()) and "SLURMD_NODENAME" in env:
        ours["is_host"] = int(env["SLURMD_NODENAME"] == hosts[0])
    return ",".join([*filter(None, [given]), *(f"{k}={v}" for k, v in ours.items() if k not in named)])


def absent_nodes(came: Collection[str], nodes: int, env: Mapping[str, str] = os.environ) -> str:
    """How many of the nodes came, and the names of the others; the names of those that came where SLURM's differ."""
    hosts, here = env.get(HOSTS, "").split(), {name.partition(".")[0] for name in came}
    missing = [host for host in hosts if host.partition(".")[0] not in here]
    text = f"{len(came)} of {nodes} nodes came"
    if len(missing) != nodes - len(came):
        return f"{text} ({_short(sorted(came))})"
    return f"{text}, not {_short(missing)}"


def absent_ranks(came: Collection[int], size: int, local_size: int, env: Mapping[str, str] = os.environ) -> str:
    """How many of the ranks came, and which did not, with the names of their nodes where they are known."""
    hosts, missing = env.get(HOSTS, "").split(), sorted(set(range(size)) - set(came))
    nodes = list(dict.fromkeys(hosts[r // local_size] for r in missing if r // local_size < len(hosts)))
    where = f" (on {_short(nodes)})" if nodes else ""
    return f"{size - len(missing)} of {size} ranks came, not rank {_short([str(r) for r in missing])}{where}"


def _short(names: Sequence[str], most: int = 16) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
