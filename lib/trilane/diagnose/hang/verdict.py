"""Verdict: the groups of equal stacks, who waits for whom, the suspects and their nodes, and all of it in words."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.diagnose.hang.condition import UNHEARD, Condition, conditions, keys
from trilane.diagnose.hang.evidence import Evidence, read_folder
from trilane.diagnose.hang.stack import Frame
from trilane.diagnose.hang.suspects import Blame, blame
from trilane.workspace.rank_grid import Grid

WAYS = {"device": "for the card", "wait": "for an operation begun earlier"}  # waits that the stack does not name


SHOWN = 6  # frames of a stack that a person is shown


PLUMBING = ("runpy.py", "run_module", "threading.py", "<module>")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks with the same stack. `axis` is the group over which they wait, `op` in what; "" where they do not."""

    ranks: tuple[int, ...]
    kind: str
    text: str
    op: str
    axis: str
    site: str
    frames: tuple[Frame, ...]
    waits_for: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a folder of dumps amounts to. `nodes` hold the suspects; `exclude` is sbatch's option, "" where it cannot
    help, or nobody told the nodes' names; `reasons` has one line a suspect; `notes` say what is odd about the evidence.
    """

    grid: Grid
    groups: tuple[Group, ...]
    suspects: tuple[int, ...]
    reasons: dict[int, str]
    nodes: tuple[str, ...]
    exclude: str
    paragraph: str
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs: groups, waiting_for, suspects, nodes, exclude, verdict, reasons, notes."""
        groups = [
            {
                "ranks": list(g.ranks),
                "state": g.kind,
                "where": g.text,
                "op": g.op,
                "axis": g.axis,
                "site": g.site,
                "frames": [str(f) for f in g.frames],
            }
            for g in self.groups
        ]
        waiting = [
            {"ranks": list(g.ranks), "op": g.op, "axis": g.axis, "site": g.site, "for": list(g.waits_for)}
            for g in self.groups
            if g.waits_for
        ]
        return {
            "groups": groups,
            "waiting_for": waiting,
            "suspects": list(self.suspects),
            "nodes": list(self.nodes),
            "exclude": self.exclude,
            "verdict": self.paragraph,
            "reasons": {str(rank): text for rank, text in self.reasons.items()},
            "notes": list(self.notes),
        }


def diagnose(folder: Path, grid: Grid | None = None) -> Verdict:
    """The verdict on a folder of dumps or a run folder; ValueError where it holds none."""
    return judge(read_folder(folder, grid))


def judge(evidence: Evidence) -> Verdict:
    """The verdict on what was found."""
    found = conditions(evidence)
    blamed = blame(evidence, found)
    groups = _groups(found, blamed)
    nodes = tuple(dict.fromkeys(evidence.grid[rank].node for rank in blamed.suspects))
    told = all(evidence.grid[rank].told for rank in blamed.suspects)
    exclude = f"--exclude={','.join(nodes)}" if told and 0 < len(nodes) < len(evidence.grid.nodes) else ""
    notes = (*evidence.notes, *_missing(found), *_moving(found))
    return Verdict(
        grid=evidence.grid,
        groups=groups,
        suspects=blamed.suspects,
        reasons=blamed.reasons,
        nodes=nodes,
        exclude=exclude,
        paragraph=" ".join(_sentences(evidence, found, groups, blamed, exclude)),
        notes=notes,
    )


def _groups(found: dict[int, Condition], blamed: Blame) -> tuple[Group, ...]:
    same: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, c in sorted(found.items()):
        same[c.kind, keys(c.frames), "" if c.frames else c.text].append(rank)
    groups = []
    for ranks in same.values():
        c = found[ranks[0]]
        targets = sorted({t for r in ranks for t in blamed.edges.get(r, ())})
        group = Group(
            ranks=tuple(ranks),
            kind=c.kind,
            text=c.text,
            op=c.wait.op if c.wait else "",
            axis=blamed.axes.get(ranks[0], "") if c.wait else "",
            site=str(c.wait.site) if c.wait else str(c.frames[0]) if c.frames else "",
            frames=c.frames,
            waits_for=tuple(targets),
        )
        groups.append(group)
    return tuple(sorted(groups, key=lambda g: (-len(g.ranks), g.ranks)))


