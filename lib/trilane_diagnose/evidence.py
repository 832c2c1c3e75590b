"""Evidence on a hang: what a folder of dumps, from any tool, holds for each rank; with notes on
what is odd.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from trilane.utils.files import natural
from trilane.utils.tables import grouped, short
from trilane.utils.validation import require, require_folder
from trilane.workspace import rank_grid
from trilane.workspace.place import Known
from trilane.workspace.rank_grid import Grid
from trilane_diagnose.flight_recorder import Recording, read_recording
from trilane_diagnose.stacks import Dump, patterns, read_faults, read_json, read_pyspy


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Dumps and Flight Recorder recordings by rank, earlier dumps of the same ranks, the grid, and
    notes.
    """

    grid: Grid
    dumps: dict[int, Dump]
    earlier: dict[int, Dump]
    recordings: dict[int, Recording]
    unreadable: set[int]
    notes: tuple[str, ...]


def read_folder(folder: Path, grid: Grid | None = None) -> Evidence:
    """The evidence in a folder of dumps, or in a run folder with `stacks/`. ValueError where there
    is no dump.

    Ranks come from names (`rank_12.json`, `12.txt`, `nccl_trace_rank_12`). A file of one node
    (`trace-node7.out`), or its lines in a file of many, holds its ranks in the order of
    --local_rank, else of pid; nodes come in the order of --node_rank, else of their names.
    Subfolders are moments, of which the last counts. `grid` takes precedence over topology.json and
    plan.json.
    """
    require_folder("folder", folder)
    roots = [folder / "stacks", folder / "ranks"] if (folder / "stacks").is_dir() else [folder]
    paths = sorted(
        {p for root in roots for p in root.rglob("*") if p.is_file()}, key=lambda p: natural(str(p))
    )
    files = _Files()
    for path in paths:
        # facts about the run, and the states of a host's processes
        if not re.match(
            r"(?:plan|topology|status|env|ds_config|verdict|failures)\.json$|states-", path.name
        ):
            files.add(path)
    grid, names = files.assign(grid or _grid(folder, paths, files.notes))
    found = {*files.dumps, *files.recordings, *files.unreadable}
    none = "; ".join(
        ["holds no dump (py-spy, faulthandler, Flight Recorder) that can be read", *files.notes[:1]]
    )
    require(
        any(rank < rank_grid.MOST for rank in {*files.dumps, *files.recordings}),
        "folder",
        folder,
        none,
    )
    if grid is None:
        members = {
            rank
            for one in files.recordings.values()
            for ranks in one.members.values()
            for rank in ranks
        }
        grid = rank_grid.unknown(
            {r for r in found if r < rank_grid.MOST} | members, files.width or 8, names, files.order
        )
        files.notes.append("no topology file: tp, pp and dp are unknown (give --tp, --pp, --dp)")
    if outside := found - {*grid.ranks}:
        files.notes.append(
            f"ranks {sorted(outside)[:5]} lie outside tp x pp x dp = {len(grid.ranks)}: ignored"
        )
    # The last dump with frames counts.
    series = {
        r: sorted(dumps, key=lambda d: bool(d.frames))
        for r, dumps in files.dumps.items()
        if r in grid
    }
    return Evidence(
        grid=grid,
        dumps={rank: dumps[-1] for rank, dumps in series.items()},
        earlier={
            rank: dumps[-2]
            for rank, dumps in series.items()
            if len(dumps) > 1 and not dumps[-2].error
        },
        recordings={
            rank: recording for rank, recording in files.recordings.items() if rank in grid
        },
        unreadable=files.unreadable - series.keys(),
        notes=tuple(files.notes),
    )


