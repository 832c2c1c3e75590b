"""Files of dumps: which rank a file is of, and what it holds, from any tool."""

import contextlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from trilane.diagnose.hang import pyspy
from trilane.diagnose.hang.flight_recorder import Recording, read_recording
from trilane.diagnose.hang.merged import texts_by_host
from trilane.diagnose.hang.stack import Dump
from trilane.diagnose.hang.tracebacks import read_faults, read_traceback
from trilane.workspace.rank_grid import MOST

RANK = re.compile(r"(?:^|[^a-zA-Z])rank[_\-. ]?(\d+)", re.I)
NUMBER = re.compile(r"^(\d+)$|[_\-.](\d+)$")
LAST = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
NODE = re.compile(r"--(?:node|machine)[-_]rank[= ](\d{1,6})\b")
LOCAL = re.compile(r"--local[-_]rank[= ](\d{1,6})\b")

# Functions of processes that do not train: a launcher, a data loader's or a checkpoint's worker (forked: its stack
# holds its parent's), an engine of inference.
NOT_TRAINING = {
    *("_worker_loop", "_invoke_run", "launch_agent", "_pin_memory_loop", "spawn_main", "run_commandline"),
    *("async_loop", "write_preloaded_data", "_checkpointing_subprocess", "run_engine_core"),
}

LAUNCHER = re.compile(
    r"torch\.distributed\.(?:run|launch)|torchrun|deepspeed\.launcher|py-spy|\bsrun\b|resource_tracker"
    r"|\bray::IDLE|raylet|compile_worker|tensorboard|wandb-core|gcs_server|ray/(?:dashboard|autoscaler)/|ray/_private/(?:log_)?monitor"
)

WORLD = re.compile(rb"\bworld[ _]size['\"]?(?: is| to)?[ :=.]{1,60}(\d{1,7})\b", re.I)
HEAD = 1 << 20  # bytes of a file in which it is looked for
LARGEST = 64 << 20  # bytes; larger files are not read


def rank_of(path: Path, *, alone: bool = False) -> int | None:
    """The rank in a file's name; None for a file of a whole node. `alone`: the file is of one rank.

    The Flight Recorder writes its rank directly behind the configured prefix: `trace12`.
    """
    match = RANK.search(path.name) or NUMBER.search(path.name.split(".")[0])
    match = None if path.name.startswith("trace-") else match
    match = match or (LAST.search(path.name) if alone else None)
    return int(next(filter(None, match.groups()))) if match else None


def node_number(dump: Dump) -> int | None:
    """The number of the node by a launcher's command."""
    match = NODE.search(dump.command)
    return int(match[1]) if match else None


def is_trainer(dump: Dump) -> bool:
    """Whether the process trains, and is not a launcher or a data loader's worker."""
    return not LAUNCHER.search(dump.command) and not any(f.function in NOT_TRAINING for f in dump.main.frames)


def read_file(path: Path) -> tuple[dict[str, list[Dump]], Recording | None, str]:
    """The dumps in a file by host ("" where its lines name none), its recording, or the reason why it cannot be read;
    all empty for other kinds of file."""
    try:
        if path.stat().st_size > LARGEST:
            return {}, None, "larger than any dump"
        data = path.read_bytes()
    except OSError as error:
        return {}, None, f"cannot be read ({error.strerror})"
    head = data.lstrip()[:4096]
    if data[:1] == b"\x80" or (head[:1] == b"{" and (b'"entries"' in data or b'"pg_config"' in data)):
        try:
            return {}, read_recording(data), ""
        except ValueError as error:
            return {}, None, str(error)
    text = data.decode("utf-8", "replace")
    if head[:1] == b"[" and (b'"frames"' in data or b'"pid"' in data):
        dump = pyspy.read_json(text)
        return ({"": [dump]}, None, "") if dump.threads else ({}, None, "py-spy's JSON is truncated before a frame")
    found = {host: dumps for host, own in texts_by_host(text).items() if (dumps := _dumps(own, path.suffix))}
    looks = path.suffix in (".txt", ".json", ".out", ".dump") or "rank" in path.name
    wrong = looks and not found and path.suffix not in (".log", ".beat")
    return found, None, "empty or not a dump that can be read" if wrong else ""


def _dumps(text: str, suffix: str) -> list[Dump]:
    """The dumps in the text of one host: faulthandler's, py-spy's, or a traceback."""
    if "most recent call first" in text:
        return [read_faults(text)]
    if "Thread " in text or "Process " in text:
        dumps = pyspy.read_text(text)
        if dumps and (any(d.threads for d in dumps) or suffix != ".log"):
            return dumps
    trace = read_traceback(text)
    return [trace] if trace is not None else []


def world_size(paths: Iterable[Path], recordings: Mapping[int, Recording]) -> int:
    """The number of the job's ranks, by the members of recorded groups, what programs print, and py-spy's --locals; 0
    where nothing gives it."""
    sizes = [1 + max(ranks) for r in recordings.values() for ranks in r.members.values() if ranks]
    for path in paths:
        with contextlib.suppress(OSError), path.open("rb") as file:
            sizes += [int(match[1]) for match in WORLD.finditer(file.read(HEAD))]
    return max((size for size in sizes if size <= MOST), default=0)
