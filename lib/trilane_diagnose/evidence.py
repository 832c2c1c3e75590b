"""Evidence on a hang: what a folder of dumps, from any tool, holds for each rank; with notes on
what is odd.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from trilane.logs.places import excluded
from trilane.utils.files import natural
from trilane.utils.frozen import frozen
from trilane.utils.tables import short
from trilane.utils.validation import require, require_folder
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid, Known
from trilane_diagnose.flight_recorder import Recording, read_recording
from trilane_diagnose.stacks import Dump, patterns, read_faults, read_pyspy

LARGEST_DUMP = 64 << 20  # bytes
# facts about the run, and the states of a host's processes
NO_DUMP = re.compile(r"(?:plan|topology|status|env|ds_config|verdict|failures)\.json$|states-")
# what a file's name holds before and after that of its host
NO_HOST = r"(?i)^(?:trace|stacks?|dump|py-?spy)(?:[-_.]|$)|(?<=\d)[-_](?:gpu|pid|proc|py-?spy).*"


@frozen
class Evidence:
    """The last dumps and Flight Recorder recordings by rank, the grid, and notes."""

    grid: Grid
    dumps: dict[int, Dump]
    recordings: dict[int, Recording]
    unreadable: set[int]
    notes: tuple[str, ...]


def read_folder(folder: Path, grid: Grid | None = None) -> Evidence:
    """The evidence in a folder of dumps, or in a run folder with `stacks/`. ValueError where there
    is no dump.

    Ranks come from names (`rank_12.json`, `12.txt`, `nccl_trace_rank_12`). A file of one node
    (`trace-node7.out`) holds its ranks in the order of pid; nodes come in the order of their names,
    where the grid does not name them. Subfolders are moments, of which the last counts.
    `grid` takes precedence over topology.json and plan.json.
    """
    require_folder("folder", folder)
    if (folder / "stacks").is_dir():
        roots = [folder / "stacks", folder / "ranks"]
    else:
        roots = [folder]
    entries = {path for root in roots for path in root.rglob("*")}
    paths = sorted(filter(Path.is_file, entries), key=lambda path: natural(str(path)))
    files = _Files()
    for path in paths:
        if not NO_DUMP.match(path.name):
            files.add(path)
    grid, names = files.assign(grid or _grid(folder, paths, files.notes))
    readable = {*files.dumps, *files.recordings}
    rule = "holds no dump (py-spy, faulthandler, Flight Recorder) that can be read"
    require(any(rank < rank_grid.MOST for rank in readable), "folder", folder, rule)
    ranks = readable | files.unreadable
    if grid is None:
        members = {rank for rank in ranks if rank < rank_grid.MOST}
        for recording in files.recordings.values():
            members.update(*recording.members.values())
        width = files.width or rank_grid.USUAL_GPUS_PER_NODE
        grid = rank_grid.with_hosts(rank_grid.unknown(members, width), names, width, files.order)
        files.notes.append("no topology file: tp, pp and dp are unknown (give --tp, --pp, --dp)")
    outside = sorted(ranks - {*grid.ranks})
    if outside:
        size = len(grid.ranks)
        files.notes.append(f"ranks {outside[:5]} lie outside tp x pp x dp = {size}: ignored")
    return Evidence(
        grid=grid,
        dumps={rank: dump for rank, dump in files.dumps.items() if rank in grid},
        recordings={rank: own for rank, own in files.recordings.items() if rank in grid},
        unreadable=files.unreadable - files.dumps.keys(),
        notes=tuple(files.notes),
    )


@dataclass(kw_only=True)
class _Files:
    """What files hold: the dumps of ranks, recordings, and processes by their folder and host."""

    dumps: dict[int, Dump] = field(default_factory=dict)
    recordings: dict[int, Recording] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    nodes: dict[tuple[Path, str], list[Dump]] = field(default_factory=dict)
    named: dict[tuple[Path, int], list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    width: int = 0  # most processes of a node
    order: Known = Known.MAP  # of the nodes

    def add(self, path: Path) -> None:
        """Read one file."""
        rank = _rank_of(path)
        is_named = rank is not None and "rank" in path.name
        try:
            content = read_file(path)
        except (ValueError, OSError) as error:
            self.notes.append(f"{path.name}: {short(str(error))}")
            if rank is not None:
                self.unreadable.add(rank)
            return
        if isinstance(content, Recording):
            if rank is None:
                self.notes.append(f"{path.name}: the name holds no rank; ignored")
            else:
                self.recordings[rank] = content
        elif any(dump.rank is not None for dump in content):
            for dump in content:
                if dump.rank is not None:
                    self.keep(dump.rank, dump)
        elif not is_named and rank in [dump.pid for dump in content]:
            self.nodes.setdefault((path.parent, ""), []).extend(content)
        elif content and rank is not None:
            # numbers before the rank's are of nodes, of which each may number its own
            before = re.findall(r"\d+", path.stem.partition("rank")[0])
            other = self.named.setdefault((path.parent, rank), before)
            rule = f"rank {rank} has other files; name each by its rank in the whole run"
            require(before == other, "file", path.name, rule)
            self.keep(rank, next(filter(is_trainer, content), content[0]))
        elif content:
            host = re.sub(NO_HOST, "", path.stem)
            host = excluded([host]) or host
            self.nodes.setdefault((path.parent, host), []).extend(content)

    def keep(self, rank: int, dump: Dump) -> None:
        """Of the dumps of a rank, which come oldest first, the last with frames counts."""
        before = self.dumps.get(rank)
        if dump.frames or not (before and before.frames):
            self.dumps[rank] = dump

    def assign(self, grid: Grid | None) -> tuple[Grid | None, list[str]]:
        """Give the processes of nodes their ranks; the grid with the nodes' names, and these."""
        hosts = sorted({host for _, host in self.nodes}, key=natural)
        if len(hosts) > 1:
            self.order = Known.ASSUMED
        trainers = {key: [*filter(is_trainer, dumps)] for key, dumps in self.nodes.items()}
        self.width = max(map(len, trainers.values()), default=0)
        # numbers are no names
        names = hosts if excluded(hosts) else []
        ranks_of = {}
        width = self.width
        if grid:
            grid = rank_grid.with_hosts(grid, names, self.width, self.order)
            width = len(next(iter(grid.nodes.values())))
            named = {place.node for place in grid.places if place.named}
            ranks_of = {node: sorted(ranks) for node, ranks in grid.nodes.items() if node in named}
        for (_, host), dumps in trainers.items():
            first = hosts.index(host) * width
            ranks = ranks_of.get(host) or range(first, first + width)
            in_order = sorted(dumps, key=lambda dump: dump.pid)
            for rank, dump in zip(ranks, in_order, strict=False):
                self.keep(rank, dump)
        if "" in hosts:
            self.notes.append("numbers of files are pids: ranks are unknown, numbered from 0")
        if hosts:
            self.notes.append("nodes are in the order of their names, ranks in that of their pids")
        return grid, names


