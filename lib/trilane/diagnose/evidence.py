"""Evidence on a hang: what a folder of dumps, from any tool, holds for each rank; with notes on what is odd."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trilane.diagnose.flight_recorder import Recording, read_recording
from trilane.diagnose.stacks import Dump, patterns, read_faults, read_json, read_pyspy, read_traceback
from trilane.utils.files import natural
from trilane.utils.tables import grouped, short
from trilane.utils.validation import require, require_folder
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid

Series = dict[int, list[tuple[Path, Dump]]]  # the dumps of each rank, oldest first


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Dumps and Flight Recorder recordings by rank, earlier dumps of the same ranks, the grid, and notes."""

    grid: Grid
    dumps: dict[int, Dump]
    earlier: dict[int, Dump]
    advanced: frozenset[int]  # ranks whose heartbeats have gone on since the earlier dumps
    recordings: dict[int, Recording]
    unreadable: set[int]
    notes: tuple[str, ...]


def read_folder(folder: Path, grid: Grid | None = None) -> Evidence:
    """The evidence in a folder of dumps, or in a run folder with `stacks/`. ValueError where there is no dump.

    Ranks come from names (`rank_12.json`, `12.txt`, `nccl_trace_rank_12`). A file of one node
    (`trace-node7.out`), or its lines in a file of many, holds its ranks in the order of --local_rank,
    else of pid; nodes come in the order of --node_rank, else of their names. Subfolders are moments, of
    which the last counts. `grid` takes precedence over topology.json and plan.json.
    """
    require_folder("folder", folder)
    roots = [folder / "stacks", folder / "ranks"] if (folder / "stacks").is_dir() else [folder]
    paths = sorted({p for root in roots for p in root.rglob("*") if p.is_file()}, key=lambda p: natural(str(p)))
    files = _Files()
    for path in paths:
        files.add(path)
    grid, names = files.assign(grid or _grid(folder, paths, files.notes))
    seen = {r for r in (*files.series, *files.recordings, *files.unreadable) if r < rank_grid.MOST}
    none = "; ".join(["holds no dump (py-spy, faulthandler, Flight Recorder) that can be read", *files.notes[:1]])
    require(bool(seen), "folder", folder, none)
    members = [max(ranks) for r in files.recordings.values() for ranks in r.members.values() if ranks]
    if grid is None:
        grid = rank_grid.unknown({*seen, *members}, files.width or 8, names)
        files.notes.append("no topology file: tp, pp and dp are unknown (give --tp, --pp, --dp)")
    if outside := {*files.series, *files.recordings, *files.unreadable} - {*grid.ranks}:
        files.notes.append(f"ranks {sorted(outside)[:5]} lie outside tp x pp x dp = {len(grid.ranks)}: ignored")
    series = {rank: dumps for rank, dumps in files.series.items() if rank in grid}
    # The last dump with frames; a traceback only where there is nothing else.
    main = {
        rank: max(dumps[::-1], key=lambda d: (bool(d[1].frames), d[0].suffix != ".log"))[1]
        for rank, dumps in series.items()
    }
    damaged = [rank for rank, dump in sorted(main.items()) if dump.cut]
    truncated = [f"truncated dumps: ranks {damaged[:8]}; their frames are used as far as they go"] if damaged else []
    return Evidence(
        grid=grid,
        dumps=main,
        earlier={rank: dumps[-2][1] for rank, dumps in series.items() if len(dumps) > 1},
        advanced=_advanced(series, grid),
        recordings={rank: recording for rank, recording in files.recordings.items() if rank in grid},
        unreadable=files.unreadable - main.keys(),
        notes=(*files.notes, *truncated),
    )


