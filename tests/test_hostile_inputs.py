"""A colleague's plans, sites, clusters, tables and command lines, damaged or meant to harm: a result or one line."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import small_plan

from trilane.cli.app import main
from trilane.slurm import script, sites

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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a good plan, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRILANE_OUTPUTS", str(tmp_path / "outputs"))
    write("plan.json", small_plan().to_json())
    return tmp_path


def write(name: str, values: Any) -> str:
    """Write a file of JSON, or of text or bytes as they are; its name."""
    data = values if isinstance(values, str | bytes) else json.dumps(values)
    Path(name).write_bytes(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data)
    return name


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that refuses its input; it leaves no file behind."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 2 and not out, (code, out[:500], err[:500])
    assert err.startswith("trilane: ") and err.endswith("\n") and err[:-1].isprintable() and len(err) < 1500, err[:2000]
    assert before == {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    return err


def site_with(field: str, value: str) -> dict[str, Any]:
    """A site's JSON with that value in a field."""
    if field == "qos":
        return {"name": "mine", "qos": [{"name": value, "hours": 1, "gpus": 8}]}
    return {"name": "mine", field: [value] if field in ("partitions", "modules", "local") else value}


@pytest.mark.parametrize("value", WORDS.values(), ids=WORDS)
def test_no_word_of_a_site_is_read_twice(here: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    """Whatever field of the JSON holds it: the site is refused, with the field's name."""
    for field in (*SITE_WORDS, *(["account_ending"] if not value.startswith("--") else [])):
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
