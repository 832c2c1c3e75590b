"""What users see stays as it was recorded: commands' JSON and text and notebooks, without words.

Logs of other people are not ours to keep: TRILANE_PUBLIC_LOGS names a folder of them, of which
numbers are recorded.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from recorded import compare, numbers_in, plain
from support import REPOSITORY

from trilane.cli.app import main
from trilane.report import notebook
from trilane.report.plots.style import MIME

PUBLIC = Path(os.environ.get("TRILANE_PUBLIC_LOGS", "/nonexistent"))
BLOOM = "--shape 70,14336,112,2048,250880 --cluster jz-a100-80g --gpus 384 --gbs 2048"
SHOWN = BLOOM.replace("--gpus 384 ", "")
PLAN, LLAMA = "docs/plan-176b.json", "docs/plan-7b.json"
JEAN_ZAY = "--site jean-zay-a100 --account xyz@a100"
CALENDAR = f"plan calendar {PLAN} --tokens 341e9 --start 2027-01-04"
SITES = sorted(path.stem for path in (REPOSITORY / "lib/trilane/data/sites").iterdir())

# A file in tests/answers, and the commands whose answers it holds.
CASES = {
    "search": [
        f"plan search {BLOOM} --recompute full",
        f"plan search {BLOOM} --top 3",
        "plan search --shape 24,2048,16,2048,50304 --cluster jz-v100-32g --gpus 32 --gbs 512",
        "plan search --shape 36,7680,60,2048,50304 --cluster dgx-a100-80g --gpus 128 --gbs 1024 --top 3",
        "plan search --shape 32,4096,32,4096,32000 --cluster dgx-h100 --gpus 64 --gbs 64 --top 3 --precision fp8",
        "plan search --shape 24,2048,16,2048,50304 --cluster jz-v100-16g --gpus 8 --gbs 64 --engine hf-zero3 --top 3",
        f"plan search --shape {LLAMA} --cluster jz-a100-80g --gpus 64 --gbs 1024 --zero 1 --top 3",
    ],
    "show": [
        f"plan show {PLAN}",
        f"plan show {LLAMA}",
        f"plan show {SHOWN} --engine megatron --tp 8 --pp 12 --dp 4 --mbs 2 --recompute selective"
        " --sequence-parallel yes --partition type:transformer|embedding",
        "plan show --shape 32,4096,32,4096,32000 --cluster perlmutter-a100-80g --gbs 256 --dp 64 --mbs 1 --cp 1",
        "plan show --shape 24,2048,16,2048,50304 --cluster jz-v100-32g --gbs 512 --dp 8 --mbs 4 --engine deepspeed-zero"
        " --zero 2 --offload optimizer --calibration fsdp",
    ],
    "size": [
        "plan size --params 200e9 --vocab 250880 --gpus 384 --cluster jz-a100-80g --top 5",
        "plan size --params 1.3B --vocab 50257 --gpus 8 --gbs 64 --cluster jz-v100-32g --like llama --tokens 26e9",
        "plan best --days 2 --cluster jz-v100-32g,jz-a100-80g --gpus 8 --gbs 512 --price 1,2 --engine megatron",
    ],
    "calendar": [
        f"{CALENDAR} --ramp 192,16,9765625 --deadline 2027-05-31",
        f"{CALENDAR} --ramp 192,16,9765625 --spare-nodes 0 --price 2.5",
        f"{CALENDAR} --allocation 1500000 --failures-per-node-year 5 --job-hours 10 --runs 2000",
    ],
    "backtest": ["plan backtest all"],  # its summary has each source on its own
    "backtest-without": ["plan backtest scored --cv table", "plan backtest measured --cv hidden"],
    "convert": [f"convert deepspeed {PLAN}", f"convert megatron {LLAMA}"],
    "check": [
        f"slurm check {PLAN} {JEAN_ZAY}",
        f"slurm check {PLAN} --site jean-zay-v100-32g --account xyz@v100",
    ],
    "scripts": [
        *(f"slurm script {PLAN} --site {site} --account xyz" for site in SITES if site != "local"),
        *(f"slurm script {PLAN} {JEAN_ZAY} --template {name}" for name in ("bench", "prepare")),
    ],
    "logs": [
        "logs parse docs/examples/logs/a.log docs/examples/logs/b.log",
        "logs parse docs/examples/restart/part1.log docs/examples/restart/part2.log",
        "logs table docs/examples/logs",
        "logs spikes docs/examples/logs/a.log docs/examples/logs/b.log",
        "logs spikes docs/examples/restart/part1.log docs/examples/restart/part2.log",
    ],
    "hangs": ["debug hang docs/examples/dumps --tp 2 --pp 2 --dp 2"],
}
LOGS = sorted(PUBLIC.glob("*.out"))


def answers(commands: list[str], capsys) -> Iterator[tuple[str, Any]]:
    """Each command with its exit code and the JSON that it prints."""
    first: list[str] = []
    for command in commands:
        code = main([*command.split(), "--json"])
        out, err = capsys.readouterr()
        assert out, f"{command}: {err}"
        values = json.loads(out)
        if command.startswith("plan calendar"):
            del values["prediction"]  # that of `plan show`, as test_one_answer holds
        if "script" not in values:
            yield command, {"code": code, "answer": plain(values)}
            continue
        text = values["script"].replace(str(REPOSITORY), "REPOSITORY")
        lines = text.replace(sys.prefix, "REPOSITORY/.venv").splitlines()
        if not first:
            first = lines
            yield command, lines
        else:  # in what the script differs from that of the first site
            yield command, [*unified_diff(first, lines, n=0, lineterm="")][2:]


def numbers(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the runs in somebody else's log, what is no text of theirs."""
    kept = ("status", "dialect")
    return [
        {name: value for name, value in run.items() if name in kept or is_number(value)}
        for run in runs
        if isinstance(run, dict)  # the last may be how many there are in all
    ]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (
        isinstance(value, list) and all(map(is_number, value))
    )


