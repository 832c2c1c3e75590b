"""Search for a bad node with spares: which nodes to leave out at the next restart, in the fewest restarts.

A job needs n nodes, k spares are available, and a run only shows whether it was good. Each restart leaves out up to k
of the suspect nodes; if the run is good, the bad one is among them. Group testing for one defective (Dorfman 1943; Du
and Hwang 2000, chapter 2), with groups of at most k: ceil(m / k) - 1 tests at most find the group of m, and
ceil(log2 k) more the node in it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trilane.utils.validation import require, require_integer, require_known


@dataclass(frozen=True, kw_only=True)
class Search:
    """The state of the search: one of `suspects`, which are distinct, is bad; the next restart omits `left_out`."""

    suspects: tuple[str, ...]
    spares: int
    restarts: int = 0
    cleared: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        require(len(set(self.suspects)) == len(self.suspects) > 0, "suspects", self.suspects, "must be distinct nodes")
        require_integer("spares", self.spares, 1)

    @property
    def done(self) -> bool:
        """Whether one suspect is left."""
        return len(self.suspects) == 1

    @property
    def left_out(self) -> tuple[str, ...]:
        """The nodes to swap for spares: half of the suspects, at most as many as there are spares."""
        return self.suspects[: min(self.spares, len(self.suspects) // 2)]

    def told(self, good: bool) -> "Search":
        """The state after a run without `left_out`: if it was good, the bad node is one of these."""
        out = self.left_out
        rest = tuple(node for node in self.suspects if node not in out)
        keep, clear = (out, rest) if good else (rest, out)
        return Search(suspects=keep, spares=self.spares, restarts=self.restarts + 1, cleared=(*self.cleared, *clear))


def restarts_at_most(suspects: int, spares: int) -> int:
    """The restarts that the search needs in the worst case."""
    count = 0
    while suspects > 1:
        out = min(spares, suspects // 2)
        if out < suspects - out and out == spares:
            # Worst case: the run is bad again. Inside a group it is the logarithm.
            later = math.ceil(math.log2(out)) if out > 1 else 0
            rest = restarts_at_most(suspects - out, spares)
            return count + 1 + max(later, rest)
        suspects, count = max(out, suspects - out), count + 1
    return count


def search(nodes: Sequence[str], spares: int, is_good: Callable[[tuple[str, ...]], bool]) -> Search:
    """Run the search: `is_good(nodes left out)` restarts the job without them and returns whether it was good."""
    state = Search(suspects=tuple(nodes), spares=spares)
    while not state.done:
        state = state.told(is_good(state.left_out))
    return state


VERDICTS = ("good", "bad")


def plan_swaps(nodes: Sequence[str], spares: int, results: Sequence[str]) -> dict[str, Any]:
    """The state of a search among `nodes` after the restarts whose `results` were "good" or "bad", as JSON."""
    state = Search(suspects=tuple(nodes), spares=spares)
    for result in results:
        require_known("told", result, VERDICTS)
        rule = f"has more results than the search took; it is {state.suspects[0]}"
        require(not state.done, "told", ",".join(results), rule)
        state = state.told(result == "good")
    return {
        "suspects": list(state.suspects),
        "left_out": list(state.left_out),
        "restarts": state.restarts,
        "restarts_at_most": restarts_at_most(len(state.suspects), spares),
        "exclude": f"--exclude={','.join(state.suspects if state.done else state.left_out)}",
    }


def swaps_text(search: Mapping[str, Any]) -> str:
    """What plan_swaps() found, and the next step."""
    suspects = search["suspects"]
    if len(suspects) == 1:
        return f"the bad node: {suspects[0]} ({search['exclude']})"
    return (
        f"one bad node among {len(suspects)}: restart with {search['exclude']}, then give its result with --told; "
        f"at most {search['restarts_at_most']} more restarts"
    )