def _sentences(
    evidence: Evidence, found: dict[int, Condition], groups: tuple[Group, ...], blamed: Blame, exclude: str
) -> list[str]:
    """The paragraph: who waits where, who never came and where it stands, what to do."""
    grid, said = evidence.grid, []
    for (op, site, axis), ranks in _waiting(found, blamed)[:3]:
        over = {"": "", "world": " over all ranks"}.get(axis, f" over {axis}")
        said.append(f"{_many(ranks, len(grid.ranks))} wait {WAYS.get(op, f'in {op}')}{over}, asked for by {site}.")
    if not blamed.suspects:
        if blamed.complete:
            said.append(
                "Everybody came: no member of any group is elsewhere, so that the operation itself does not "
                "end; suspect the network or NCCL, and compare a second dump."
            )
        elif unheard := [r for r in set().union(*blamed.edges.values()) if found[r].kind in UNHEARD]:
            said.append(f"Whoever they wait for is among ranks {span(unheard)}, of which there is no dump to read.")
        else:
            said.append("Nobody waits for anybody that the dumps show: this is no hang that they could explain.")
        return said
    for text, ranks in _same_reason(blamed)[:4]:
        c = found[ranks[0]]
        stands = f"; it stands in {shown(c.frames)}" if c.frames and len(ranks) == 1 else ""
        stands = f"; they stand in {shown(c.frames)}" if c.frames and len(ranks) > 1 else stands
        said.append(f"{_who(grid, ranks)}: {text}{stands}.")
    steps = {grid[r].step for r in blamed.suspects if grid[r].step >= 0}
    if len(steps) == 1:
        phases = sorted({grid[r].phase for r in blamed.suspects} - {""})
        said.append(f"Last heartbeat in iteration {steps.pop()}{', phase ' + ' or '.join(phases) if phases else ''}.")
    if exclude:
        said.append(f"To go on without: {exclude} (if it comes back on other nodes, it is the code).")
    return said


def _waiting(found: dict[int, Condition], blamed: Blame) -> list[tuple[tuple[str, str, str], list[int]]]:
    """The waiting ranks that are no suspects, by what they wait in; the largest first."""
    same: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, c in sorted(found.items()):
        if c.wait is not None and rank not in blamed.suspects:
            same[c.wait.op, str(c.wait.site), blamed.axes.get(rank, "")].append(rank)
    return sorted(same.items(), key=lambda item: -len(item[1]))


def _same_reason(blamed: Blame) -> list[tuple[str, list[int]]]:
    same: defaultdict[str, list[int]] = defaultdict(list)
    for rank in blamed.suspects:
        same[blamed.reasons[rank]].append(rank)
    return list(same.items())


def _who(grid: Grid, ranks: list[int]) -> str:
    """Ranks with their coordinates: the node where they are all of its ranks."""
    on = list(dict.fromkeys(grid[r].node for r in sorted(ranks)))
    nodes = [grid.where(node) for node in on]
    if len(ranks) == 1:
        p = grid[ranks[0]]
        return f"Rank {p.rank} ({f'tp {p.tp}, pp {p.pp}, dp {p.dp}, ' if grid.known else ''}{nodes[0]})"
    if all(len(grid.nodes[n]) == sum(1 for r in ranks if grid[r].node == n) for n in on):
        return f"All of {', '.join(nodes)} (ranks {span(ranks)})"
    common = [
        f"{axis} {next(iter(values))}"
        for axis in ("tp", "pp", "dp")
        if grid.known and len(values := {getattr(grid[r], axis) for r in ranks}) == 1
    ]
    where = ", ".join([*common, *nodes[:4]])
    return f"Ranks {span(ranks)} ({where}{', ...' if len(nodes) > 4 else ''})"


def span(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks in short: 0-3, 7, 9-11."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    words = [f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts]
    return ", ".join(words[:8]) + (f", ... ({len(ranks)} in all)" if len(words) > 8 else "")


def shown(frames: tuple[Frame, ...]) -> str:
    """A stack in one line, innermost first, without what stands below every program."""
    real = [f for f in frames if not any(f.file.endswith(p) or f.function == p for p in PLUMBING)] or list(frames)
    return " < ".join(map(str, real[:SHOWN]))


def _many(ranks: list[int], of: int) -> str:
    return f"{len(ranks)} of {of} ranks ({span(ranks)})"


def _missing(found: dict[int, Condition]) -> list[str]:
    """What is said about ranks without a dump: that their silence counts, or that nobody asked them."""
    kinds = Counter(c.kind for c in found.values())
    notes = []
    if kinds["silent"]:
        silent = [r for r, c in found.items() if c.kind == "silent"]
        notes.append(f"missing: ranks {span(silent)} gave no stack though most did; that counts against them")
    if kinds["unknown"]:
        notes.append(f"missing: {kinds['unknown']} of {len(found)} ranks have no dump; nothing is concluded from that")
    if kinds["unreadable"]:
        bad = [r for r, c in found.items() if c.kind == "unreadable"]
        notes.append(f"missing: the dumps of ranks {span(bad)} cannot be read; nothing is concluded from that")
    return notes


def _moving(found: dict[int, Condition]) -> list[str]:
    moving = [r for r, c in found.items() if c.moves]
    if not moving:
        return []
    return [f"between the two moments ranks {span(moving)} moved: slow rather than stuck"]
