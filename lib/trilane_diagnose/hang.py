"""Verdict on a hang: groups of equal stacks, suspect ranks and their nodes, and the evidence, as
tables.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trilane.logs.places import excluded
from trilane.utils.frozen import frozen
from trilane.utils.numbers import ranges
from trilane.utils.tables import DataFrame, Json, Record, Table, as_json, grouped
from trilane.utils.validation import shipped_json
from trilane.workspace.rank_grid import Grid, Known, asked, from_json
from trilane.workspace.study import Study
from trilane_diagnose.evidence import Evidence, read_folder
from trilane_diagnose.stacks import Dump, read_pyspy
from trilane_diagnose.suspects import OPEN, WHICH, Suspects, find_suspects
from trilane_diagnose.waits import Conditions, conditions

SHOWN_FRAMES = 6
SHOWN_REASONS = 4
EXAMPLE = "Nothing hangs in this study. Shown is an example, made up from the BLOOM chronicles."


@frozen
class Group(Record):
    """Ranks with one stack: what they do, over which group of ranks, called where."""

    ranks: tuple[int, ...]
    axis: str
    site: str
    state: str
    where: str
    frames: tuple[str, ...]

    @property
    def stack(self) -> str:
        """The innermost frames in one line."""
        return " < ".join(self.frames[:SHOWN_FRAMES])


@frozen
class Verdict(Table):
    """The cause of a hang, from a folder of dumps, with its groups of equal stacks, the largest
    first.

    `reasons` are by suspect, strongest evidence first; `exclude` is sbatch's option to leave out
    their `nodes`, "" where it cannot help or names are unknown; `example`: the dumps are made up.
    """

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
        """The suspect ranks."""
        return tuple(self.reasons)

    @property
    def first(self) -> int | None:
        """The first suspect; None where there is none, or several of which any may be wrong."""
        for rank, reason in self.reasons.items():
            return None if WHICH in reason else rank
        return None

    def to_frame(self) -> DataFrame:
        """A row per rank: tp, pp, dp, node, step and phase of its last heartbeat (NaN and "" where
        unknown), the number of its group of equal stacks, what that does, over which axis, its
        stack; suspect, and the reason.
        """
        import pandas as pd

        names = ("rank", "tp", "pp", "dp", "node", "step", "phase")
        rows = []
        for number, group in enumerate(self.groups):
            does = {"group": number, "state": group.state, "over": group.axis, "stack": group.stack}
            for rank in group.ranks:
                row = {name: getattr(self.grid[rank], name) for name in names}
                suspect = {"suspect": rank in self.reasons, "reason": self.reasons.get(rank, "")}
                rows.append(row | does | suspect)
        table = pd.DataFrame(rows).sort_values("rank", ignore_index=True)
        return table.assign(step=table["step"].where(table["step"] >= 0))

    def summary(self) -> str:
        """The verdict, the option for the next submission, the groups of stacks, the notes."""
        lines = [EXAMPLE] if self.example else []
        lines.append(self.paragraph)
        if self.exclude:
            lines.append(f"for the next submission: sbatch {self.exclude} job.sbatch")
        lines.append("stacks, innermost first (! suspects):")
        for group in self.groups:
            mark = "!" if {*group.ranks} & {*self.reasons} else " "
            lines.append(f"{mark}{len(group.ranks):5d}  ranks {ranges(group.ranks)}: {group.where}")
            if group.frames:
                lines.append(f"          {group.stack}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> Json:
        values = {
            "groups": self.groups,
            "suspects": self.suspects,
            "nodes": self.nodes,
            "exclude": self.exclude,
            "verdict": self.paragraph,
            "reasons": self.reasons,
            "notes": self.notes,
        }
        return as_json(values)


def diagnose_hang(folder: Path | str, grid: Grid | None = None) -> Verdict:
    """The verdict on a folder of stack dumps or a run folder:
    `diagnose_hang("stacks").suspects`.

    `grid` replaces the topology that the folder names. Raises ValueError where the folder holds no
    dump.
    """
    return _verdict(read_folder(Path(folder), grid))


def _verdict(evidence: Evidence) -> Verdict:
    found = conditions(evidence)
    suspects = find_suspects(evidence, found)
    places = [evidence.grid[rank] for rank in suspects.reasons]
    nodes = tuple(dict.fromkeys(place.node for place in places))
    exclude = excluded(nodes)
    # all nodes cannot be left out
    if not _are_sure(evidence, found, suspects) or len(nodes) == len(evidence.grid.nodes):
        exclude = ""
    return Verdict(
        grid=evidence.grid,
        groups=tuple(_groups(found, suspects)),
        reasons=suspects.reasons,
        nodes=nodes,
        exclude=f"--exclude={exclude}" if exclude else "",
        paragraph=_paragraph(evidence, found, suspects),
        notes=(*evidence.notes, *_notes(found)),
    )


def _are_sure(evidence: Evidence, found: Conditions, suspects: Suspects) -> bool:
    """Whether each suspect's fault is shown, and its node known."""
    for rank, reason in suspects.reasons.items():
        place = evidence.grid[rank]
        # Where the order of nodes is assumed, so is who waits for whom: then a node is named by a
        # stack that it printed and that shows the fault alone.
        is_own = rank in evidence.dumps and found[rank].on_host
        is_known = place.named and (place.node_known >= Known.MAP or is_own)
        # a rank without a dump may not have been dumped
        if not is_known or found[rank].kind == "silent" or OPEN in reason:
            return False
    return True


