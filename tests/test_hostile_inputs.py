"""A colleague's plans, sites, clusters, tables and command lines, damaged or meant to harm: a result or one line."""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import small_plan

from trilane.cli.app import main
from trilane.config.cluster import cluster
from trilane.slurm import script, sites
from trilane.utils.validation import to_mapping

# What ends a line for bash, sbatch or a terminal, begins a command or an option, or turns the direction of writing.
WORDS = {
    "line end": "v100\ntouch canary",
    "carriage return": "v100\rtouch canary",
    "last line end": "v100\n",
    "line separator": "v100\u2028touch canary",
    "next line": "v100\x85touch canary",
    "NUL": "v100\0",
    "substitution": "$(touch canary)",
    "backticks": "`touch canary`",
    "two commands": "v100;touch canary",
    "background": "v100&touch",
    "blank": "v100 --wrap=x",
    "directive": "v100\n#SBATCH --wrap=x",
    "option": "--wrap=x",
    "pattern": "%j",
    "escape": "\x1b]0;owned\x07v100",
    "direction": "v100\u202e001v",
    "long": "a" * 100_000,
}
SITE_WORDS = ("partition", "service_partition", "constraint", "hint", "partitions", "modules", "qos")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with a good plan, in which the commands run; a command that hangs ends the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRILANE_OUTPUTS", str(tmp_path / "outputs"))
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


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that refuses its input; it writes and changes no file."""
    before = files()
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 2 and not out, (code, out[:500], err[:500])
    assert err.startswith("trilane: ") and err.endswith("\n") and err[:-1].isprintable() and len(err) < 1500, err[:2000]
    assert "=" in err.split(": ")[1], err
    assert before == files()
    return err


def site_with(field: str, value: str) -> dict[str, Any]:
    """A site's JSON with that value in a field."""
    if field == "qos":
        return {"name": "mine", "qos": [{"name": value, "hours": 1, "gpus": 8}]}
    return {"name": "mine", field: [value] if field in ("partitions", "modules", "local") else value}


@pytest.mark.parametrize("value", WORDS.values(), ids=WORDS)
def test_no_word_of_a_site_is_read_twice(here: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    """Whatever field of the JSON holds it: the site is refused, with the field's name.

    An & joins the features of a constraint, in a line that is a comment for bash (tests/slurm/test_script.py).
    """
    words = [word for word in SITE_WORDS if (word, value) != ("constraint", WORDS["background"])]
    for field in (*words, *(["account_ending"] if not value.startswith("--") else [])):
        site = write("site.json", site_with(field, value))
        assert f"site.{field}" in refused(capsys, "slurm", "script", "plan.json", "--site", site).replace(
            "qos.", "site.qos."
        )


def test_the_directives_of_a_site_are_those_of_its_fields(here: Path) -> None:
    """sbatch and bash read the script as it was meant: no directive more, and no command of the site's."""
    site = dataclasses.replace(
        sites.site("jean-zay-a100"), partition="gpu_p5", local=("/tmp; touch canary",), cluster=""
    )
    text = script.render("train", small_plan(), site, sites.JobRequest(environment="/venv/$(touch canary)'\"; x"))
    assert script.directives(text) == {
        **{"job-name": "small", "nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "1", "hint": "nomultithread"},
        **{"time": "02:00:00", "partition": "gpu_p5", "constraint": "a100", "output": "slurm-%j.out"},
        **{"open-mode": "append", "signal": "USR1@300", "requeue": ""},
    }
    lines = [line for line in text.splitlines() if "canary" in line or "module load" in line]
    assert lines == ["module load arch/a100", """VENV='/venv/$(touch canary)'"'"'"; x'"""]
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


# What no JSON file of a user may hold, whatever reads it.
FILES = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"shape":' * 100_000,
    "deep and closed": b"[" * 100_000 + b"]" * 100_000,
    "5000 digits": b'{"label": ' + b"9" * 5000 + b"}",
    "infinite": b'{"label": 1e400}',
    "Infinity": b'{"label": -Infinity}',
    "NaN": b'{"label": NaN}',
    "a key twice": b'{"label": "a", "label": "b"}',
    "UTF-16": '{"label": "a"}'.encode("utf-16"),
    "Latin-1": '{"label": "é"}'.encode("latin-1"),
    "NUL": b'{"label": "a\0"}',
    "only NUL": bytes(1000),
    "empty": b"",
    "cut off": b'{"label": "x", "shape": {"num_lay',
    "HTML": b"<html><script>touch canary</script></html>",
    "one line": b"x" * 5_000_000,
    "a list": b"[1]",
    "a list of lists": b"[[[]]]",
    "null": b"null",
    "a number": b"1",
    "a text": b'"$(touch canary)"',
    "an escape as a key": b'{"\\u001b]0;owned\\u0007": 1}',
    "a long key": b'{"' + b"k" * 1_000_000 + b'": 1}',
    "half a character": b'{"label": "\\ud800"}',
}
READERS = (
    *("plan show X", "slurm script X --site generic", "plan calendar X --tokens 1e9"),
    *("slurm script plan.json --site X", "plan show --shape X --cluster h200 --gbs 16", "convert megatron X"),
    *("plan show --shape 12,768,12,1024,50304 --gbs 16 --cluster X", "plan show plan.json --calibration X"),
    *("plan calendar plan.json --tokens 1e9 --capacity X", "plan calendar plan.json --tokens 1e9 --risks X"),
    *("slurm sweep create X new --site generic", "slurm chain create X new --site generic", "train X"),
    *("slurm sweep status sweep", "slurm chain status chain", "plan backtest X", "debug rehearse X"),
)


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_a_file_that_is_not_what_is_read_is_refused_by_every_reader(
    here: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    for name in ("X.json", "sweep/runs.txt", "chain/chain.json"):
        write(name, data)
    for line in READERS:
        refused(capsys, *shlex.split(line.replace("X", "X.json")))


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ('"adam_eps": 1e-08', '"adam_eps": 1e400'),
        ('"adam_eps": 1e-08', '"adam_eps": NaN'),
        ("{", '{"label": "other", '),
    ],
    ids=["infinite", "NaN", "a key twice"],
)
def test_a_plan_has_finite_numbers_and_each_key_once(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, instead: str
) -> None:
    """All else in the file is right."""
    good = Path("plan.json").read_text()
    assert text in good
    write("bad.json", good.replace(text, instead, 1))
    refused(capsys, "plan", "show", "bad.json")


