"""Verdict on a hang: groups of equal stacks, suspect ranks and their nodes, and a summary in words."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from trilane.diagnose.hang.condition import NO_EVIDENCE, Conditions, conditions, stack_key
from trilane.diagnose.hang.evidence import Evidence, read_folder
from trilane.diagnose.hang.stack import Frame
from trilane.diagnose.hang.suspects import Suspects, find_suspects
from trilane.utils.tables import Columns, DataFrame, Table, Text, grouped
from trilane.workspace.rank_grid import Grid, shared

# Waits whose collective is not in the stack.
WAITS = {"device": "for the GPU", "wait": "for an operation begun earlier"}
SHOWN = 6  # frames of a stack in text
TOP_LEVEL = ("runpy.py", "<frozen runpy>", "run_module", "threading.py", "<module>")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks with the same stack. `op` is what they wait in, `axis` over which group; "" where they do not wait."""

    ranks: tuple[int, ...]
    kind: str
    text: str
    op: str
    axis: str
    site: str
    frames: tuple[Frame, ...]
    waits_for: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict(Table):
    """The cause of a hang, from a folder of dumps; as a table the groups of equal stacks, the largest first.

    `nodes` are the suspects' nodes; `exclude` is sbatch's option to leave them out, "" where it cannot help or the
    nodes' names are unknown; `reasons` has one line per suspect; `notes` report what is odd about the evidence;
    `example`: the dumps are made up.
    """

    folder: Path
    grid: Grid
    groups: tuple[Group, ...]
    suspects: tuple[int, ...]
    reasons: dict[int, str]
    nodes: tuple[str, ...]
    exclude: str
    paragraph: str
    notes: tuple[str, ...]
    example: bool = False

    def to_frame(self) -> DataFrame:
        """A row per group: its ranks, how many, their state, the group axis that they wait over, and the stack."""
        import pandas as pd

        names = ["ranks", "how many", "state", "over", "stack, innermost first"]
        rows = [(span(g.ranks), len(g.ranks), g.kind, g.axis, stack_line(g.frames[:4])) for g in self.groups]
        return pd.DataFrame(rows, columns=names)

    def suspect_table(self) -> Columns:
        """A row per suspect, strongest evidence first: rank, coordinates, node, reason."""
        places = [self.grid[rank] for rank in self.suspects]
        return Columns(
            {
                "rank": [p.rank for p in places],
                "tp, pp, dp": [f"{p.tp}, {p.pp}, {p.dp}" for p in places],
                "node": [p.node for p in places],
                "reason": [self.reasons[p.rank] for p in places],
            }
        )

    def source(self) -> Text:
        """The folder of the dumps, the number of ranks and of different stacks, as Markdown."""
        example = Text("**Nothing hangs in this study.** Shown is an example, made up from the text of document 003")
        lead = example if self.example else self.folder.name
        return Text.of("{}: {} ranks, {} different stacks.", lead, len(self.grid.ranks), len(self.groups))

    def summary(self) -> Text:
        """The paragraph as Markdown: which ranks wait where, the suspects, what to do."""
        return Text.of("{}{}", self._example, self.paragraph)

    def advice(self) -> Text:
        """The option for the next submission, and the notes on the evidence, as Markdown."""
        lead = f"For the next submission: sbatch {self.exclude} job.sbatch" if self.exclude else ""
        return Text.of(
            "{}{}\n{}", self._example, lead, Text.joined("\n- ", ["", *(self.notes or ["nothing odd about the dumps"])])
        )

    @property
    def _example(self) -> Text:
        return Text("**Example.** " if self.example else "")

    def to_text(self) -> str:
        """The verdict for a terminal: the paragraph, the groups, the notes."""
        lines = [self.paragraph, "", "stacks (innermost first):"]
        for group in self.groups:
            mark = "! " if set(group.ranks) & set(self.suspects) else "  "
            lines.append(f"{mark}{len(group.ranks):4d}  ranks {span(group.ranks)}: {group.text}")
            lines += [f"          {stack_line(group.frames)}"] if group.frames else []
        return "\n".join([*lines, "", *(f"note: {note}" for note in self.notes)]).rstrip()

    def to_json(self) -> dict[str, Any]:
        places = [{"ranks": list(g.ranks), "op": g.op, "axis": g.axis, "site": g.site} for g in self.groups]
        states = [{"state": g.kind, "where": g.text, "frames": list(map(str, g.frames))} for g in self.groups]
        return {
            "groups": [{**place, **state} for place, state in zip(places, states, strict=True)],
            "waiting_for": [
                {**place, "for": list(g.waits_for)} for place, g in zip(places, self.groups, strict=True) if g.waits_for
            ],
            "suspects": list(self.suspects),
            "nodes": list(self.nodes),
            "exclude": self.exclude,
            "verdict": self.paragraph,
            "reasons": {str(rank): text for rank, text in self.reasons.items()},
            "notes": list(self.notes),
        }

    def record(self) -> dict[str, Any]:
        """The same with the folder of the dumps, for a study's result file."""
        return {"folder": str(self.folder), "example": self.example, **self.to_json()}


