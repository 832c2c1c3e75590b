"""Evidence on a hang: what a folder of dumps holds for each rank, from any tool, with notes on what is odd."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trilane.diagnose.hang.dump_files import LARGEST, LOCAL, is_trainer, node_number, rank_of, read_file, world_size
from trilane.diagnose.hang.flight_recorder import DAMAGED, Recording
from trilane.diagnose.hang.stack import Dump
from trilane.utils.files import natural
from trilane.utils.tables import short
from trilane.utils.validation import require, require_folder
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid

SPREAD_S = 120.0  # dumps written further apart than this are of different moments
# Facts about the run, and process states of a host.
NO_DUMP = re.compile(r"(?:plan|topology|status|env|ds_config|verdict|failures)\.json$|states-|.*\.(?:beat|calls|sh)$")


Series = defaultdict[int, list[tuple[Path, Dump]]]  # the dumps of each rank, oldest first


@dataclass(frozen=True, kw_only=True)
class Node:
    """The dumps of a node's training processes, with its name, and its `number` by its launcher (None: not shown)."""

    path: Path
    host: str
    dumps: list[Dump]
    number: int | None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Dumps and Flight Recorder recordings by rank, earlier dumps of the same ranks, the grid, and notes; `advanced`
    are ranks whose heartbeats have gone on since the earlier dumps."""

    grid: Grid
    dumps: dict[int, Dump]
    earlier: dict[int, Dump] = field(default_factory=dict)
    advanced: frozenset[int] = frozenset()
    recordings: dict[int, Recording] = field(default_factory=dict)
    unreadable: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    is_whole: bool = True  # whether the number of the job's ranks is known


def read_folder(folder: Path, grid: Grid | None = None) -> Evidence:
    """The evidence in a folder of dumps, or in a run folder with `stacks/`. Raises ValueError where there is no dump.

    Rank and moment come from the names: `rank_12.json`, `12.txt`, `nccl_trace_rank_12`; a file of one node
    (`trace-node7.out`), or its lines in a file of many (pdsh, srun --label, dshbak), holds its ranks in the order of
    --local_rank, else of pid; nodes are taken in the order of --node_rank, else of their names. Subfolders are moments,
    in the order of their names; the last counts. `grid` takes precedence over topology.json and plan.json.
    """
    require_folder("folder", folder)
    roots = [folder / "stacks", folder / "ranks"] if (folder / "stacks").is_dir() else [folder]
    paths = sorted({p for root in roots for p in root.rglob("*") if p.is_file()}, key=lambda p: natural(str(p)))
    notes = list[str]()
    grid = grid or _grid(folder, paths, notes)
    files = (path for path in paths if not NO_DUMP.match(path.name))
    series, recordings, unreadable, nodes = _sorted_by_rank(files, notes)
    width = max((len(node.dumps) for node in nodes), default=0)
    numbers = {node.host: node.number for node in nodes if node.number is not None}
    hosts = list(dict.fromkeys(node.host for node in nodes))
    if len({*numbers.values()}) == len(hosts):
        hosts.sort(key=numbers.__getitem__)
    elif len(hosts) > 1 and not (grid and any(place.named for place in grid.places)):
        notes.append("nodes are numbered in the order of their names, as no --node_rank is shown")
    names = [] if all(host.isdigit() for host in hosts) else hosts  # srun --label: numbers, and no names
    grid = rank_grid.with_hosts(grid, names, width) if grid else None
    _assign_ranks(nodes, grid, hosts, series)
    if any(not LOCAL.search(dump.command) for node in nodes for dump in node.dumps):
        notes.append("ranks of a node are numbered in the order of their process ids, as no --local_rank is shown")
    beyond = [rank for rank in series if rank >= rank_grid.MOST]
    for name in sorted({path.name for rank in beyond for path, _ in series.pop(rank)}):
        notes.append(f"{name}: holds ranks above {rank_grid.MOST - 1}; these are ignored")
    seen = {*series, *recordings, *unreadable}
    require(bool(seen), "folder", folder, "holds no dump (py-spy, faulthandler, Flight Recorder) that can be read")
    is_whole = grid is not None or (world := world_size(paths, recordings)) > max(seen)
    if grid is None:
        grid = rank_grid.unknown({*seen, *([world - 1] if is_whole else [])}, width or 8, names)
        notes.append("no topology file: tp, pp and dp are unknown (give --tp, --pp, --dp)")
    outside = sorted(seen - set(grid.ranks))
    if outside:
        notes.append(f"ranks {outside[:5]} lie outside tp x pp x dp = {len(grid.ranks)}; they are ignored")
    main = {rank: _best(dumps) for rank, dumps in series.items() if rank in grid}
    return Evidence(
        grid=grid,
        dumps={rank: dump for rank, (_, dump) in main.items()},
        earlier={rank: dumps[-2][1] for rank, dumps in series.items() if rank in grid and len(dumps) > 1},
        advanced=_advanced(series, grid),
        recordings={rank: recording for rank, recording in with_members(recordings).items() if rank in grid},
        unreadable=tuple(sorted(unreadable - set(main) & set(grid.ranks))),
        notes=(*notes, *_oddities(main)),
        is_whole=is_whole,
    )


def _sorted_by_rank(
    paths: Iterable[Path], notes: list[str]
) -> tuple[Series, dict[int, Recording], set[int], list[Node]]:
    """Dumps, recordings and unreadable files by rank, and the dumps of whole nodes; what is odd goes to `notes`."""
    series: Series = defaultdict(list)
    recordings, unreadable, nodes = dict[int, Recording](), set[int](), list[Node]()
    for path, found, recording, complaint in [(path, *read_file(path)) for path in paths]:
        dumps = next(iter(found.values()), [])
        rank = rank_of(path, alone=recording is not None or not (dumps or path.suffix))
        if rank is not None and rank >= rank_grid.MOST:
            notes.append(f"{path.name}: rank {rank} is above {rank_grid.MOST - 1}; ignored")
        elif complaint:
            notes.append(f"{path.name}: {complaint}")
            unreadable |= {rank} if rank is not None else set()
        elif recording is not None and rank is None:
            notes.append(f"{path.name}: the name holds no rank; ignored")
        elif recording is not None and rank is not None:
            recordings[rank] = recording
            notes += [f"{path.name}: {problem}" for problem in recording.problems]
        elif dumps and rank is not None and len(found) == 1:
            series[rank].append((path, next(iter([d for d in dumps if is_trainer(d)] or dumps))))
        else:
            own = {
                host or _host(path): [d for d in found[host] if is_trainer(d)] for host in sorted(found, key=natural)
            }
            if (
                own and "" not in found and all(host.isdigit() and len(own[host]) == 1 for host in own)
            ):  # a task for each rank
                for host, (dump,) in own.items():
                    series[int(host)].append((path, dump))
            else:
                launched = {host or _host(path): map(node_number, found[host]) for host in found}
                numbers = {host: next((n for n in launched[host] if n is not None), None) for host in own}
                nodes += [Node(path=path, host=h, dumps=dumps, number=numbers[h]) for h, dumps in own.items()]
    return series, recordings, unreadable, nodes


def with_members(recordings: Mapping[int, Recording]) -> dict[int, Recording]:
    """The recordings, with the members of groups whose own list is damaged as another rank of the group lists them.

    Where none does, the group's only known member is the rank itself.
    """
    found = dict(recordings)
    for rank, recording in recordings.items():
        others = [other.members for other in recordings.values()] if recording.lost else []
        for group in recording.lost:
            ranks = next((o[group] for o in others if rank in o.get(group, ())), (rank,))
            calls = (replace(call, ranks=ranks) if call.group == group else call for call in found[rank].calls)
            found[rank] = replace(found[rank], calls=tuple(calls))
    return found


def _best(dumps: list[tuple[Path, Dump]]) -> tuple[Path, Dump]:
    """The last dump with frames; a traceback only where there is nothing else."""
    return max(enumerate(dumps), key=lambda x: (bool(x[1][1].main.frames), x[1][0].suffix != ".log", x[0]))[1]


def _grid(folder: Path, paths: Iterable[Path], notes: list[str]) -> Grid | None:
    """The grid by the topology.json of the last moment, else of the folder, else by plan.json here or up to two folders
    above. A damaged file is noted and left out."""
    listed = [p for p in paths if p.name == "topology.json"]
    folders = [folder, *list(folder.resolve().parents)[:2]]
    for path in [*reversed(listed), *(f / name for f in folders for name in ("topology.json", "plan.json"))]:
        if path.is_file() and (grid := _read_grid(path, notes)) is not None:
            return grid
    return None


def _read_grid(path: Path, notes: list[str]) -> Grid | None:
    try:
        require(path.stat().st_size <= LARGEST, "file", path, "is larger than any topology")
        return rank_grid.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (*DAMAGED, OSError) as error:
        notes.append(f"{path.name}: is damaged, and ignored ({short(str(error))})")
        return None


def _advanced(series: Series, grid: Grid) -> frozenset[int]:
    """The ranks whose heartbeat is in a later iteration than at the moment before the last."""
    before = {rank: dumps[-2][0].parent / "topology.json" for rank, dumps in series.items() if len(dumps) > 1}
    grids = {path: _read_grid(path, []) for path in {*before.values()} if path.is_file()}
    earlier = {rank: old for rank, path in before.items() if (old := grids.get(path)) and rank in old and rank in grid}
    return frozenset(r for r, old in earlier.items() if 0 <= old[r].progress < grid[r].progress)


def _assign_ranks(nodes: Sequence[Node], grid: Grid | None, hosts: list[str], series: Series) -> None:
    """Add the processes of nodes to `series` under their ranks."""
    wide = len(next(iter(grid.nodes.values()))) if grid else max((len(n.dumps) for n in nodes), default=0)
    named = {p.node for p in grid.places if p.named} if grid else set()
    for node in nodes:
        first = hosts.index(node.host) * wide
        ranks = sorted(grid.nodes[node.host]) if grid and node.host in named else None
        for index, dump in enumerate(sorted(node.dumps, key=lambda d: d.pid)):
            place = int(match[1]) if (match := LOCAL.search(dump.command)) else index
            if ranks is None or place < len(ranks):
                series[ranks[place] if ranks else first + place].append((node.path, dump))


def _host(path: Path) -> str:
    return re.sub(r"^(?:trace|stacks?|dump|py-?spy)[-_.]", "", path.name).rsplit(".", 1)[0]


def _oddities(main: dict[int, tuple[Path, Dump]]) -> list[str]:
    """Notes where the dumps are not of one moment (of one folder, written within SPREAD_S), or truncated."""
    folders = Counter(path.parent.name for path, _ in main.values() if path.suffix != ".log")
    times = sorted(path.stat().st_mtime for path, _ in main.values())
    notes = []
    if len(folders) > 1:
        (last, _), *rest = sorted(folders.items(), reverse=True)
        notes.append(f"{sum(n for _, n in rest)} dumps are earlier than {last}: these ranks may have moved since")
    elif times and times[-1] - times[0] > SPREAD_S:
        apart = (times[-1] - times[0]) / 60
        notes.append(f"the dumps are up to {apart:.0f} minutes apart: ranks may have moved in between")
    cut = [rank for rank, (_, dump) in sorted(main.items()) if dump.cut]
    return notes + ([f"truncated dumps: ranks {cut[:8]}; their frames are used as far as they go"] if cut else [])
