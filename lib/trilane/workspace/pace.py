"""Pace: how long a rank's iterations take relative to its own median, in which of its own work the
difference lies, and the events of a slow run (ranks/pace.jsonl).

All ranks train in step, so that the ranks of a slow run are late in the same iterations: each node
sees that by itself.
"""

import json
from pathlib import Path

from trilane.utils.files import append_line, json_lines, read_text
from trilane.utils.frozen import frozen
from trilane.utils.tables import one_line

# the phases of a rank's own work
OWN = ("batch-generator", "forward-compute", "backward-compute", "optimizer")
LATE = 10  # iterations of which a rank knows its usual pace
# the content of the file `save` that also ends a run; what such a run is stopped by
RESTART = "a slow node"


@frozen
class Pace:
    """Seconds of an iteration, by their median (`usual_s`) and in the last late ones (`now_s`,
    their mean); what each phase of OWN takes longer. `usual_s` is 0 until there is a median.

    `lost`: what late iterations have cost, in restarts of this run; since `late` iterations.
    """

    late: int = 0
    lost: float = 0.0
    usual_s: float = 0.0
    now_s: float = 0.0
    excess_s: tuple[float, ...] = (0.0,) * len(OWN)


def note(folder: Path, iteration: int, text: str, nodes: tuple[str, ...] = ()) -> None:
    """Append an event of the run's pace; `text` is "" where it is as usual again. OSError where the
    disk is full.
    """
    values = {"iteration": iteration, "text": text, "nodes": nodes}
    append_line(folder / "ranks/pace.jsonl", json.dumps(values))


def slowness(folder: Path) -> tuple[str, tuple[str, ...]]:
    """What makes the run slow now, in one line, and the nodes at fault; "" where it is as fast as
    usual.
    """
    events = json_lines(read_text(folder / "ranks/pace.jsonl"))
    if not events:
        return "", ()
    nodes = events[-1].get("nodes")
    names = map(str, nodes) if isinstance(nodes, list) else ()
    return one_line(str(events[-1].get("text", ""))), tuple(names)
