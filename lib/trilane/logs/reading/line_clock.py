"""LineClock: where the lines of a run's iterations stand in the file, and how their time stamps give its seconds."""

import re

import numpy as np

from trilane.logs.dialects.trainers import timestamp
from trilane.logs.table import NAN

MAX_STAMPS = 200  # time stamps of lines that are noted
TIME_OF_DAY = re.compile(rb"^\W{0,3}(\d\d):(\d\d):(\d\d(?:\.\d{1,6})?)(?![\d:])")
DAY_S = 86400.0
DATES_S = 1e8  # seconds since 1970 are more, those since the start of a run are fewer


def line_time(line: bytes) -> float:
    """Seconds since 1970 by the line's time stamp, or since midnight where the line begins with a time of day."""
    if (stamp := timestamp(line)) == stamp or not (found := TIME_OF_DAY.match(line)):
        return stamp
    hours, minutes, seconds = map(float, found.groups())
    return 3600 * hours + 60 * minutes + seconds


def past_midnight(times: np.ndarray) -> np.ndarray:
    """Times of day, (lines,), as seconds since the first midnight; others as they are."""
    if not len(times) or times.max() > DAY_S:
        return times
    return times + DAY_S * np.cumsum(np.diff(times, prepend=times[0]) < -DAY_S / 2)


class LineClock:
    """The numbers of the first and last line of iterations (0: unknown), time stamps of some lines between as
    `stamps` (iteration, seconds since 1970), and the dialects whose seconds are differences of time stamps."""

    def __init__(self) -> None:
        self.first_number = self.last_number = 0
        self.stamps: list[tuple[float, float]] = []
        self._next_stamp = 0  # rows from which the next line's time is noted
        self._last: dict[str, tuple[float, float]] = {}  # by dialect, the last iteration and its time stamp
        self.timed_by_stamps: set[str] = set()

    def saw(self, iteration: float, line: bytes, number: int, row: int) -> None:
        """Note the line of the iteration that is that `row` of the run, counted from 1, and its number in the file."""
        self.first_number, self.last_number = self.first_number or number, number
        if row >= self._next_stamp:
            self.stamps.append((iteration, line_time(line)))
            if len(self.stamps) > MAX_STAMPS:
                del self.stamps[1::2]
            self._next_stamp = row + max(1, row // MAX_STAMPS)

    def forget_lines(self) -> None:
        """Forget the lines noted so far."""
        self.first_number = self.last_number = self._next_stamp = 0
        self.stamps.clear()

    def timed(self, row: dict[str, float], time_s: float, dialect: str) -> dict[str, float]:
        """The row, with seconds per iteration since the last of that dialect, unless it has its own; `time_s` is NaN
        where the line has no time stamp."""
        last, before = self._last.get(dialect, (row["iteration"], NAN))
        if (time_s > DATES_S) != (
            before > DATES_S
        ) and before == before:  # a date after times that passed since a start
            time_s = NAN
        steps, seconds = row["iteration"] - last, time_s - before
        if (steps > 0 and seconds != 0) or dialect not in self._last:  # several steps may share a whole second
            self._last[dialect] = (row["iteration"], time_s)
        if "sec_per_it" in row or not (steps > 0 and seconds > 0):
            return row
        self.timed_by_stamps.add(dialect)
        return row | {"sec_per_it": seconds / steps}

    def timed_rows(self, values: dict[str, np.ndarray], time_s: np.ndarray, dialect: str) -> np.ndarray:
        """The seconds per iteration of rows, as `timed` gives them; they and their rate leave `values`."""
        number = values["iteration"]
        given, rate = (values.pop(n, np.full(len(number), NAN)) for n in ("sec_per_it", "iterations_per_second"))
        given = np.where((given != given) & (rate > 0), 1 / np.where(rate > 0, rate, 1), given)
        last, before = self._last.get(dialect, (number[0], NAN))
        at, when = np.concatenate([[last], number]), np.concatenate([[before], time_s])
        kept = np.flatnonzero(np.concatenate([[True], when[1:] != when[:-1]]))
        steps, seconds = np.diff(at[kept]), np.diff(when[kept])
        measured = np.full(len(at), NAN)
        measured[kept[1:]] = np.where((steps > 0) & (seconds > 0), seconds / np.maximum(steps, 1), NAN)
        self._last[dialect] = (at[kept[-1]], when[kept[-1]])
        out = np.where(given == given, given, measured[1:])
        if ((given != given) & (out == out)).any():
            self.timed_by_stamps.add(dialect)
        return out
