"""Tables of measured runs: Markdown and CSV rows, and contradictions in a row."""

import csv
import time

import pytest
from support import REPOSITORY
from test_log_dialects import m2022

from trilane.logs.written_tables import number, read_runs

SHARED = REPOSITORY.parent / "shared"
SEEDS = sorted((SHARED / "seeds").glob("*.txt"))
TABLE = """# Runs

| Nodes | Size | DP | TP | PP | MBS |  GBS | Mem  | Sec/it | TFLOPs | Notes |
| ----: | ---: | -: | -: | -: | --: |  --: | ---: | -----: | -----: | ----: |
|    48 | 181B |  8 |  8 |  6 |   4 | 2048 | 56GB | 121.48 | 132.71 | 02-21 |
|    48 | 181B | 48 |  8 |  1 |   1 | 2016 | OOM  |        |        | 02-25 |
|    48 | 181B |  4 |  8 | 12 |   1 | 2048 | 30GB |  xxxx  |   xxxx | hangs |
|       |      |    |    |    |     |      |      |        |        |       |

"""


def runs(folder, text, name="a.md"):
    (folder / name).write_text(text)
    return read_runs(folder / name)


def test_each_measured_row_is_a_run(tmp_path):
    first, oom, hang = runs(tmp_path, TABLE + "```\n" + m2022(2) + "```\n")
    row = first.iterations.iloc[0]
    assert (first.dialect, first.status, row.sec_per_it) == ("table", "completed", 121.48)
    assert row.flops_per_s_per_gpu == pytest.approx(132.71e12) and first.problems == ()
    expected = {"nodes": 48, "size": 181, "tp": 8, "gbs": 2048, "line": 5}
    assert {name: first.arguments[name] for name in expected} == expected
    assert "121.48" in first.evidence and first.memory["max_reserved"].max() == 56 * 2**30
    assert (oom.status, hang.status, len(oom.iterations)) == ("OOM", "hang", 0)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(
            ("mem", "47GB", 47),
            ("time", "0.661s", 0.661),
            ("size", "**181B**", 181),
            ("gbs", "1_024", 1024),
        ),
        *(
            ("gbs", "1,024", 1024),
            ("mem", "`56 GiB`", 56),
            ("mem", "~30", 30),
            ("time", "4 it/s", 0.25),
        ),
        *(
            ("seq", "1e3", 1000),
            ("time", "62,5", 62.5),
            ("time", "0,125", 0.125),
            ("time", "1234,567 s", 1234.567),
        ),
        *(
            ("time", "1,234.5", 1234.5),
            ("time", "1.024", 1.024),
            ("time", "850 ms", 0.85),
            ("seq", "4k", 4096),
        ),
        *(
            ("size", "350M", 0.35),
            ("zero", "0", 0),
        ),
    ],
)
def test_a_cell_is_a_number_in_the_unit_of_its_column(name, text, value):
    assert number(name, text) == pytest.approx(value)


def test_a_contradiction_is_a_problem_of_its_run(tmp_path):
    text = "gpus,tp,pp,dp,mbs,gbs,seq,sec_per_it,size\n"
    text += "32,4,4,2,1,8,2048,1.5,1.3\n16,4,4,2,1,8,2048,1.5,1.3\n"
    right, wrong = runs(tmp_path, text, "a.csv")
    assert right.problems == () and [(p.rule, p.column, p.line) for p in wrong.problems] == [
        ("row", "gpus", 3)
    ]


def test_a_long_line_takes_no_long_time(tmp_path):
    began = time.process_time()
    for text in (
        "[" * 100_000,
        "|" * 100_000 + "\n|---|---|\n",
        "|" + "[" * 100_000 + "|a|\n|---|---|\n|1|2|\n",
    ):
        with pytest.raises(ValueError, match=r"^log="):
            runs(tmp_path, text)
    with pytest.raises(ValueError, match=r"^table=line 2: is no CSV"):
        runs(tmp_path, "gpus,tp,sec_per_it\n8,1," + "1" * 200_000 + "\n", "a.csv")
    assert time.process_time() - began < 5


def measured():
    path = SHARED / "measured/seeds_measured.csv"
    return (
        [row for row in csv.DictReader(path.open()) if row["kind"] == "table"]
        if path.is_file()
        else []
    )


@pytest.mark.skipif(
    not SEEDS or not measured(), reason="the seed documents are not beside this checkout"
)
def test_the_seed_documents_are_their_204_timed_rows():
    """Against the rows as others wrote them down: the same lines, and equal in every number that we
    claim to read.
    """
    words = {"size": "model_size_b", "chunks": "pp_chunks"}
    names = (
        "gpus",
        "nodes",
        "size",
        "dp",
        "tp",
        "pp",
        "chunks",
        "mbs",
        "gbs",
        "layers",
        "hidden",
        "heads",
        "seq",
    )
    found = {(p.name, run.arguments["line"]): run for p in SEEDS for run in read_runs(p)}
    truth = {(row["source_file"], int(row["line_no"])): row for row in measured()}
    timed = {
        place
        for place, run in found.items()
        if run.iterations.get("sec_per_it", run.iterations).notna().any(axis=None)
    }
    # the time of six rows stands in log lines below their tables
    elsewhere = {("003_ea44700ea3ef12b5.txt", line) for line in (389, 390, 391, 427, 428, 429)}
    assert (
        timed | elsewhere == {place for place, row in truth.items() if row["sec_per_it"]}
        and len(timed) == 204
    )
    for place, run in found.items():
        row = truth[place]
        arguments = {n: float(v) for n in names if (v := run.arguments.get(n)) is not None}
        assert arguments == {name: float(row[words.get(name, name)]) for name in arguments}, place
        if place in timed:
            assert run.iterations["sec_per_it"].iloc[0] == float(row["sec_per_it"]), place
        if row["mem_gb"] and len(run.memory):  # that among notes is not read
            assert run.memory["max_reserved"].iloc[0] / 2**30 == float(row["mem_gb"]), place
        assert (run.status == "OOM") == (row["oom"] == "1") and (run.status == "hang") == (
            row["hang"] == "1"
        ), place
    wrong = {(*place, p.column) for place, run in found.items() for p in run.problems}
    assert wrong == {("001_7d4a0e1a2fecc60d.txt", 52, "gbs")}, (
        "4 microbatches x MBS 1 x DP 4 are 16, and not 4"
    )
