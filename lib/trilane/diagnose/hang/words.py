"""A hang in words: the paragraph of a verdict, its notes, ranks and stacks in a line."""

from itertools import groupby

from trilane.diagnose.hang.condition import NO_EVIDENCE, Conditions
from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.stack import Frame
from trilane.diagnose.hang.suspects import Suspects
from trilane.diagnose.hang.wait import OTHER
from trilane.utils.tables import grouped
from trilane.workspace.rank_grid import Grid, shared

# Waits whose collective is not in the stack, of ranks at a line.
WAITS = {
    "device": "wait for the GPU, called by {2}",
    "line": "are at {2}, where they compute, or wait for what stacks do not show",
    "wait": "are at {2}, which communicates{1}",
}
UNKNOWN_GROUP = " of a group that tp, pp and dp do not give"
SHOWN = 6  # frames of a stack in text
TOP_LEVEL = ("runpy.py", "<frozen runpy>", "run_module", "threading.py", "<module>")


def sentences(evidence: Evidence, found: Conditions, suspects: Suspects, exclude: str) -> list[str]:
    """The paragraph: which ranks wait where, which never came and where they are, what to do."""
    grid, text = evidence.grid, []
    for (op, site, axis), ranks in _waiting(found, suspects)[:3]:
        over = {"": "", "world": " over all ranks", OTHER: UNKNOWN_GROUP}.get(axis, f" over {axis}")
        known = "" if evidence.is_whole else "known "
        many = f"{len(ranks)} of {len(grid.ranks)} {known}ranks ({span(ranks)})"
        text.append(f"{many} {WAITS.get(op, 'wait in {0}{1}, called by {2}').format(op, over, site)}.")
    if not suspects.ranks:
        asides = [f"{_name(grid, [r])}: {c.aside}." for r, c in found.items() if c.aside][:4]
        return [*text, _without_suspects(evidence, found, suspects), *asides]
    for reason, ranks in list(grouped(suspects.ranks, suspects.reasons.__getitem__).items())[:4]:
        c = found[ranks[0]]
        where = f"; {'it is' if len(ranks) == 1 else 'they are'} in {stack_line(c.frames)}" if c.frames else ""
        text.append(f"{_name(grid, ranks)}: {reason}{where}.")
    steps = {grid[r].step for r in suspects.ranks if grid[r].step >= 0}
    if len(steps) == 1:
        phases = sorted({grid[r].phase for r in suspects.ranks} - {""})
        text.append(f"Last heartbeat in iteration {steps.pop()}{', phase ' + ' or '.join(phases) if phases else ''}.")
    if not evidence.earlier and any(found[r].kind == "busy" and found[r].frames for r in suspects.ranks):
        text.append("One dump shows one moment: whether it stays there, a second one shows.")
    if exclude:
        text.append(f"To continue without: {exclude} (a hang that recurs on other nodes is in the code).")
    return text


def _without_suspects(evidence: Evidence, found: Conditions, suspects: Suspects) -> str:
    """Why no rank is named.

    That all are in one and the same operation only Flight Recorders show, since one line reduces all buckets, and is
    passed in each layer and microbatch.
    """
    waits = {r: c.wait for r, c in found.items() if c.wait is not None}
    missing = [r for r, c in found.items() if c.kind in NO_EVIDENCE]
    blind = [r for r, wait in waits.items() if wait.is_blind]
    recorded = {r for r, recording in evidence.recordings.items() if recording.waiting is not None}
    if suspects.moves:
        return (
            "Every rank moved between the two moments: whether the job goes on, however slowly, or polls in a loop, or "
            "is stuck only since, cannot be determined without a third dump."
        )
    if not suspects.edges:
        none = "No rank that was dumped" if missing else "No rank"
        return f"{none} is seen in a wait for others: who waits for whom cannot be determined from these dumps."
    if missing:
        return (
            f"Who has not come may be among {_ranks(missing)}, of which there is no readable dump (their processes "
            "have ended, or were not dumped), or all came, and the operation does not end: which, cannot be determined."
        )
    if blind:
        at_one_line = suspects.complete and len(blind) == len(found) and len({waits[r].site for r in blind}) == 1
        one = "All ranks, at the same line," if at_one_line else f"Ranks {span(blind)}"
        verb = "compute, or wait" if any(waits[r].op == "line" for r in blind) else "wait"
        return (
            f"{one} {verb} for work that was queued on their GPUs before, which stacks do not show: which rank is "
            "late, or whether the network is at fault, cannot be determined from these dumps. "
            "Take Flight Recorder dumps."
        )
    moved = [r for r, c in found.items() if c.moves]
    if suspects.complete and moved:
        return (
            f"All wait in one collective by the last dump, but {_ranks(moved)} moved between the two moments: "
            "whether the job is slow, or stuck only since, cannot be determined without a third dump."
        )
    if not evidence.is_whole:
        return (
            "None of the ranks that were dumped is seen to be late; how many the job has is not known (give --tp, "
            "--pp, --dp), so that whether another one did not come cannot be determined."
        )
    queued, elsewhere = _only_queued(evidence, recorded)
    if suspects.complete and elsewhere:
        return (
            f"All members of every group have queued the same collectives, but {_ranks(elsewhere)} "
            f"wait{'s' * (len(elsewhere) == 1)} in another one than others, queued before theirs: whether a rank is "
            "late, or has another order, or the network is at fault, cannot be determined."
        )
    if suspects.complete and queued:
        return (
            f"All members of every group have queued the same collective, but that the GPUs of {_ranks(queued)} "
            "have reached it is not recorded: whether one of these is late, or waits for another group's collective, "
            "or the network is at fault, cannot be determined."
        )
    if suspects.complete and waits.keys() <= recorded:
        return (
            "All members of every group are in the same collective, so that the operation itself does not end; suspect "
            "the network or NCCL, and compare a second dump."
        )
    if suspects.complete:
        return (
            "All members of every group are in the same collective by their stacks: suspect the network or NCCL, "
            "unless one of them is in another bucket, layer or microbatch at this line, which cannot be determined "
            "from stacks (Flight Recorder dumps show it). Compare a second dump."
        )
    ends = [r for r, targets in suspects.edges.items() if not targets and found[r].wait is not None]
    if any(suspects.axes.get(r) == OTHER for r in ends):
        return (
            f"{_ranks(ends).capitalize()}, for which the others wait, {'is' if len(ends) == 1 else 'are'} in a "
            f"collective{UNKNOWN_GROUP}: whether all of it have come, or the network is at fault, cannot be determined "
            "from these dumps."
        )
    if ends:
        return (
            f"Ranks {span(ends)}, for which the others wait, are each in the same collective as all of their group by "
            "their stacks: which is at fault, or whether the network is, cannot be determined from these dumps."
        )
    return "Which of the ranks is at fault cannot be determined from these dumps."


