"""A colleague's plans, sites, clusters, tables and command lines, damaged or meant to harm: a
result or one line.
"""

import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import small_plan

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.costmodel.calibration import Calibration, to_json
from trilane.utils.validation import to_mapping

# What ends a line for bash, sbatch or a terminal, begins a command or an option, or turns the
# direction of writing.
WORDS = {
    "line end": "v100\ntouch canary",
    "NUL": "v100\0",
    "substitution": "$(touch canary)",
    "directive": "v100\n#SBATCH --wrap=x",
    "option": "--wrap=x",
    "escape": "\x1b]0;owned\x07v100",
    "long": "a" * 100_000,
}
H200 = to_mapping(cluster("h200"))
SITE_WORDS = ("partition", "service_partition", "constraint", "modules", "qos")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder with a good plan, in which the commands run; a command that hangs ends the
    test.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRILANE_OUTPUTS", f"{tmp_path}/outputs")
    write("plan.json", small_plan().to_json())
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield tmp_path
    signal.alarm(0)


def write(name: str, values: Any) -> str:
    """Write a file of JSON, or of text or bytes as they are; its name."""
    data = values if isinstance(values, str | bytes) else json.dumps(values)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return name


def files() -> dict[Path, int]:
    """The files below the current folder, with the times of their last change."""
    return {path: path.lstat().st_mtime_ns for path in Path().rglob("*")}


def refused(capsys, *words: str) -> str:
    """The one line of a command that refuses its input; it writes and changes no file."""
    before = files()
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 2 and not out, (code, out[:500], err[:500])
    assert (
        err.startswith("trilane: ")
        and err.endswith("\n")
        and err[:-1].isprintable()
        and len(err) < 1500
    ), err[:2000]
    assert "=" in err.split(": ")[1], err
    assert before == files()
    return err


def site_with(field: str, value: str) -> dict[str, Any]:
    """A site's JSON with that value in a field."""
    if field == "qos":
        return {"name": "mine", "qos": [{"name": value, "hours": 1, "gpus": 8}]}
    return {"name": "mine", field: [value] if field == "modules" else value}


@pytest.mark.parametrize("value", WORDS.values(), ids=WORDS)
def test_no_word_of_a_site_is_read_twice(here: Path, capsys, value: str):
    """Whatever field of the JSON holds it: the site is refused, with the field's name."""
    for field in (*SITE_WORDS, *(["account_ending"] if not value.startswith("--") else [])):
        site = write("site.json", site_with(field, value))
        assert f"site.{field}" in refused(
            capsys, "slurm", "script", "plan.json", "--site", site
        ).replace("qos.", "site.qos.")


# What no JSON file of a user may hold, whatever reads it.
FILES = {
    "deep lists": b"[" * 100_000,
    "infinite": b'{"label": 1e400}',
    "UTF-16": '{"label": "a"}'.encode("utf-16"),
    "NUL": b'{"label": "a\0"}',
    "empty": b"",
    "an escape as a key": b'{"\\u001b]0;owned\\u0007": 1}',
    "half a character": b'{"label": "\\ud800"}',
}
READERS = (
    "plan show X",
    "slurm script X --site generic",
    "plan calendar X --tokens 1e9",
    "slurm script plan.json --site X",
    "plan show --shape X --cluster h200 --gbs 16",
    "convert megatron X",
    "plan show --shape 12,768,12,1024,50304 --gbs 16 --cluster X",
    "plan show plan.json --calibration X",
    "plan calendar plan.json --tokens 1e9 --risks X",
    "slurm sweep X new --site generic",
    "slurm chain X new --site generic",
    "train X",
    "plan backtest X",
    "calibrate X --cluster h200 -o new.json",
)


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_a_file_that_is_not_what_is_read_is_refused_by_every_reader(here: Path, capsys, data):
    write("X.json", data)
    for line in READERS:
        refused(capsys, *shlex.split(line.replace("X", "X.json")))


def test_what_is_no_regular_file_is_refused_unread(here: Path, capsys):
    """A FIFO would wait for a writer, and /dev/zero has no end."""
    os.mkfifo("fifo.json")
    Path("folder.json").mkdir()
    Path("zero.json").symlink_to("/dev/zero")
    Path("loop.json").symlink_to("loop.json")
    for name in (
        "fifo.json",
        "folder.json",
        "zero.json",
        "loop.json",
        "a" * 300 + ".json",
        "-.json",
    ):
        for line in (*READERS[:6], "logs parse X", "convert megatron --read X --cluster h200"):
            refused(capsys, *line.replace("X", name).split())


