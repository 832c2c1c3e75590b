"""Verdict on a hang: groups of equal stacks, suspect ranks and their nodes, and the evidence, as tables."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from trilane.diagnose.evidence import Evidence, read_folder
from trilane.diagnose.stacks import Frames
from trilane.diagnose.suspects import OPEN, WHICH, Suspects, find_suspects
from trilane.diagnose.waits import NO_EVIDENCE, Condition, Conditions, conditions
from trilane.utils.tables import Columns, DataFrame, Table, Text, frame_of, grouped
from trilane.workspace.rank_grid import Grid


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks with the same stack, what they do, over which group of ranks they wait, and for which ranks."""

    ranks: tuple[int, ...]
    condition: Condition
    axis: str
    waits_for: tuple[int, ...]

    @property
    def site(self) -> str:
        """The line that calls what they wait in, or where they are; else what they do."""
        c = self.condition
        return str(c.wait.site if c.wait else c.frames[0] if c.frames else c.text)

    def to_json(self) -> dict[str, Any]:
        c = self.condition
        place = {"ranks": [*self.ranks], "op": c.wait.op if c.wait else "", "axis": self.axis}
        site = self.site if c.frames else ""
        return {**place, "site": site, "state": c.kind, "where": c.text, "frames": [*map(str, c.frames)]}


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
    reasons: dict[int, str]
    nodes: tuple[str, ...]
    exclude: str
    paragraph: str
    notes: tuple[str, ...]
    example: bool = False

    @property
    def suspects(self) -> tuple[int, ...]:
        """The suspect ranks, strongest evidence first."""
        return tuple(self.reasons)

    @property
    def first(self) -> int | None:
        """The first suspect; None where there is none, or several of which any may be wrong."""
        return next((rank for rank, text in [*self.reasons.items()][:1] if WHICH not in text), None)

    def to_frame(self) -> DataFrame:
        """A row per group: its ranks, how many, their state, the group axis that they wait over, and the stack."""
        counts: dict[str, Callable[[Group], Any]] = {
            "ranks": lambda g: span(g.ranks),
            "how many": lambda g: len(g.ranks),
        }
        stack: dict[str, Callable[[Group], Any]] = {
            "stack, innermost first": lambda g: stack_line(g.condition.frames, 4)
        }
        return frame_of(self.groups, {**counts, "state": "condition.kind", "over": "axis", **stack})

    def suspect_table(self) -> Columns:
        """A row per suspect, strongest evidence first: rank, coordinates, node, reason."""
        places = [self.grid[rank] for rank in self.reasons]
        rows = [(p.rank, f"{p.tp}, {p.pp}, {p.dp}", p.node, self.reasons[p.rank]) for p in places]
        return Columns.of_rows(["rank", "tp, pp, dp", "node", "reason"], rows)

    def summary(self) -> Text:
        """The dumps, the verdict in one line, the option for the next submission, and the notes, as Markdown."""
        example = Text("**Nothing hangs in this study.** Shown is an example, made up from the BLOOM chronicles")
        counts = len(self.grid.ranks), len(self.groups)
        lead = Text.of("{}: {} ranks, {} stacks.", example if self.example else self.folder.name, *counts)
        option = [f"For the next submission: sbatch {self.exclude} job.sbatch"] if self.exclude else []
        return Text.joined("\n\n- ", [lead, self.paragraph, *option, *self.notes])

    def to_text(self) -> str:
        """The verdict for a terminal: one line, the groups of equal stacks, the notes."""
        lines = [self.paragraph, "stacks, innermost first (! suspects):"]
        for group in self.groups:
            mark = "!" if {*group.ranks} & {*self.reasons} else " "
            lines.append(f"{mark}{len(group.ranks):5d}  ranks {span(group.ranks)}: {group.condition.text}")
            lines += [f"          {stack_line(group.condition.frames)}"] if group.condition.frames else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        groups = [group.to_json() for group in self.groups]
        waits = [
            {**{key: group[key] for key in ("ranks", "op", "axis", "site")}, "for": [*g.waits_for]}
            for group, g in zip(groups, self.groups, strict=True)
            if g.waits_for
        ]
        named = {"suspects": [*self.reasons], "nodes": [*self.nodes], "exclude": self.exclude}
        reasons = {str(rank): text for rank, text in self.reasons.items()}
        texts = {"verdict": self.paragraph, "reasons": reasons, "notes": [*self.notes]}
        return {"groups": groups, "waiting_for": waits, **named, **texts}


def diagnose_hang(folder: Path, grid: Grid | None = None) -> Verdict:
    """The verdict on a folder of stack dumps or a run folder: `diagnose_hang(Path("stacks")).suspects`.

    `grid` replaces the topology that the folder names. Raises ValueError where the folder holds no dump.
    """
    evidence = read_folder(folder, grid)
    found = conditions(evidence)
    suspects = find_suspects(evidence, found)
    places = [evidence.grid[rank] for rank in suspects.reasons]
    nodes = tuple(dict.fromkeys(place.node for place in places))
    # A rank without a dump may not have been dumped; all nodes cannot be left out.
    known = all(place.named and found[place.rank].kind != "silent" for place in places)
    sure = not any(OPEN in text for text in suspects.reasons.values())
    groups = _groups(found, suspects)
    return Verdict(
        folder=folder,
        grid=evidence.grid,
        groups=groups,
        reasons=suspects.reasons,
        nodes=nodes,
        exclude=f"--exclude={','.join(nodes)}" if known and sure and 0 < len(nodes) < len(evidence.grid.nodes) else "",
        paragraph=_paragraph(evidence, found, suspects, groups),
        notes=(*evidence.notes, *_notes(found)),
    )