@dataclass(kw_only=True)
class _Files:
    """What files hold: the dumps of ranks, recordings, ranks whose file cannot be read, and processes by node."""

    series: Series = field(default_factory=lambda: defaultdict(list))
    recordings: dict[int, Recording] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    nodes: list[tuple[Path, str, Dump]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    width: int = 0  # most processes of a node

    def add(self, path: Path) -> None:
        """Read one file."""
        # facts about the run, and the states of a host's processes
        if re.match(r"(?:plan|topology|status|env|ds_config|verdict|failures)\.json$|states-", path.name):
            return
        rank = _rank_of(path)
        # torch writes the rank directly behind the configured prefix: `trace12`
        last = _number(r"(\d+)(?:\.(?:json|pkl|pickle))?$", path.name) if rank is None else rank
        try:
            found = read_file(path)
        except (ValueError, OSError) as error:
            self.notes.append(f"{path.name}: {short(str(error))}")
            self.unreadable |= set() if last is None else {last}
            return
        if isinstance(found, Recording):
            self.notes += [f"{path.name}: the name holds no rank; ignored"] if last is None else []
            self.recordings |= {} if last is None else {last: found}
        elif rank is not None and len(found) == 1:
            (dumps,) = found.values()
            self.series[rank].append((path, next(filter(is_trainer, dumps), dumps[0])))
        elif "" not in found and all(host.isdigit() and len(dumps) == 1 for host, dumps in found.items()):
            for host, (dump,) in found.items():  # `srun --label` with a task for each rank
                self.series[int(host)].append((path, dump))
        else:
            name = re.sub(r"^(?:trace|stacks?|dump|py-?spy)[-_.]", "", path.name).rsplit(".", 1)[0]
            self.nodes += [(path, host or name, dump) for host, dumps in found.items() for dump in dumps]

    def assign(self, grid: Grid | None) -> tuple[Grid | None, list[str]]:
        """Give the processes of nodes their ranks; the grid with the nodes' names, and these."""
        numbers = dict[str, int]()
        for _, host, dump in self.nodes:
            number = _number(r"--(?:node|machine)[-_]rank[= ](\d{1,6})\b", dump.command)
            numbers |= {} if number is None else {host: number}
        hosts = sorted({host for _, host, _ in self.nodes}, key=natural)
        if len({*numbers.values()}) == len(hosts):
            hosts.sort(key=numbers.__getitem__)
        elif len(hosts) > 1 and not (grid and any(place.named for place in grid.places)):
            self.notes.append("nodes are in the order of their names: no --node_rank is shown")
        nodes = grouped((node for node in self.nodes if is_trainer(node[2])), lambda node: node[:2])
        self.width = max(map(len, nodes.values()), default=0)
        names = [] if all(host.isdigit() for host in hosts) else hosts  # srun --label: numbers, and no names
        grid = rank_grid.with_hosts(grid, names, self.width) if grid else None
        wide = len(next(iter(grid.nodes.values()))) if grid else self.width
        known = {p.node: sorted(grid.nodes[p.node]) for p in grid.places if p.named} if grid else {}
        for (path, host), found in nodes.items():
            ranks = known.get(host) or range(hosts.index(host) * wide, (hosts.index(host) + 1) * wide)
            by_pid = enumerate(sorted((dump for _, _, dump in found), key=lambda d: d.pid))
            shown = [(_number(r"--local[-_]rank[= ](\d{1,6})\b", dump.command), n, dump) for n, dump in by_pid]
            note = "ranks of a node are in the order of their process ids: no --local_rank is shown"
            self.notes += [note] if any(local is None for local, _, _ in shown) and note not in self.notes else []
            for local, n, dump in shown:
                place = n if local is None else local
                if place < len(ranks):
                    self.series[ranks[place]].append((path, dump))
        return grid, names


def _rank_of(path: Path) -> int | None:
    """The rank in a file's name; None for a file of a whole node."""
    if path.name.startswith("trace-"):  # `srun --output=trace-%N.out`: the end of a host's name is no rank
        return None
    rank = _number(r"(?i)(?:^|[^a-zA-Z])rank[_\-. ]?(\d+)", path.name)
    return _number(r"^(?:.*[_\-.])?(\d+)$", path.name.split(".")[0]) if rank is None else rank


def _number(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1][:9]) if match else None


def is_trainer(dump: Dump) -> bool:
    """Whether the process trains, and is not a launcher or a worker of a data loader or a checkpoint."""
    # a worker is forked: its stack holds its parent's, too
    helper, launcher = patterns("functions")["not_training"], patterns("commands")["launcher"]
    return not launcher.search(dump.command) and not any(helper.fullmatch(f.function) for f in dump.frames)