def changed(values: Any, path: str, new: Any) -> Any:
    """The JSON with another value at a dotted path."""
    name, _, rest = path.partition(".")
    return {**values, name: changed(values[name], rest, new) if rest else new}


LABELS = {
    "empty": "",
    "way out": "../../canary",
    "option": "-rf",
    "line end": "a\ntouch canary",
    "escape": "\x1b[2J",
    "long": "a" * 201,
    "hidden": ".ssh",
    "half": "\ud800",
    "number": 1,
    "null": None,
}
PLANS = {
    **{f"label {name}": ("label", value) for name, value in LABELS.items()},
    "source": ("data.source", "a\ntouch canary"),
    "blend": (
        "data.blend",
        [{"source": "$(touch canary)\n", "weight": 1}, {"source": "b", "weight": 1}],
    ),
    "engine": ("engine", "$(touch canary)"),
    "hidden 2^40": ("shape.hidden_size", 1 << 40),
    "endless ramp": ("run.ramp", {"start": 1, "increment": 1, "samples": 1 << 80}),
    "cluster's name": ("cluster.name", "a\x1b[2Jb"),
    "unknown": ("$(touch canary)", 1),
}


@pytest.mark.parametrize(("path", "value"), PLANS.values(), ids=PLANS)
def test_a_plan_that_cannot_be_is_refused_by_name(here: Path, capsys, path: str, value: Any):
    write("bad.json", changed(small_plan().to_json(), path, value))
    for line in ("plan show X", "slurm script X --site generic", "train X", "convert megatron X"):
        refused(capsys, *line.replace("X", "bad.json").split())


GOOD = json.dumps(small_plan().to_json())
ARGUMENTS = "convert megatron --read X --cluster h200"
SCRIPT, SWEEP = "slurm script plan.json --site generic", "slurm sweep X new --site generic"
SEARCH = "plan search --shape 6,64,4,32,384 --gpus 8 --gbs 8"
# a command, of which X is a file, and what that holds
CASES: dict[str, tuple[str, Any]] = {
    "infinite": ("plan show X", GOOD.replace('"adam_eps": 1e-08', '"adam_eps": 1e400')),
    "a key twice": ("plan show X", GOOD.replace("{", '{"label": "other", ', 1)),
    "bandwidth": (f"{SEARCH} --cluster X", {**H200, "network_bytes_per_s": 0}),
    "risk": ("plan calendar plan.json --tokens 1e9 --risks X", {"spare_nodes": -1}),
    "calibration": ("plan show plan.json --calibration X", {"matmul": 1e300}),
    "their name": (
        "plan show X",
        {
            **small_plan().to_json(),
            "calibration": {"name": "\x1b[2J", "hash": "1", "constants": to_json(Calibration())},
        },
    ),
    "two of one label": (SWEEP, [small_plan().to_json()] * 2),
    "a plan among plans": ("plan show X:$(id)", {"plans": [small_plan().to_json()]}),
    "time": (f"{SCRIPT} --time-limit '1:00:00\n#SBATCH --wrap=x'", ""),
    "endless time": (f"{SCRIPT} --time-limit {'9' * 5000}:00:00", ""),
    "template": (f"{SCRIPT} --template ../parts/directives", ""),
    "shape": (f"plan show --cluster h200 --gbs 8 --shape {'9' * 5000},1,1,1,1", ""),
    "cluster": ("plan show --shape 6,64,4,32,384 --gbs 8 --cluster ../../etc/passwd", ""),
    "a formula as the header": ("plan backtest X.csv", "=HYPERLINK(1)\n1\n"),
    "a long text": (ARGUMENTS, "x" * 1_000_000),
}


@pytest.mark.parametrize(("line", "content"), CASES.values(), ids=CASES)
def test_what_cannot_be_is_refused_in_one_clean_line_and_soon(
    here: Path, capsys, line: str, content: Any
):
    write("a/plan.json", small_plan().to_json())  # what a way out would find
    for name in ("X.json", "X.md", "X.csv"):
        write(name, content)
    refused(capsys, *shlex.split(re.sub(r"\bX\b(?!\.)", "X.json", line)))


def test_a_plan_written_with_a_byte_order_mark_is_read(here: Path, capsys):
    """Editors on Windows write one."""
    write("bom.json", b"\xef\xbb\xbf" + Path("plan.json").read_bytes())
    assert main(["plan", "show", "bom.json"]) == 0