def _groups(found: Conditions, suspects: Suspects) -> tuple[Group, ...]:
    looks = {r: (c.kind, c.key, "" if c.frames else c.text) for r, c in sorted(found.items())}
    groups = []
    for ranks in grouped(looks, looks.__getitem__).values():
        targets = tuple(sorted({t for r in ranks for t in suspects.edges.get(r, ())}))
        axis = suspects.axes.get(ranks[0], "")
        groups.append(Group(ranks=tuple(ranks), condition=found[ranks[0]], axis=axis, waits_for=targets))
    return tuple(sorted(groups, key=lambda g: (-len(g.ranks), g.ranks)))


def _paragraph(evidence: Evidence, found: Conditions, suspects: Suspects, groups: tuple[Group, ...]) -> str:
    """The verdict in one line: the suspects and the reasons, or why there are none, and where most others wait."""
    reasons = [*grouped(suspects.reasons, suspects.reasons.__getitem__).items()][:4]
    lines = [f"{_places(evidence.grid, ranks)}: {text}" for text, ranks in reasons]
    lines = lines or [f"which rank is at fault {OPEN}: {_why_none(evidence, found, suspects)}"]
    waits = [g for g in groups if g.condition.wait and not {*g.ranks} & {*suspects.reasons}][:1]
    return "; ".join([*lines, *(f"{len(g.ranks)} of {len(found)} ranks wait, {g.condition.wait}" for g in waits)])


def _why_none(evidence: Evidence, found: Conditions, suspects: Suspects) -> str:
    """Why no rank is named.

    That all are in one and the same operation only Flight Recorders show, since one line reduces all buckets, and is
    passed in each layer and microbatch.
    """
    missing = [r for r, c in found.items() if c.kind in NO_EVIDENCE]
    blind = [r for r, c in found.items() if c.wait and c.wait.is_blind]
    moved = [r for r, c in found.items() if c.moves]
    calls = {r: call for r, recording in evidence.recordings.items() if (call := recording.waiting)}
    queued = [r for r, call in calls.items() if call.state != "started"]
    recorded = {r for r, c in found.items() if c.wait} <= calls.keys()
    alike = "all members of every group are in the same collective"
    rules = (
        (suspects.moves, "every rank moved between the two moments; take a third dump"),
        (not suspects.edges, "no rank is seen in a wait for others"),
        (missing, f"there is no readable dump of ranks {span(missing)}, among which the late one may be"),
        (blind, f"ranks {span(blind)} wait for work queued on their GPUs; take Flight Recorder dumps"),
        (suspects.complete and moved, f"ranks {span(moved)} moved between the two moments; take a third dump"),
        (not evidence.is_whole, "how many ranks the job has is not known (give --tp, --pp, --dp)"),
        (suspects.complete and queued, f"the GPUs of ranks {span(queued)} are not recorded to have reached their call"),
        (suspects.complete and recorded, f"{alike}; suspect the network or NCCL"),
        (suspects.complete, f"{alike} by their stacks; suspect the network, or another bucket or layer at this line"),
    )
    return next((text for holds, text in rules if holds), "those that others wait for are with all of their group")


def _notes(found: Conditions) -> list[str]:
    """Notes on ranks without a dump (whether that counts against them), and on ranks that moved."""
    kinds = grouped(found, lambda r: found[r].kind)
    texts = {
        "silent": "missing: ranks {}: no stack, though most have one: they may have ended",
        "unknown": "missing: ranks {} have no dump; nothing is concluded from this",
        "unreadable": "missing: the dumps of ranks {} cannot be read; nothing is concluded from this",
    }
    moved = [r for r, c in found.items() if c.moves]
    notes = [text.format(span(kinds[kind])) for kind, text in texts.items() if kind in kinds]
    return notes + ([f"ranks {span(moved)} moved between the two moments: slow rather than stuck"] if moved else [])


def _places(grid: Grid, ranks: list[int]) -> str:
    """Ranks with their nodes, a single one with its coordinates."""
    nodes = list(dict.fromkeys(grid.node_name(grid[r].node) for r in sorted(ranks)))
    p = grid[ranks[0]]
    one = [f"tp {p.tp}, pp {p.pp}, dp {p.dp}"] if grid.known and len(ranks) == 1 else []
    more = ", ..." * (len(nodes) > 4)
    return f"rank{'s' * (len(ranks) > 1)} {span(ranks)} ({', '.join([*one, *nodes[:4]])}{more})"


def stack_line(frames: Frames, most: int = 6) -> str:
    """A stack in one line, innermost frame first, without the frames that start every program."""
    top = ("runpy.py", "<frozen runpy>", "threading.py")
    real = [f for f in frames if f.function not in ("run_module", "<module>") and not f.file.endswith(top)]
    return " < ".join(map(str, (real or frames)[:most]))


def span(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks as ranges, such as 0-3, 7, 9-11."""
    words = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda item: item[1] - item[0]):
        block = [rank for _, rank in run]
        words.append(f"{block[0]}-{block[-1]}" if len(block) > 1 else str(block[0]))
    return ", ".join(words[:8]) + (f", ... ({len(ranks)} in all)" if len(words) > 8 else "")