def diagnose_hang(folder: Path, grid: Grid | None = None) -> Verdict:
    """The verdict on a folder of stack dumps or a run folder.

    `grid` replaces the topology that the folder names. Raises ValueError where the folder holds no dump.
    """
    evidence = read_folder(folder, grid)
    found = conditions(evidence)
    suspects = find_suspects(evidence, found)
    nodes = tuple(dict.fromkeys(evidence.grid[rank].node for rank in suspects.ranks))
    named = all(evidence.grid[rank].named for rank in suspects.ranks)
    exclude = f"--exclude={','.join(nodes)}" if named and 0 < len(nodes) < len(evidence.grid.nodes) else ""
    return Verdict(
        folder=folder,
        grid=evidence.grid,
        groups=_groups(found, suspects),
        suspects=suspects.ranks,
        reasons=suspects.reasons,
        nodes=nodes,
        exclude=exclude,
        paragraph=" ".join(_sentences(evidence, found, suspects, exclude)),
        notes=(*evidence.notes, *_notes(found)),
    )


def _groups(found: Conditions, suspects: Suspects) -> tuple[Group, ...]:
    looks = {r: (c.kind, stack_key(c.frames), "" if c.frames else c.text) for r, c in sorted(found.items())}
    groups = []
    for ranks in grouped(looks, looks.__getitem__).values():
        c = found[ranks[0]]
        op, axis = (c.wait.op, suspects.axes.get(ranks[0], "")) if c.wait else ("", "")
        site = str(c.wait.site if c.wait else c.frames[0] if c.frames else "")
        targets = tuple(sorted({t for r in ranks for t in suspects.edges.get(r, ())}))
        what = {"kind": c.kind, "text": c.text, "op": op, "axis": axis, "site": site}
        groups.append(Group(ranks=tuple(ranks), **what, frames=c.frames, waits_for=targets))
    return tuple(sorted(groups, key=lambda g: (-len(g.ranks), g.ranks)))


def _sentences(evidence: Evidence, found: Conditions, suspects: Suspects, exclude: str) -> list[str]:
    """The paragraph: which ranks wait where, which never came and where they are, what to do."""
    grid, text = evidence.grid, []
    for (op, site, axis), ranks in _waiting(found, suspects)[:3]:
        over = {"": "", "world": " over all ranks"}.get(axis, f" over {axis}")
        many = f"{len(ranks)} of {len(grid.ranks)} ranks ({span(ranks)})"
        text.append(f"{many} wait {WAITS.get(op, f'in {op}')}{over}, called by {site}.")
    if not suspects.ranks:
        return [*text, _without_suspects(evidence, found, suspects)]
    for reason, ranks in list(grouped(suspects.ranks, suspects.reasons.__getitem__).items())[:4]:
        c = found[ranks[0]]
        where = f"; {'it is' if len(ranks) == 1 else 'they are'} in {stack_line(c.frames)}" if c.frames else ""
        text.append(f"{_name(grid, ranks)}: {reason}{where}.")
    steps = {grid[r].step for r in suspects.ranks if grid[r].step >= 0}
    if len(steps) == 1:
        phases = sorted({grid[r].phase for r in suspects.ranks} - {""})
        text.append(f"Last heartbeat in iteration {steps.pop()}{', phase ' + ' or '.join(phases) if phases else ''}.")
    if exclude:
        text.append(f"To continue without: {exclude} (a hang that recurs on other nodes is in the code).")
    return text


def _without_suspects(evidence: Evidence, found: Conditions, suspects: Suspects) -> str:
    """What is known where all ranks wait at the same line: that they are in one and the same operation only by their
    Flight Recorders, since one line reduces all buckets, and is passed in each layer and microbatch."""
    waits = {r: c.wait.op for r, c in found.items() if c.wait is not None}
    if suspects.complete and not set(waits.values()) - set(WAITS):
        return (
            "All ranks wait at the same line for work that they queued on their GPUs before, which stacks do not show: "
            "which rank is late, or whether the network is at fault, cannot be determined from these dumps. Take "
            "Flight Recorder dumps."
        )
    if suspects.complete and waits.keys() <= {r for r, rec in evidence.recordings.items() if rec.waiting is not None}:
        return (
            "All members of every group are in the same collective, so that the operation itself does not end; "
            "suspect the network or NCCL, and compare a second dump."
        )
    if suspects.complete:
        return (
            "All members of every group are in the same collective by their stacks: suspect the network or NCCL, "
            "unless one of them is in another bucket, layer or microbatch at this line, which cannot be determined "
            "from stacks (Flight Recorder dumps show it). Compare a second dump."
        )
    if missing := [r for r in set().union(*suspects.edges.values()) if found[r].kind in NO_EVIDENCE]:
        return f"The rank that they wait for is among ranks {span(missing)}, of which there is no readable dump."
    return "No rank waits for another in these dumps: they show no hang."


def _waiting(found: Conditions, suspects: Suspects) -> list[tuple[tuple[str, str, str], list[int]]]:
    """The waiting ranks that are no suspects, by what they wait in; the largest first."""
    waits = {r: c.wait for r, c in sorted(found.items()) if c.wait is not None and r not in suspects.ranks}
    same = grouped(waits, lambda r: (waits[r].op, str(waits[r].site), suspects.axes.get(r, "")))
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


def _notes(found: Conditions) -> list[str]:
    """Notes on ranks without a dump (whether that counts against them), and on ranks that moved."""
    kinds = ("silent", "unknown", "unreadable")
    silent, unknown, unreadable = ([r for r, c in found.items() if c.kind == kind] for kind in kinds)
    moved = [r for r, c in found.items() if c.moves]
    notes = (
        (silent, f"missing: ranks {span(silent)} have no stack though most do; this counts against them"),
        (unknown, f"missing: {len(unknown)} of {len(found)} ranks have no dump; nothing is concluded from this"),
        (unreadable, f"missing: the dumps of ranks {span(unreadable)} cannot be read; nothing is concluded from this"),
        (moved, f"between the two moments ranks {span(moved)} moved: slow rather than stuck"),
    )
    return [text for ranks, text in notes if ranks]