def test_what_is_no_regular_file_is_refused_unread(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A FIFO would wait for a writer, and /dev/zero has no end."""
    os.mkfifo("fifo.json")
    Path("folder.json").mkdir()
    Path("zero.json").symlink_to("/dev/zero")
    Path("loop.json").symlink_to("loop.json")
    for name in ("fifo.json", "folder.json", "zero.json", "loop.json", "a" * 300 + ".json", "-.json"):
        for line in (*READERS[:6], "logs lint X", "convert megatron --read X --cluster h200"):
            refused(capsys, *(name if word == "X" else word for word in line.split()))


def changed(values: Any, path: str, new: Any) -> Any:
    """The JSON with another value at a dotted path."""
    name, _, rest = path.partition(".")
    return {**values, name: changed(values[name], rest, new) if rest else new}


LABELS = {
    **{"empty": "", "dot": ".", "parent": "..", "way out": "../../canary", "absolute": "/tmp/canary", "option": "-rf"},
    **{"line end": "a\ntouch canary", "NUL": "a\0", "escape": "\x1b[2J", "direction": "\u202egnp", "long": "a" * 201},
    **{"hidden": ".ssh", "blank": " a", "half": "\ud800", "number": 1, "list": ["a"], "object": {}, "null": None},
}
PLANS = {
    **{f"label {name}": ("label", value) for name, value in LABELS.items()},
    "source": ("data.source", "a\ntouch canary"),
    "source as an option": ("data.source", "--config=x"),
    "tokenizer": ("data.tokenizer", "-x"),
    "folder": ("data.folder", "x\0"),
    "long path": ("data.folder", "x" * 5000),
    "blend": ("data.blend", [{"source": "$(touch canary)\n", "weight": 1}, {"source": "b", "weight": 1}]),
    "load": ("run.load", "--x"),
    "engine": ("engine", "$(touch canary)"),
    "precision": ("topology.precision", ["fp32"]),
    "hidden 2^40": ("shape.hidden_size", 1 << 40),
    "layers 2^62": ("shape.num_layers", 1 << 62),
    "sequence": ("shape.seq_length", 1 << 30),
    "vocabulary 2^70": ("shape.vocab_size", 1 << 70),
    "batch": ("topology.gbs", 1 << 40),
    "replicas 0": ("topology.dp", 0),
    "replicas true": ("topology.dp", True),
    "heads as text": ("shape.num_attention_heads", "4"),
    "a shape that is a list": ("shape", []),
    "a shape that is a text": ("shape", "$(touch canary)"),
    "a topology that is null": ("topology", None),
    "endless ramp": ("run.ramp", {"start": 1, "increment": 1, "samples": 1 << 80}),
    "rate": ("optimizer.lr", -1e-3),
    "rate of 400 digits": ("optimizer.lr", 10**400),
    "cluster": ("cluster", "h200; touch canary"),
    "cluster's name": ("cluster.name", "a\x1b[2Jb"),
    "card's name": ("cluster.gpu.name", "V100\ntouch canary"),
    "no node": ("cluster.gpus_per_node", 0),
    "sources": ("cluster.sources", [1]),
    "unknown": ("$(touch canary)", 1),
}


@pytest.mark.parametrize(("path", "value"), PLANS.values(), ids=PLANS)
def test_a_plan_that_cannot_be_is_refused_by_name(
    here: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any
) -> None:
    write("bad.json", changed(small_plan().to_json(), path, value))
    for line in ("plan show", "slurm script --site generic", "train", "convert megatron"):
        group, *rest = line.split()
        refused(capsys, group, *rest[:1], *(["bad.json"] if rest else []), *rest[1:], *([] if rest else ["bad.json"]))


OTHERS = {
    "local folder": ("slurm script plan.json --site X", site_with("local", "/tmp\ntouch canary")),
    "local as a text": ("slurm script plan.json --site X", {"name": "mine", "local": "/tmp"}),
    "site's name": ("slurm script plan.json --site X", {"name": "\x1b]0;owned\x07"}),
    "site's nodes": ("slurm script plan.json --site X", {"name": "mine", "cluster": "/dev/zero.json"}),
    "site's hours": ("slurm script plan.json --site X", {"name": "m", "qos": [{"name": "q", "hours": "1", "gpus": 1}]}),
    "site's modules": ("slurm script plan.json --site X", {"name": "mine", "modules": "cuda; touch canary"}),
    "site offline": ("slurm script plan.json --site X", {"name": "mine", "offline": "no"}),
    "site's default QoS": ("slurm script plan.json --site X", {"name": "mine", "default_qos": "x\ny"}),
    "bandwidth": ("plan search --shape 6,64,4,32,384 --gpus 8 --gbs 8 --cluster X", {"network_bytes_per_s": 0}),
    "latency": ("plan search --shape 6,64,4,32,384 --gpus 8 --gbs 8 --cluster X", {"latency_s": -1}),
    "a crawling network": (
        "plan search --shape 6,64,4,32,384 --gpus 8 --gbs 8 --cluster X",
        {"network_bytes_per_s": 1e-300},
    ),
    "memory": ("plan search --shape 6,64,4,32,384 --gpus 8 --gbs 8 --cluster X", {"host_memory_bytes": 10**400}),
    "nodes": ("plan search --shape 6,64,4,32,384 --gpus 8 --gbs 8 --cluster X", {"max_nodes": 1 << 70}),
    "capacity's day": ("plan calendar plan.json --tokens 1e9 --capacity X", [{"from": "\x1b[2J", "gpus": 8}]),
    "capacity's GPUs": ("plan calendar plan.json --tokens 1e9 --capacity X", [{"from": "2026-01-01", "gpus": "8"}]),
    "no capacity": ("plan calendar plan.json --tokens 1e9 --capacity X", {"steps": []}),
    "risk": ("plan calendar plan.json --tokens 1e9 --risks X", {"spare_nodes": -1}),
    "endless slowdown": ("plan calendar plan.json --tokens 1e9 --risks X", {"slowdown": 1e25}),
    "unknown risk": ("plan calendar plan.json --tokens 1e9 --risks X", {"a\nb": 1}),
    "calibration": ("plan show plan.json --calibration X", {"matmul": 1e300}),
    "regimes": ("plan show plan.json --calibration X", {"regimes": "all"}),
    "prediction": ("slurm sweep create X new --site generic", [{**small_plan().to_json(), "prediction": [1]}]),
    "bytes": (
        "slurm sweep create X new --site generic",
        [{**small_plan().to_json(), "prediction": {"memory_bytes": "1; touch canary"}}],
    ),
    "two of one label": ("slurm sweep create X new --site generic", [small_plan().to_json()] * 2),
    "plans that are numbers": ("slurm sweep create X new --site generic", {"plans": [1, 2]}),
    "DeepSpeed's batch": ("convert deepspeed X --plan plan.json", {"train_batch_size": 8}),
    "a plan among plans": ("plan show X:$(id)", {"plans": [small_plan().to_json()]}),
}


@pytest.mark.parametrize(("line", "values"), OTHERS.values(), ids=OTHERS)
def test_a_field_that_cannot_be_is_refused_by_name(
    here: Path, capsys: pytest.CaptureFixture[str], line: str, values: Any
) -> None:
    base = to_mapping(cluster("h200")) if "--cluster X" in line else {}
    write("X.json", {**base, **values} if isinstance(values, dict) else values)
    refused(capsys, *shlex.split(line.replace("X", "X.json")))


INDEXES = {
    "no site": {"links": ["a"], "members": [{"folder": "a", "memory_bytes": 1}]},
    "a way out": {"site": "local", "links": ["../a"], "members": [{"folder": "a\0b", "memory_bytes": 1}]},
    "a number": {"site": "local", "links": [1], "members": [{"folder": 1, "memory_bytes": 1}]},
    "an option": {"site": "local", "links": ["-a"], "members": [{"folder": "-a", "memory_bytes": 1}]},
    "objects": {"site": "local", "links": [{}], "members": [{"folder": "a", "memory_bytes": {}}]},
    "no list": {"site": "local", "links": {}, "members": {}},
}


@pytest.mark.parametrize("values", INDEXES.values(), ids=INDEXES)
def test_the_index_of_a_sweep_or_chain_names_folders(
    here: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    write("a/plan.json", small_plan().to_json())  # what a way out would find
    for kind, name in (("sweep", "members"), ("chain", "links")):
        write(f"{kind}/{kind}.json", {key: value for key, value in values.items() if key in ("site", name)})
        for command in ("status", "submit --site generic"):
            verb, *options = command.split()
            refused(capsys, "slurm", kind, verb, kind, *options)


# Words on the command line, each as one argument.
LINES = {
    "account": ("slurm", "script", "plan.json", "--site", "generic", "--account", "x\n#SBATCH --wrap=id"),
    "constraint": ("slurm", "script", "plan.json", "--site", "generic", "--constraint", "$(touch canary)"),
    "partition": ("slurm", "check", "plan.json", "--site", "generic", "--partition=--wrap=x"),
    "mail": ("slurm", "script", "plan.json", "--site", "generic", "--mail", "a@b;touch canary"),
    "exclude": ("slurm", "script", "plan.json", "--site", "generic", "--exclude", "gpu1 --wrap=x"),
    "reservation": ("slurm", "script", "plan.json", "--site", "generic", "--reservation", "r\x1b[2J"),
    "conda": ("slurm", "script", "plan.json", "--site", "generic", "--environment", "conda:a;touch canary"),
    "environment": ("slurm", "script", "plan.json", "--site", "generic", "--environment", "a\ntouch canary"),
    "time": ("slurm", "script", "plan.json", "--site", "generic", "--time-limit", "1:00:00\n#SBATCH --wrap=x"),
    "Arabic digits": ("slurm", "script", "plan.json", "--site", "generic", "--time-limit", "٠١:٠٠:٠٠"),
    "endless time": ("slurm", "script", "plan.json", "--site", "generic", "--time-limit", "9" * 5000 + ":00:00"),
    "signal": ("slurm", "script", "plan.json", "--site", "generic", "--signal-s", "1e400"),
    "site": ("slurm", "script", "plan.json", "--site", "generic\x1b[2J"),
    "site's path": ("slurm", "script", "plan.json", "--site", "/dev/zero.json"),
    "template": ("slurm", "script", "plan.json", "--site", "generic", "--template", "../parts/directives"),
    "rule": ("slurm", "check", "plan.json", "--site", "generic", "--allow", "\x1b]0;x\x07"),
    "job": ("slurm", "attach", "1;touch canary", "memory"),
    "stages": ("slurm", "chain", "create", "plan.json", "new", "--site", "generic", "--stages", "9" * 5000 + ":1:1"),
    "stages of two": ("slurm", "chain", "create", "plan.json", "new", "--site", "generic", "--stages", "²:1:1"),
    "shape": ("plan", "show", "--cluster", "h200", "--gbs", "8", "--shape", "9" * 5000 + ",1,1,1,1"),
    "superscripts": ("plan", "show", "--cluster", "h200", "--gbs", "8", "--shape", "¹,1,1,1,1"),
    "gbs": ("plan", "show", "--shape", "6,64,4,32,384", "--cluster", "h200", "--gbs", "9" * 5000),
    "tokens": ("plan", "calendar", "plan.json", "--tokens", "9" * 5000 + "T"),
    "day": ("plan", "calendar", "plan.json", "--tokens", "1e9", "--deadline", "2026-01-01\x1b[2J"),
    "ramp": ("plan", "calendar", "plan.json", "--tokens", "1e9", "--ramp", "1,1," + "9" * 5000),
    "cluster": ("plan", "show", "--shape", "6,64,4,32,384", "--gbs", "8", "--cluster", "../../etc/passwd"),
    "command": ("slurm", "sub\x1b[2Jmit"),
    "option": ("plan", "show", "--\x1b[2J\u202e"),
    "study": ("slurm", "status", "../../\x1b[2J"),
}


@pytest.mark.parametrize("words", LINES.values(), ids=LINES)
def test_a_word_of_the_command_line_is_refused_in_one_clean_line(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    refused(capsys, *words)


HEAD = "| GPUs | TP | PP | DP | MBS | GBS | sec/it | Notes |\n|---|---|---|---|---|---|---|---|\n"
ROW = "| 8 | 1 | 1 | 8 | 1 | 8 | 1.5 | {} |\n"
TABLES = {
    "100,000 brackets": ("logs lint X.md", "[" * 100_000),
    "100,000 parentheses": ("logs lint X.md", "(" * 100_000),
    "100,000 bars": ("logs lint X.md", "|" * 100_000 + "\n|---|---|\n"),
    "brackets in a header": ("logs lint X.md", "|" + "[" * 100_000 + "|a|\n|---|---|\n|1|2|\n"),
    "no table": ("logs lint X.md", "nothing\n" * 1000),
    "a long cell": ("logs lint X.csv", "gpus,tp,sec_per_it\n8,1," + "1" * 200_000 + "\n"),
    "a long row id": ("plan backtest X.csv", "row_id\n" + "x" * 200_000 + "\n"),
    "NUL": ("plan backtest X.csv", "row_id,layers\n\0,1\n"),
    "other columns": ("plan backtest X.csv", "a;b\n1;2\n"),
    "a formula as the header": ("plan backtest X.csv", "=HYPERLINK(1)\n1\n"),
    "a column twice": ("plan backtest X.csv", "row_id,row_id\n1,2\n"),
    "a cut quote": ("plan backtest X.csv", '"row_id\n1'),
    "a variable bomb": ("convert megatron --read X.sh --cluster h200", "a=$a$a$a$a$a$a$a$a\n$a$a$a$a\n"),
    "an open quote": ("convert megatron --read X.sh --cluster h200", "torchrun 'x"),
    "a long script": ("convert megatron --read X.sh --cluster h200", "x" * 1_000_000),
    "endless here-documents": ("convert megatron --read X.sh --cluster h200", "<<EOF\n" * 5000),
    "a product of 9000 factors": ("convert megatron --read X.sh --cluster h200", "--gbs $((" + "9*" * 9000 + "9))"),
}


@pytest.mark.parametrize(("line", "text"), TABLES.values(), ids=TABLES)
def test_a_table_or_script_that_cannot_be_read_is_refused_soon(
    here: Path, capsys: pytest.CaptureFixture[str], line: str, text: str
) -> None:
    name = next(word for word in line.split() if word.startswith("X."))
    write(name, text)
    refused(capsys, *line.split())


@pytest.mark.parametrize(
    "note", ["=HYPERLINK(1)", "$(touch canary)", "<script>", "\x1b]0;owned\x07", "a\u202eb", "[" * 9999]
)
def test_a_note_in_a_table_is_text(here: Path, capsys: pytest.CaptureFixture[str], note: str) -> None:
    """What the linter prints is clean, and nothing is run."""
    write("X.md", HEAD + ROW.format(note) + ROW.format(note).replace("| 8 | 1 | 1 |", "| 9 | 1 | 1 |"))
    before = files()
    assert main(["logs", "lint", "X.md"]) in (0, 1)
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).splitlines()) and before == files()


def test_a_plan_written_with_a_byte_order_mark_is_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Editors on Windows write one."""
    write("bom.json", b"\xef\xbb\xbf" + Path("plan.json").read_bytes())
    assert main(["plan", "show", "bom.json"]) == 0