def _rank_of(path: Path) -> int | None:
    """The rank in a file's name; None for a file of a whole node."""
    # `srun --output=trace-%N.out`: the end of a host's name is no rank
    if path.name.startswith("trace-"):
        return None
    match = re.search(r"(?i)(?:^|[^a-zA-Z])rank[_\-. ]?(\d+)", path.name)
    match = match or re.search(r"^(?:.*[_\-.])?(\d+)$", path.name.split(".")[0])
    return int(match[1][:9]) if match else None


def is_trainer(dump: Dump) -> bool:
    """Whether the process trains, and is not a launcher or a worker of a data loader or a
    checkpoint.
    """
    if patterns("commands")["launcher"].search(dump.command):
        return False
    # a worker is forked: its stack holds its parent's, too
    helper = patterns("functions")["not_training"]
    return not any(helper.fullmatch(frame.function) for frame in dump.frames)


def read_file(path: Path) -> list[Dump] | Recording:
    """The recording in a file, or its dumps; none in another. ValueError for a damaged dump."""
    require(path.stat().st_size <= LARGEST_DUMP, "file", path.name, "larger than any dump")
    data = path.read_bytes()
    is_json = data.lstrip()[:1] == b"{" and (b'"entries"' in data or b'"pg_config"' in data)
    if is_json or data[:1] == b"\x80":  # a pickle
        return read_recording(data)
    text = data.decode("utf-8", "replace")
    if "most recent call first" in text:
        dumps = [read_faults(text)]
    else:
        dumps = read_pyspy(text)
    is_log = path.suffix == ".log"
    # an error in a log is not py-spy's
    if any(dump.frames or (dump.error and not is_log) for dump in dumps):
        rule = "holds headings of dshbak; write a file for each host"
        require(not re.search(r"(?m)^-{8,}$", text), "file", path.name, rule)
        return dumps
    rule = "empty, truncated or not a dump that can be read"
    require(is_log or "rank" not in path.name, "file", path.name, rule)
    return []


def _grid(folder: Path, paths: list[Path], notes: list[str]) -> Grid | None:
    """The grid by the last topology.json, else by that or plan.json here or up to two folders
    above.
    """
    candidates = [path for path in paths if path.name == "topology.json"][::-1]
    for parent in [folder, *folder.resolve().parents][:3]:
        candidates += [parent / "topology.json", parent / "plan.json"]
    for path in filter(Path.is_file, candidates):
        grid = rank_grid.read(path)
        if grid:
            return grid
        notes.append(f"{path.name}: holds no topology, or is damaged; ignored")
    return None