def study_hang(study: Study, dumps: str = "", tp: int = 0, pp: int = 0, dp: int = 0) -> Verdict:
    """The verdict on the folder `dumps` (of these sizes, where they are known), else on the study's
    last run that hung, else on data/examples/hang.json.

    Raises ValueError where `dumps` holds no dump: `study_hang(Study.open("demo"), "stacks")`.
    """
    if dumps:
        return diagnose_hang(Path(dumps), asked(tp, pp, dp))
    hung = [folder for folder in study.run_folders() if list((folder / "stacks").glob("*/rank_*"))]
    if hung:
        return diagnose_hang(hung[-1])
    example = shipped_json("examples/hang")
    grid = from_json(example["topology"])
    assert grid
    dump_of: dict[int, Dump] = {}
    for stack in example["stacks"].values():
        lines = ['Thread 1 (active): "MainThread"', *(f"    {frame}" for frame in stack["frames"])]
        dump_of |= dict.fromkeys(stack.get("ranks", grid.ranks), read_pyspy("\n".join(lines))[0])
    evidence = Evidence(grid=grid, dumps=dump_of, recordings={}, unreadable=set(), notes=())
    return replace(_verdict(evidence), example=True)


def _groups(found: Conditions, suspects: Suspects) -> list[Group]:
    groups = []
    for ranks in _alike(found, found):
        condition = found[ranks[0]]
        site = str(condition.frames[0]) if condition.frames else ""
        if condition.wait:
            site = str(condition.wait.site)
        group = Group(
            ranks=tuple(ranks),
            axis=suspects.axes.get(ranks[0], ""),
            site=site,
            state=condition.kind,
            where=condition.text,
            frames=tuple(map(str, condition.frames)),
        )
        groups.append(group)
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))


def _alike(found: Conditions, ranks: Iterable[int]) -> list[list[int]]:
    """Ranks by their kind and stack, or by what they do where there is none."""
    groups = grouped(sorted(ranks), lambda r: (found[r].kind, found[r].key or found[r].text))
    return list(groups.values())


def _paragraph(evidence: Evidence, found: Conditions, suspects: Suspects) -> str:
    """The verdict in one line: the suspects and the reasons, or why there are none, and where most
    others wait.
    """
    reasons = grouped(suspects.reasons, suspects.reasons.__getitem__)
    parts = [f"{_places(evidence.grid, ranks)}: {reason}" for reason, ranks in reasons.items()]
    parts = parts[:SHOWN_REASONS]
    if not parts:
        parts = [f"which rank is at fault {OPEN} from these dumps; Flight Recorder dumps show more"]
    others = [r for r, own in found.items() if own.wait and r not in suspects.reasons]
    if others:
        most = max(_alike(found, others), key=len)
        parts.append(f"{len(most)} of {len(found)} ranks wait {found[most[0]].wait}")
    return "; ".join(parts)


def _notes(found: Conditions) -> list[str]:
    """Notes on ranks without a dump: whether that counts against them."""
    kinds = grouped(found, lambda rank: found[rank].kind)
    texts = {
        "silent": "ranks {} have no dump: they may have ended",
        "unknown": "ranks {} have no dump; one of them may be late",
        "unreadable": "the dumps of ranks {} cannot be read; one of them may be late",
    }
    return [text.format(ranges(kinds[kind])) for kind, text in texts.items() if kind in kinds]


def _places(grid: Grid, ranks: list[int]) -> str:
    """Ranks with their nodes, a single one with its coordinates."""
    where = list(dict.fromkeys(grid.node_name(grid[rank].node) for rank in sorted(ranks)))
    if len(ranks) > 1:
        return f"ranks {ranges(ranks)} ({', '.join(where)})"
    if grid.known:
        place = grid[ranks[0]]
        where.insert(0, f"tp {place.tp}, pp {place.pp}, dp {place.dp}")
    return f"rank {ranks[0]} ({', '.join(where)})"
