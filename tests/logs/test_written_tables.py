"""Tables of measured runs: rows of Markdown and CSV."""

import pytest
from test_log_dialects import m2022

from trilane.logs.written_tables import number, read_runs

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
    first, oom = runs(tmp_path, TABLE + "```\n" + m2022(2) + "```\n")
    row = first.iterations.iloc[0]
    assert (first.dialect, first.status, row.sec_per_it) == ("table", "completed", 121.48)
    assert row.flops_per_s_per_gpu == pytest.approx(132.71e12)
    expected = {"nodes": 48, "size": 181, "tp": 8, "gbs": 2048, "line": 5}
    assert {name: first.arguments[name] for name in expected} == expected
    assert "121.48" in first.evidence and first.memory["max_reserved"] == 56 * 2**30
    assert (oom.status, len(oom.iterations)) == ("OOM", 0)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("mem", "47GB", 47),
        ("time", "0.661 s", 0.661),
        ("time", "850 ms", 0.85),
        ("size", "350M", 0.35),
        ("seq", "4k", 4096),
        ("time", "4 it/s", None),
        ("gbs", "1,024", None),
        ("mem", "OOM", None),
    ],
)
def test_a_cell_is_a_number_in_the_unit_of_its_column_or_none(name, text, value):
    assert number(name, text) == pytest.approx(
        float("nan") if value is None else value, nan_ok=True
    )


def test_a_table_without_rows_and_a_cell_without_an_end_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^log="):
        runs(tmp_path, "|" + "[" * 100_000 + "|a|\n|---|---|\n|1|2|\n")
    with pytest.raises(ValueError, match=r"^table=.*: is no CSV"):
        runs(tmp_path, "gpus,tp,sec_per_it\n8,1," + "1" * 200_000 + "\n", "a.csv")


def test_a_throughput_in_seconds_is_a_time_and_a_rate_is_none(tmp_path):
    """BigScience's tables of 2021 name the seconds of an iteration so."""
    table = "| GPUs | DP | Throughput | TFLOPs |\n|--|--|--|--|\n| 16 | 1 | {} | 26 |\n"
    (timed,) = runs(tmp_path, table.format("90.5s"))
    (rated,) = runs(tmp_path, table.format("26 samples/s"))
    assert timed.iterations["sec_per_it"][0] == 90.5
    assert rated.iterations["sec_per_it"].isna().all()