@dataclass(kw_only=True)
class _Files:
    """What files hold: the dumps of ranks, oldest first, recordings, and processes by their file
    and host.
    """

    dumps: dict[int, list[Dump]] = field(default_factory=lambda: defaultdict(list))
    recordings: dict[int, Recording] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    nodes: dict[tuple[Path, str], list[Dump]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    width: int = 0  # most processes of a node
    order: Known = Known.MAP  # of the nodes

    def add(self, path: Path) -> None:
        """Read one file."""
        rank = _rank_of(path)
        try:
            found = read_file(path)
        except (ValueError, OSError) as error:
            self.notes.append(f"{path.name}: {short(str(error))}")
            self.unreadable |= set() if rank is None else {rank}
            return
        if isinstance(found, Recording):
            self.notes += [f"{path.name}: the name holds no rank; ignored"] if rank is None else []
            self.recordings |= {} if rank is None else {rank: found}
            return
        if rank is not None and len(found) == 1:
            (dumps,) = found.values()
            self.dumps[rank].append(next(filter(is_trainer, dumps), dumps[0]))
        elif "" not in found and all(
            host.isdigit() and len(dumps) == 1 for host, dumps in found.items()
        ):
            for host, dumps in found.items():  # `srun --label` with a task for each rank
                self.dumps[int(host)] += dumps
        else:
            name = re.sub(r"^(?:trace|stacks?|dump|py-?spy)[-_.]", "", path.name).rsplit(".", 1)[0]
            self.nodes |= {(path, host or name): dumps for host, dumps in found.items()}

    def assign(self, grid: Grid | None) -> tuple[Grid | None, list[str]]:
        """Give the processes of nodes their ranks; the grid with the nodes' names, and these."""
        numbers = dict[str, int]()
        for (_, host), dumps in self.nodes.items():
            found = (
                _number(r"--(?:node|machine)[-_]rank[= ](\d{1,6})\b", dump.command)
                for dump in dumps
            )
            numbers.update((host, number) for number in found if number is not None)
        hosts = sorted({host for _, host in self.nodes}, key=natural)
        self.order = (
            Known.MAP if len(hosts) < 2 or len({*numbers.values()}) == len(hosts) else Known.ASSUMED
        )
        if len({*numbers.values()}) == len(hosts):
            hosts.sort(key=numbers.__getitem__)
        elif len(hosts) > 1 and not (grid and any(place.named for place in grid.places)):
            self.notes.append("nodes are in the order of their names: no --node_rank is shown")
        trainers = {key: [*filter(is_trainer, dumps)] for key, dumps in self.nodes.items()}
        self.width = max(map(len, trainers.values()), default=0)
        names = (
            [] if all(host.isdigit() for host in hosts) else hosts
        )  # srun --label: numbers, and no names
        grid = rank_grid.with_hosts(grid, names, self.width, self.order) if grid else None
        wide = len(next(iter(grid.nodes.values()))) if grid else self.width
        on = {p.node: sorted(grid.nodes[p.node]) for p in grid.places if p.named} if grid else {}
        for (_, host), dumps in trainers.items():
            ranks = on.get(host) or range(hosts.index(host) * wide, (hosts.index(host) + 1) * wide)
            for place, dump in enumerate(sorted(dumps, key=lambda d: d.pid)):
                local = _number(r"--local[-_]rank[= ](\d{1,6})\b", dump.command)
                if local is None:
                    self.notes.append(
                        "ranks of a node are in the order of their process ids: no --local_rank is shown"
                    )
                if (local := place if local is None else local) < len(ranks):
                    self.dumps[ranks[local]].append(dump)
        self.notes = [*dict.fromkeys(self.notes)]
        return grid, names


def _rank_of(path: Path) -> int | None:
    """The rank in a file's name; None for a file of a whole node."""
    if path.name.startswith(
        "trace-"
    ):  # `srun --output=trace-%N.out`: the end of a host's name is no rank
        return None
    rank = _number(r"(?i)(?:^|[^a-zA-Z])rank[_\-. ]?(\d+)", path.name)
    return _number(r"^(?:.*[_\-.])?(\d+)$", path.name.split(".")[0]) if rank is None else rank


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1][:9]) if match else None


def is_trainer(dump: Dump) -> bool:
    """Whether the process trains, and is not a launcher or a worker of a data loader or a
    checkpoint.
    """
    # a worker is forked: its stack holds its parent's, too
    helper, launcher = patterns("functions")["not_training"], patterns("commands")["launcher"]
    return not launcher.search(dump.command) and not any(
        helper.fullmatch(f.function) for f in dump.frames
    )


def read_file(path: Path) -> dict[str, list[Dump]] | Recording:
    """The recording in a file, or its dumps by host ("": none named). ValueError for a damaged
    dump.
    """
    require(path.stat().st_size <= 64 << 20, "file", path.name, "larger than any dump")
    data = path.read_bytes()
    head = data.lstrip()[:1]
    if data[:1] == b"\x80" or (head == b"{" and (b'"entries"' in data or b'"pg_config"' in data)):
        return read_recording(data)
    text = data.decode("utf-8", "replace")
    found = {
        host: dumps
        for host, own in texts_by_host(text).items()
        if (dumps := _dumps(own, path.suffix))
    }
    is_dump = path.suffix != ".log" and ("rank" in path.name or '"owns_gil"' in text)
    require(
        bool(found) or not is_dump,
        "file",
        path.name,
        "empty, truncated or not a dump that can be read",
    )
    return found


def _dumps(text: str, suffix: str) -> list[Dump]:
    """The dumps in the text of one host, faulthandler's or py-spy's; none where nothing is known of
    any process.
    """
    dumps = (
        [read_faults(text)]
        if "most recent call first" in text
        else read_json(text) or read_pyspy(text)
    )
    # an error in a log is not py-spy's
    return dumps if any(dump.frames or (dump.error and suffix != ".log") for dump in dumps) else []


def texts_by_host(text: str) -> dict[str, str]:
    """The text of each host in that of many; {"": text} where no line names one.

    pdsh, ds_ssh and clush write `node1: ` before each line, `srun --label` ` 3: `. Other lines are
    left out. ValueError for the headings of dshbak, which are no names before lines.
    """
    begin = (
        r"(?:Process \d{1,9}: |(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]{1,16} [(\[]|Timeout \()"
    )
    if not re.search(begin, text):  # a log, which may be long
        return {"": text}
    require(
        not re.search(r"(?m)^-{8,}$", text),
        "heading",
        "---",
        "give pdsh's lines as they are, without dshbak",
    )
    found = grouped(
        re.findall(r"(?m)^ {0,8}([\w.-]{1,80}):(?: (.*)|)$", text), lambda line: line[0]
    )
    texts = {host: "\n".join(line for _, line in lines) for host, lines in found.items()}
    ends = "\n" * text.endswith("\n")
    return {host: own + ends for host, own in texts.items() if re.search(f"(?m)^{begin}", own)} or {
        "": text
    }


def _grid(folder: Path, paths: list[Path], notes: list[str]) -> Grid | None:
    """The grid by the last topology.json, else by that or plan.json here or up to two folders
    above.
    """
    listed = [p for p in paths if p.name == "topology.json"][::-1]
    above = [
        f / name
        for f in [folder, *folder.resolve().parents][:3]
        for name in ("topology.json", "plan.json")
    ]
    for path in filter(Path.is_file, [*listed, *above]):
        if (grid := rank_grid.read(path)) is not None:
            return grid
        notes.append(f"{path.name}: holds no topology, or is damaged; ignored")
    return None
