"""Verdict on a hang: groups of equal stacks, suspect ranks and their nodes, and the evidence, as
tables.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trilane.utils.numbers import ranges
from trilane.utils.tables import Columns, DataFrame, Record, Table, Text, as_json, grouped
from trilane.utils.validation import shipped_json
from trilane.workspace.place import Known
from trilane.workspace.rank_grid import Grid
from trilane.workspace.study import Study
from trilane_diagnose.evidence import Evidence, read_folder
from trilane_diagnose.suspects import OPEN, WHICH, Suspects, find_suspects
from trilane_diagnose.waits import Conditions, conditions


@dataclass(frozen=True, kw_only=True)
class Group(Record):
    """Ranks with one stack: what they wait in, over which group of ranks, called where; what they
    do.
    """

    ranks: tuple[int, ...]
    op: str
    axis: str
    site: str
    state: str
    where: str
    frames: tuple[str, ...]

    @property
    def stack(self) -> str:
        """The stack in one line, innermost frame first, without the frames that start every
        program.
        """
        top = ("run_module (", "<module> (", "_bootstrap")
        return " < ".join([f for f in self.frames if not f.startswith(top)][:6] or self.frames[:6])


@dataclass(frozen=True, kw_only=True)
class Verdict(Table):
    """The cause of a hang, from a folder of dumps; as a table the groups of equal stacks, the
    largest first.

    `reasons` are by suspect, strongest evidence first; `exclude` is sbatch's option to leave out
    their `nodes`, "" where it cannot help or names are unknown; `edges` is who waits for whom;
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
    edges: dict[int, set[int]]
    example: bool = False

    @property
    def suspects(self) -> tuple[int, ...]:
        """The suspect ranks."""
        return tuple(self.reasons)

    @property
    def first(self) -> int | None:
        """The first suspect; None where there is none, or several of which any may be wrong."""
        return next((rank for rank, text in [*self.reasons.items()][:1] if WHICH not in text), None)

    def to_frame(self) -> DataFrame:
        """A row per rank: tp, pp, dp, node, step and phase of its last heartbeat (NaN and "" where
        unknown), the number of its group of equal stacks, what that does, over which axis, its
        stack; suspect, and the reason.
        """
        import pandas as pd

        rows = [
            {
                **vars(self.grid[rank]),
                "group": n,
                "state": g.state,
                "over": g.axis,
                "stack": g.stack,
            }
            | {"suspect": rank in self.reasons, "reason": self.reasons.get(rank, "")}
            for n, g in enumerate(self.groups)
            for rank in g.ranks
        ]
        table = (
            pd.DataFrame(rows)
            .drop(columns=["local", "tasks", "gpu", "rank_known", "node_known"])
            .sort_values("rank", ignore_index=True)
        )
        return table.assign(step=table["step"].where(table["step"] >= 0))

    def view(self) -> DataFrame:
        """A row per group: its ranks, how many, their state, the group axis that they wait over,
        and the stack.
        """
        names = ["ranks", "how many", "state", "over", "stack, innermost first"]
        rows = [(ranges(g.ranks), len(g.ranks), g.state, g.axis, g.stack) for g in self.groups]
        return Columns.of_rows(names, rows).view()

    def suspect_table(self) -> Columns:
        """A row per suspect, strongest evidence first: rank, coordinates, node, reason."""
        places = [self.grid[rank] for rank in self.reasons]
        rows = [(p.rank, f"{p.tp}, {p.pp}, {p.dp}", p.node, self.reasons[p.rank]) for p in places]
        return Columns.of_rows(["rank", "tp, pp, dp", "node", "reason"], rows)

    def summary(self) -> Text:
        """The dumps, the verdict in one line, the option for the next submission, and the notes, as
        Markdown.
        """
        example = Text(
            "**Nothing hangs in this study.** Shown is an example, made up from the BLOOM chronicles"
        )
        counts = len(self.grid.ranks), len(self.groups)
        lead = Text.of(
            "{}: {} ranks, {} stacks.", example if self.example else self.folder.name, *counts
        )
        option = [f"For the next submission: sbatch {self.exclude} job.sbatch"] * bool(self.exclude)
        return Text.joined("\n\n- ", [lead, self.paragraph, *option, *self.notes])

    def to_text(self) -> str:
        """The verdict for a terminal: one line, the groups of equal stacks, the notes."""
        lines = [self.paragraph, "stacks, innermost first (! suspects):"]
        for group in self.groups:
            mark = "!" if {*group.ranks} & {*self.reasons} else " "
            lines.append(f"{mark}{len(group.ranks):5d}  ranks {ranges(group.ranks)}: {group.where}")
            lines += [f"          {group.stack}"] if group.frames else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        groups: list[dict[str, Any]] = as_json(self.groups)
        waits = [
            {name: group[name] for name in ("ranks", "op", "axis", "site")} for group in groups
        ]
        for group in waits:
            group["for"] = sorted(
                {target for rank in group["ranks"] for target in self.edges.get(rank, ())}
            )
        named = {"suspects": self.suspects, "nodes": self.nodes, "exclude": self.exclude}
        texts = {"verdict": self.paragraph, "reasons": self.reasons, "notes": self.notes}
        return {
            "groups": groups,
            "waiting_for": [w for w in waits if w["for"]],
            **as_json(named | texts),
        }