@pytest.mark.slow
@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("name", CASES)
def test_the_answers_are_those_that_were_recorded(name, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    compare(name, dict(answers(CASES[name], capsys)))


@pytest.mark.skipif(not LOGS, reason="TRILANE_PUBLIC_LOGS names no folder of logs")
@pytest.mark.usefixtures("outputs")
def test_the_numbers_of_public_logs_are_those_that_were_recorded(
    capsys,
):
    found = {
        path.name: numbers(one["answer"]["runs"])
        for path in LOGS
        for _, one in answers([f"logs parse {path}"], capsys)
    }
    compare("public-logs", found)


def shown(executed: Path) -> Iterator[Any]:
    """What each output of a notebook shows: the numbers of its text; of a figure how many of a
    field, and their sum.
    """
    cells = notebook.read_notebook(executed).cells
    for data in (
        o["data"] for c in cells if c.cell_type == "code" for o in c.outputs if "data" in o
    ):
        fields = dict[str, list[float]]()
        gather(data.get(MIME, {}), fields)
        text = re.sub(
            "<[^>]*>", " ", data.get("text/html") or data.get("text/markdown") or data["text/plain"]
        )
        yield fields and {
            name: f"{len(some)}: {math.fsum(some):.5g}" for name, some in fields.items()
        }
        yield numbers_in(text)


def gather(value: Any, into: dict[str, list[float]], name: str = "", is_data: bool = False) -> None:
    """Every number in the data of a figure, by the name of its field."""
    for key, one in value.items() if isinstance(value, dict) else ((name, one) for one in value):
        if isinstance(one, dict | list):
            gather(one, into, key, is_data or key in ("values", "datasets"))
        elif is_data and isinstance(one, int | float):
            into.setdefault(key, []).append(one)


@pytest.mark.slow
@pytest.mark.xdist_group("demo")
def test_the_notebooks_show_the_numbers_that_were_recorded(big: Path):
    found = {}
    for path in sorted(big.glob("*.ipynb")):
        found[path.stem] = [*filter(None, shown(path))]
    compare("notebooks", found)