def read_file(path: Path) -> dict[str, list[Dump]] | Recording:
    """The recording in a file, or its dumps by host ("": none named). ValueError for a damaged dump."""
    require(path.stat().st_size <= 64 << 20, "file", path.name, "larger than any dump")
    data = path.read_bytes()
    head = data.lstrip()[:1]
    if data[:1] == b"\x80" or (head == b"{" and (b'"entries"' in data or b'"pg_config"' in data)):
        return read_recording(data)
    text = data.decode("utf-8", "replace")
    if head == b"[" and (b'"frames"' in data or b'"pid"' in data):
        dump = read_json(text)
        require(bool(dump.frames), "file", path.name, "py-spy's JSON is truncated")
        return {"": [dump]}
    found = {host: dumps for host, own in texts_by_host(text).items() if (dumps := _dumps(own, path.suffix))}
    is_dump = path.suffix not in (".log", ".beat") and "rank" in path.name
    require(bool(found) or not is_dump, "file", path.name, "empty or not a dump that can be read")
    return found


def _dumps(text: str, suffix: str) -> list[Dump]:
    """The dumps in the text of one host: faulthandler's, py-spy's, or a traceback."""
    if "most recent call first" in text:
        return [read_faults(text)]
    dumps = read_pyspy(text) if "Thread " in text or "Process " in text else []
    if any(d.frames for d in dumps) or (dumps and suffix != ".log"):
        return dumps
    trace = read_traceback(text)
    return [trace] if trace is not None else []


def texts_by_host(text: str) -> dict[str, str]:
    """The text of each host in that of many; {"": text} where no line names one.

    pdsh, ds_ssh and clush write `node1: ` before each line, `srun --label` ` 3: `, mpirun
    `[1,3]<stdout>:`, torch `[rank3]: `; dshbak a heading between two rules. Other lines are left out.
    """
    begin = r"(?:Process \d{1,9}: |(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]{1,16} [(\[]|Timeout \()"
    if not re.search(begin, text):  # a log, which may be long
        return {"": text}
    found = defaultdict[str, list[str]](list)
    for host, line in _labelled(text):
        found[host].append(line)
    texts = {h: "\n".join(lines) for h, lines in found.items() if any(re.match(begin, line) for line in lines)}
    return {host: own + "\n" * text.endswith("\n") for host, own in texts.items()} or {"": text}


def _labelled(text: str) -> Iterator[tuple[str, str]]:
    """(host, line) for each line of a host."""
    _, *blocks = re.split(r"(?m)^-{8,}\n(\S{1,2000})(?: \(\d{1,6}\))?\n-{8,}\n", text)
    for host, block in zip(blocks[::2], blocks[1::2], strict=True):
        # dshbak -c: the processes of two nodes never have the same numbers, so that it joins no two dumps
        require("[" not in host and "," not in host, "heading", host, "names several nodes")
        yield from ((host, line) for line in block.splitlines())
    label = re.compile(r"\s{0,8}(?:\[(?:\d{1,4},|rank)(\d{1,6})\](?:<std\w{3}>)?: ?|([\w.-]{1,80}):(?: |$))")
    for line in [] if blocks else text.splitlines():
        if match := label.match(line):
            yield match[1] or match[2], line[match.end() :]


def _grid(folder: Path, paths: list[Path], notes: list[str]) -> Grid | None:
    """The grid by the last topology.json, else by that or plan.json here or up to two folders above."""
    listed = [p for p in paths if p.name == "topology.json"][::-1]
    above = [f / name for f in [folder, *folder.resolve().parents][:3] for name in ("topology.json", "plan.json")]
    for path in filter(Path.is_file, [*listed, *above]):
        if (grid := rank_grid.read(path)) is not None:
            return grid
        notes.append(f"{path.name}: holds no topology, or is damaged; ignored")
    return None


def _advanced(series: Series, grid: Grid) -> frozenset[int]:
    """The ranks whose heartbeat is in a later iteration than at the moment before the last."""
    before = {rank: dumps[-2][0].parent / "topology.json" for rank, dumps in series.items() if len(dumps) > 1}
    grids = {path: rank_grid.read(path) for path in {*before.values()}}
    earlier = {rank: old[rank].progress for rank, path in before.items() if (old := grids[path]) and rank in old}
    return frozenset(rank for rank, step in earlier.items() if 0 <= step < grid[rank].progress)