def diagnose_hang(folder: Path, grid: Grid | None = None) -> Verdict:
    """The verdict on a folder of stack dumps or a run folder:
    `diagnose_hang(Path("stacks")).suspects`.

    `grid` replaces the topology that the folder names. Raises ValueError where the folder holds no
    dump.
    """
    evidence = read_folder(folder, grid)
    found = conditions(evidence)
    suspects = find_suspects(evidence, found)
    places = [evidence.grid[rank] for rank in suspects.reasons]
    nodes = tuple(dict.fromkeys(place.node for place in places))
    # A rank without a dump may not have been dumped; all nodes cannot be left out. Where the order
    # of nodes is assumed, so is who waits for whom: then a node is named by a stack that it printed
    # and that shows the fault alone.
    own = {rank for rank in evidence.dumps if found[rank].on_host}
    known = all(p.named and (p.node_known >= Known.MAP or p.rank in own) for p in places)
    known &= all(found[place.rank].kind != "silent" for place in places)
    sure = not any(OPEN in text for text in suspects.reasons.values())
    return Verdict(
        folder=folder,
        grid=evidence.grid,
        groups=tuple(_groups(found, suspects)),
        reasons=suspects.reasons,
        nodes=nodes,
        exclude=f"--exclude={','.join(nodes)}"
        if known and sure and 0 < len(nodes) < len(evidence.grid.nodes)
        else "",
        paragraph=_paragraph(evidence, found, suspects),
        notes=(*evidence.notes, *_notes(found)),
        edges=suspects.edges,
    )


def study_hang(study: Study, dumps: str = "") -> Verdict:
    """The verdict on the folder `dumps`, else on the study's last run that hung, else on
    data/examples/hang.json.

    Raises ValueError where `dumps` holds no dump: `study_hang(Study.open("demo"), "stacks")`.
    """
    hung = [folder for folder in study.run_folders() if list((folder / "stacks").glob("*/rank_*"))]
    if dumps or hung:
        return diagnose_hang(Path(dumps) if dumps else hung[-1])
    example = shipped_json("examples/hang")
    stacks = {
        rank: stack["frames"]
        for stack in example["stacks"].values()
        for rank in stack.get("ranks", ())
    }
    sizes = example["topology"]
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(sizes["tp"] * sizes["pp"] * sizes["dp"]):
            frames = stacks.get(rank, example["stacks"]["done"]["frames"])
            lines = [f'Thread {rank} (active): "MainThread"', *(f"    {frame}" for frame in frames)]
            Path(folder, f"rank_{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        Path(folder, "topology.json").write_text(json.dumps(sizes) + "\n", encoding="utf-8")
        return replace(diagnose_hang(Path(folder)), example=True)


def _groups(found: Conditions, suspects: Suspects) -> list[Group]:
    groups = []
    for (state, key, _), ranks in _alike(found, [*found]).items():
        c, axis = found[ranks[0]], suspects.axes.get(ranks[0], "")
        place = {"op": c.wait.op if c.wait else "", "axis": axis, "state": state, "where": c.text}
        site = str(c.wait.site if c.wait else c.frames[0] if key else "")
        groups.append(
            Group(ranks=tuple(ranks), **place, site=site, frames=tuple(map(str, c.frames)))
        )
    return sorted(groups, key=lambda g: (-len(g.ranks), g.ranks))


def _alike(found: Conditions, ranks: list[int]) -> dict[Any, list[int]]:
    """Ranks by their kind and stack, or by what they do where there is none."""
    return grouped(
        sorted(ranks),
        lambda r: (found[r].kind, found[r].key, "" if found[r].frames else found[r].text),
    )


def _paragraph(evidence: Evidence, found: Conditions, suspects: Suspects) -> str:
    """The verdict in one line: the suspects and the reasons, or why there are none, and where most
    others wait.
    """
    reasons = [*grouped(suspects.reasons, suspects.reasons.__getitem__).items()][:4]
    lines = [f"{_places(evidence.grid, ranks)}: {text}" for text, ranks in reasons]
    lines = lines or [
        f"which rank is at fault {OPEN} from these dumps; Flight Recorder dumps show more"
    ]
    waiting = _alike(
        found, [r for r, c in found.items() if c.wait and r not in suspects.reasons]
    ).values()
    most = max(waiting, key=len, default=[])
    return "; ".join(
        [*lines, *(f"{len(most)} of {len(found)} ranks wait {found[r].wait}" for r in most[:1])]
    )


def _notes(found: Conditions) -> list[str]:
    """Notes on ranks without a dump (whether that counts against them), and on ranks that moved."""
    kinds = grouped(found, lambda r: "moved" if found[r].moves else found[r].kind)
    texts = {
        "silent": "missing: ranks {} have no stack, though most do: they may have ended",
        "unknown": "missing: ranks {} have no dump; one of them may be late, nothing is concluded from this",
        "unreadable": "missing: the dumps of ranks {} cannot be read; one of them may be late",
        "moved": "ranks {} moved between the two moments: slow rather than stuck; take a third dump",
    }
    return [text.format(ranges(kinds[kind])) for kind, text in texts.items() if kind in kinds]


def _places(grid: Grid, ranks: list[int]) -> str:
    """Ranks with their nodes, a single one with its coordinates."""
    nodes = list(dict.fromkeys(grid.node_name(grid[r].node) for r in sorted(ranks)))
    p = grid[ranks[0]]
    one = [f"tp {p.tp}, pp {p.pp}, dp {p.dp}"] if grid.known and len(ranks) == 1 else []
    more = ", ..." * (len(nodes) > 4)
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} ({', '.join([*one, *nodes[:4]])}{more})"
