"""Response: what is done about a run that has stopped being useful, by one table of verdicts
(data/responses.json), in which a site may change what follows.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence

from trilane.utils.frozen import frozen
from trilane.utils.validation import require, require_known, shipped_json

CHANGED_BY = "TRILANE_RESPONSES"  # in a job's environment: what its site changes, as JSON
ACTIONS = {
    "spare": "again on spare nodes",
    "same": "again on the same nodes",
    "requeue": "back into the queue",
    "stop": "stops",
}
# of an end for which no node was found at fault; a "failure" else
VERDICTS = shipped_json("ends")["verdicts"]


@frozen
class Response:
    """What is done, an action of ACTIONS, about what; `nodes` leave the run."""

    verdict: str
    action: str
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        without = f", without {', '.join(self.nodes)}" if self.nodes else ""
        return f"{self.verdict}: {ACTIONS[self.action]}{without}"


def require_responses(name: str, changed: Mapping[str, Sequence[str]]) -> None:
    """ValueError for a verdict or an action that the table does not know."""
    for verdict, actions in changed.items():
        require_known(name, verdict, list(shipped_json("responses")))
        for action in actions:
            require_known(f"{name}.{verdict}", action, list(ACTIONS))


def actions(verdict: str) -> list[str]:
    """What may follow a verdict, in order, by the table and the site's changes in the job's
    environment.
    """
    changed = json.loads(os.environ.get(CHANGED_BY) or "{}")
    require(isinstance(changed, dict), CHANGED_BY, changed, "must be a JSON object")
    require_responses(CHANGED_BY, changed)
    return changed.get(verdict) or shipped_json("responses")[verdict]["then"]


def decide(
    verdict: str,
    *,
    trained: Collection[str],
    left: Collection[str],
    blamed: Collection[str],
    tried: Collection[str] = (),
    may_requeue: bool = True,
) -> Response:
    """The first action of the verdict's row that can be done.

    trained  the nodes that trained
    left     the nodes of the job that have not failed, spares among them
    blamed   those at fault: by proof, or of a hang the suspect's
    tried    the actions that were tried at this iteration

    Of several nodes that train never all leave: then nothing tells them apart. On the same nodes a
    run starts again once; a spare or another allocation needs a node to leave out.
    """
    nodes = tuple(node for node in left if node in blamed)
    training = set(trained or left)
    if len(training) > 1 and training <= set(nodes):
        nodes = ()
    has_spares = len(trained) > 0 and len(left) - len(nodes) >= len(trained)
    can_do = {
        "same": "same" not in tried,
        "spare": nodes and has_spares,
        "requeue": nodes and may_requeue,
        "stop": True,
    }
    action = next(filter(can_do.get, actions(verdict)), "stop")
    if action == "same":
        nodes = ()
    return Response(verdict=verdict, action=action, nodes=nodes)
