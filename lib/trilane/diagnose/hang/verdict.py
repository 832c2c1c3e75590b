"""Verdict on a hang: groups of equal stacks, suspect ranks and their nodes, and a summary in words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.diagnose.hang.condition import Conditions, conditions, stack_key
from trilane.diagnose.hang.evidence import read_folder
from trilane.diagnose.hang.stack import Frame
from trilane.diagnose.hang.suspects import WHICH, Suspects, find_suspects
from trilane.diagnose.hang.words import notes, sentences, span, stack_line
from trilane.utils.tables import Columns, DataFrame, Table, Text, grouped
from trilane.workspace.rank_grid import Grid


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

    @property
    def first(self) -> int | None:
        """The first suspect; None where there is none, or several of which any may be wrong."""
        rank = next(iter(self.suspects), None)
        return None if rank is None or WHICH in self.reasons[rank] else rank

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
    ended = all(found[rank].kind != "silent" for rank in suspects.ranks)  # else it may not have been dumped
    helps = named and ended and suspects.is_certain and 0 < len(nodes) < len(evidence.grid.nodes)
    exclude = f"--exclude={','.join(nodes)}" if helps else ""
    return Verdict(
        folder=folder,
        grid=evidence.grid,
        groups=_groups(found, suspects),
        suspects=suspects.ranks,
        reasons=suspects.reasons,
        nodes=nodes,
        exclude=exclude,
        paragraph=" ".join(sentences(evidence, found, suspects, exclude)),
        notes=(*evidence.notes, *notes(found)),
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
