"""Whether a log without an end still runs: by the lines' clock, where they have one."""

import gzip
import os
import time

import pytest
from test_endings import FIVE

from trilane.analysis.measure import measure_log
from trilane.logs.run import read_log

HOUR = 3600.0
LINE = " [{stamp}] iteration {i:8d}/     100 | elapsed time per iteration (ms): {ms:.1f} | lm loss: {loss:.6E} | number of nan iterations:   0 |\n"


def stamp(age_s, form="%Y-%m-%d %H:%M:%S"):
    """The local time `age_s` ago."""
    return time.strftime(form, time.localtime(time.time() - age_s))


def lines(age_s, ms=2000.0, step=1):
    """Five lines, the last of them `age_s` old by its time stamp."""
    return "".join(
        LINE.format(stamp=stamp(age_s + (4 - n) * step * ms / 1e3), i=(n + 1) * step, ms=ms, loss=5 - n / 10)
        for n in range(5)
    )


def cases():
    """Text, seconds since the file was written, whether it runs: by the clock of now."""
    return {
        "a line a moment ago": (lines(5), 0, True),
        "a line two minutes ago": (lines(120), 0, True),
        "long iterations": (lines(120, ms=90e3), 0, True),
        "a line for every hundred iterations": (lines(150, step=100), 0, True),
        "a log of 2023, copied": (lines(3 * 365 * 24 * HOUR), 0, False),
        "another zone, nine hours ahead": (lines(-9 * HOUR + 3), 0, True),
        "another zone, its file not written to": (lines(-9 * HOUR), 300, False),
        "a log of yesterday, copied": (lines(25 * HOUR), 0, False),
        "no stamps, just written": (FIVE, 0, True),
        "no stamps, not written to": (FIVE, 300, False),
    }  # fmt: skip


def write(path, text, age):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    os.utime(path, (time.time() - age,) * 2)
    return read_log(path)


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", cases())
def test_a_log_runs_by_its_own_clock_before_the_files_date(tmp_path, name, packed):
    text, age, runs = cases()[name]
    log = write(tmp_path / f"a.log{packed}", text, age)
    assert log.status == ("running" if runs else "unfinished"), log.status_basis
    assert bool(log.status_basis) == runs


def test_what_the_status_rests_on_is_in_the_record(tmp_path):
    record = measure_log(write(tmp_path / "a.log", lines(5), 0)).to_json()
    assert record["status"] == "running" and record["status_basis"] == "by the file's date"
