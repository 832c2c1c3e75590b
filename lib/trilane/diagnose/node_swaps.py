"""Search for a bad node with spares: which nodes to leave out at the next restart, in the fewest restarts.

A job needs n nodes, k spares are available, and a run only shows whether it was good. Each restart leaves out up to k
of the suspect nodes; if the run is good, the bad one is among them. Group testing for one defective (Dorfman 1943; Du
and Hwang 2000, chapter 2), with groups of at most k: ceil(m / k) - 1 tests at most find the group of m, and
ceil(log2 k) more the node in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trilane.utils.validation import require, require_integer, require_known


@dataclass(frozen=True, kw_only=True)
class Search:
    """The state of the search: one of `suspects`, which are distinct, is bad; the next restart omits `left_out`."""

    suspects: tuple[str, ...]
    spares: int
    restarts: int = 0

    def __post_init__(self) -> None:
        require(len(set(self.suspects)) == len(self.suspects) > 0, "suspects", self.suspects, "must be distinct nodes")
        require_integer("spares", self.spares, 1)

    @property
    def done(self) -> bool:
        """Whether one suspect is left."""
        return len(self.suspects) == 1

    @property
    def exclude(self) -> str:
        """sbatch's option for the next restart; once the search is done, that for the bad node."""
        return f"--exclude={','.join(self.suspects if self.done else self.left_out)}"

    def to_json(self) -> dict[str, Any]:
        counts = {"restarts": self.restarts, "restarts_at_most": restarts_at_most(len(self.suspects), self.spares)}
        return {"suspects": [*self.suspects], "left_out": [*self.left_out], **counts, "exclude": self.exclude}

    def to_text(self) -> str:
        """The bad node, or the next step of the search."""
        if self.done:
            return f"the bad node: {self.suspects[0]} ({self.exclude})"
        most = restarts_at_most(len(self.suspects), self.spares)
        lead = f"one bad node among {len(self.suspects)}: restart with {self.exclude}, then add its result to --results"
        return f"{lead}; at most {most} more restarts"

    @property
    def left_out(self) -> tuple[str, ...]:
        """The nodes to swap for spares: half of the suspects, at most as many as there are spares."""
        return self.suspects[: min(self.spares, len(self.suspects) // 2)]

    def after_run(self, good: bool) -> "Search":
        """The state after a run without `left_out`: if it was good, the bad node is one of these."""
        rest = tuple(node for node in self.suspects if node not in self.left_out)
        return replace(self, suspects=self.left_out if good else rest, restarts=self.restarts + 1)


def restarts_at_most(suspects: int, spares: int) -> int:
    """The restarts that the search needs in the worst case."""
    count, inside = 0, 0
    while suspects > 1:
        out = min(spares, suspects // 2)
        # If the run is good, the bad node is in the group left out: the logarithm of its size more.
        inside = max(inside, count + 1 + math.ceil(math.log2(out)))
        suspects, count = suspects - out, count + 1
    return max(count, inside)


def resume_search(nodes: Sequence[str], spares: int, results: Sequence[str]) -> Search:
    """The state of a search among `nodes` after restarts whose `results` were "good" or "bad".

    Raises ValueError for another word, or for more results than the search takes.
    """
    state = Search(suspects=tuple(nodes), spares=spares)
    for result in results:
        require_known("results", result, ("good", "bad"))
        rule = f"has more results than the search takes; the bad node is {state.suspects[0]}"
        require(not state.done, "results", ",".join(results), rule)
        state = state.after_run(result == "good")
    return state