def _only_queued(evidence: Evidence, recorded: set[int]) -> tuple[list[int], list[int]]:
    """The ranks whose GPU is not recorded to have reached the call they wait in, and those that have queued one behind
    it that another rank's is in."""
    pending = {r: [c for c in evidence.recordings[r].calls if not c.done] for r in sorted(recorded)}
    started = {(c.group, c.sequence) for calls in pending.values() for c in calls if c.state == "started"}
    queued = [r for r, calls in pending.items() if calls[0].state != "started"]
    behind = {r: {(c.group, c.sequence) for c in calls[1:] if c.state != "started"} for r, calls in pending.items()}
    return queued, [r for r in pending if r not in queued and started & behind[r]]


def _waiting(found: Conditions, suspects: Suspects) -> list[tuple[tuple[str, str, str], list[int]]]:
    """The waiting ranks that are no suspects, by what they wait in; the largest first."""
    waits = {r: c.wait for r, c in sorted(found.items()) if c.wait is not None and r not in suspects.ranks}
    # An axis that no name in the stack shows is a guess.
    named = {r: wait.axis if suspects.axes.get(r) == wait.axis else "" for r, wait in waits.items()}
    same = grouped(waits, lambda r: (waits[r].op, str(waits[r].site), named[r]))
    return sorted(same.items(), key=lambda item: -len(item[1]))


def _name(grid: Grid, ranks: list[int]) -> str:
    """Ranks with their coordinates; only the nodes where they are all ranks of these."""
    on = list(dict.fromkeys(grid[r].node for r in sorted(ranks)))
    nodes = [grid.node_name(node) for node in on]
    if len(ranks) == 1:
        p = grid[ranks[0]]
        return f"Rank {p.rank} ({f'tp {p.tp}, pp {p.pp}, dp {p.dp}, ' if grid.known else ''}{nodes[0]})"
    if all(len(grid.nodes[n]) == sum(1 for r in ranks if grid[r].node == n) for n in on):
        return f"All of {', '.join(nodes)} (ranks {span(ranks)})"
    where = ", ".join([*(shared([grid[r] for r in ranks]) if grid.known else []), *nodes[:4]])
    return f"Ranks {span(ranks)} ({where}{', ...' if len(nodes) > 4 else ''})"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {span(ranks)}"


def span(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks as ranges, such as 0-3, 7, 9-11."""
    words = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda item: item[1] - item[0]):
        block = [rank for _, rank in run]
        words.append(f"{block[0]}-{block[-1]}" if len(block) > 1 else str(block[0]))
    return ", ".join(words[:8]) + (f", ... ({len(ranks)} in all)" if len(words) > 8 else "")


def stack_line(frames: tuple[Frame, ...]) -> str:
    """A stack in one line, innermost first, without the frames that start every program."""
    real = [f for f in frames if not any(f.file.endswith(p) or f.function == p for p in TOP_LEVEL)] or list(frames)
    return " < ".join(map(str, real[:SHOWN]))


def notes(found: Conditions) -> list[str]:
    """Notes on ranks without a dump (whether that counts against them), and on ranks that moved."""
    kinds = ("silent", "unknown", "unreadable")
    silent, unknown, unreadable = ([r for r, c in found.items() if c.kind == kind] for kind in kinds)
    moved = [r for r, c in found.items() if c.moves]
    nothing = "nothing is concluded from this"
    notes = (
        (silent, f"missing: {_ranks(silent)}: no stack, though most have one: they may have ended"),
        (unknown, f"missing: {len(unknown)} of {len(found)} ranks have no dump ({span(unknown)}); {nothing}"),
        (unreadable, f"missing: the dumps of {_ranks(unreadable)} cannot be read; {nothing}"),
        (moved, f"between the two moments {_ranks(moved)} moved: slow rather than stuck, or stuck only since"),
    )
    asides = grouped((r for r, c in found.items() if c.aside), lambda r: found[r].aside)
    proof = "proves nothing alone"
    return [
        *(text for ranks, text in notes if ranks),
        *(f"{_ranks(ranks)}: {aside}, which {proof}" for aside, ranks in asides.items()),
    ]
