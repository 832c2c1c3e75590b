"""What the loop itself decides: when it saves and evaluates, what it reports, and how the run
ended.
"""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from plans import changed, small_plan
from support import Later

from trilane.workspace.checkpoints import name_of
from trilane.workspace.heartbeat import remove_records
from trilane.workspace.status import read_status
from trilane.workspace.storage import trouble

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported
loop, save, base = (
    Later(f"trilane_engine.{name}") for name in ("loop", "checkpoint.save", "backends.base")
)


class Around:
    """Requests, saver, samples, engine and log of a run, which note what the loop does with them."""

    begun = writing = False

    def __init__(self, asked: dict[int, int], writes: int, fails: int) -> None:
        self.done, self.lines, self.number, self.close = (
            list[str](),
            list[dict[str, Any]](),
            0,
            lambda: None,
        )
        self.seconds = 3.0  # of the clock: an iteration takes 2, and what is counted in none 100
        self.asked, self.writes, self.fails, self.keep_last = (
            asked,
            writes,
            fails,
            lambda: self.done.append("keep"),
        )
        self.microbatches, self.read_ahead = lambda batch: batch, lambda batch: None
        self.validation, self.evaluate = lambda: iter((1.0, 2.0, 6.0)), float
        self.evaluated = lambda batch, loss, seconds: self.done.append(
            f"loss {loss} of {batch.number}"
        )

    def now(self, begun: bool = True, writing: bool = False, due: bool = True) -> Any:
        assert begun is bool(self.number)
        self.done += ["due"] * (begun and due)
        return loop.StopRequests.requests[self.asked.get(self.number, 0)]._replace(
            writing=self.number == self.writes
        )

    def step(self, batch: Any, lr: float) -> Any:
        self.number, self.seconds = batch.number, self.seconds + 2.0
        self.done.append(f"{batch.number}")
        broken = "NaN in a weight" * (self.number + 1 >= self.fails > 0)
        return base.Step(
            loss=2.0, grad_norm=3.0, loss_scale=4.0, skipped=self.number == 4, not_finite=broken
        )

    def begin(self, batch: Any, upcoming: Any) -> None:
        self.begun, self.saved, self.seconds = True, batch.number, self.seconds + 100.0
        self.done.append(f"begin {batch.number}")

    def finish(self) -> Any:
        self.begun, self.seconds, problem = (
            False,
            self.seconds + 100.0,
            "full" * (self.saved == self.fails),
        )
        self.done.append(f"finish {self.saved}")
        return save.Saved(
            name=name_of(self.saved), seconds=1.234, stall_s=0.056, bytes=2_850_000, problem=problem
        )

    def write(self, line: dict[str, Any], saving: bool) -> None:
        assert saving is self.begun
        self.lines.append(line)


SAVED = "saved checkpoints/iter_000000{} (2.9 MB in 1.23 s, training stopped for 0.06 s)"
NOT_SAVED = (
    "CHECKPOINT NOT SAVED: iter_0000005 could not be saved: full; the newest is iter_0000004"
)
NAN = "NOT FINITE since iteration 4: NaN in a weight"
OVER, END, STOP = (
    "iteration 5 of 5",
    "5, finish 4, begin 5, finish 5",
    "stopped at iteration {} by ",
)
EVALUATES = {"save_interval": 5, "skip": "2-3", "eval_interval": 4, "eval_iters": 3}
# settings; requests by iteration, by their places in StopRequests; when a rank still writes; which
# save fails
# -> what is done, and the evidence of status.json
RUNS: list[tuple[dict[str, Any], dict[int, int], int, int, str, str]] = [
    (
        {"save_interval": 2},
        {},
        3,
        0,
        f"1, 2, due, begin 2, 3, 4, due, finish 2, begin 4, {END}",
        OVER,
    ),
    (
        {"save_interval": 2},
        {},
        0,
        5,
        f"1, 2, due, begin 2, 3, finish 2, 4, due, begin 4, {END}",
        "iteration 5 is reac",
    ),
    ({}, {3: 1}, 0, 0, "1, due, 2, due, 3, due, begin 3, 4, due, finish 3, 5, due", OVER),
    (
        EVALUATES,
        {4: 6},
        0,
        0,
        "1, 4, loss 3.0 of 4, begin 4, finish 4",
        STOP.format(4) + "SIGTERM, saved check",
    ),
    ({}, {0: 5}, 0, 0, "", STOP.format(0) + "the file `stop`, no checkpoint"),
]


@pytest.mark.parametrize(("settings", "asked", "writes", "fails", "done", "evidence"), RUNS)
def test_a_run_saves_where_it_is_due_and_reports_how_it_ended(
    settings: dict,
    asked: dict,
    writes: int,
    fails: int,
    done: str,
    evidence: str,
    tmp_path: Path,
    monkeypatch,
    capsys,
) -> None:
    """One save at a time; the goal's belongs to a run that saves; what a restart waits for is the
    due one.
    """
    plan, around = small_plan(tmp_path, iters=5, source="mock"), Around(asked, writes, fails)
    plan = changed(changed(plan, "data", split="90,10,0"), "run", **settings)
    monkeypatch.setattr("trilane_engine.loop.TrainingLog", lambda *given: around)
    monkeypatch.setattr("trilane_engine.loop.lookahead", lambda plan, loader, number: {})
    clock = SimpleNamespace(perf_counter=lambda: around.seconds, monotonic=lambda: 7.0)
    monkeypatch.setattr("trilane_engine.loop.time", clock)
    monkeypatch.setattr(loop.dist, "destroy_process_group", lambda: None)
    (tmp_path / "ranks").mkdir()
    world = SimpleNamespace(
        is_first=True, rank=0, barrier=lambda: None, device=SimpleNamespace(type="cpu")
    )
    training = object.__new__(loop.Training)
    vars(training).update(
        _plan=plan, _world=world, _folder=tmp_path, _begin=1.0, _done=0, _saved="", _not_finite=""
    )
    vars(training).update(
        _is_short=False, **dict.fromkeys(("_requests", "_saver", "_loader", "_engine"), around)
    )
    training.run()
    assert ", ".join(around.done) == ", ".join(filter(None, [done, "keep"]))
    status = read_status(tmp_path)
    assert status.seconds == 7.0 - 1.0
    assert (status.status, status.evidence[: len(evidence)]) == (
        "completed" if evidence == OVER else "stopped",
        evidence,
    )
    out = capsys.readouterr().out
    assert re.findall(r"\(after (\d) iterations\)", out) == [
        n for n in "15" if n in done.split(", ")
    ]
    saved = [int(n) for n in re.findall(r"finish (\d)", done)]
    assert [n for n in saved if SAVED.format(n) in out] == [n for n in saved if n != fails]
    assert ("skips iterations 2 to 3: next is sample 24" in out) is ("skip" in settings)
    assert (
        bool(trouble(tmp_path))
        is (tmp_path / loop.NOT_FINITE).exists()
        is (NOT_SAVED in out)
        is bool(fails)
    )
    assert (f"{NAN}\n" in out) is status.evidence.endswith(f"; {NAN}") is bool(fails)
    for line in around.lines:
        number, flops = line["iteration"], plan.shape.flops_per_iteration(8)
        rate = {
            "learning_rate": plan.optimizer.learning_rate(8 * number, 40),
            "global_batch_size": 8,
        }
        made = {
            "iteration": number,
            "consumed_samples": 8 * number,
            "lm_loss": 2.0,
            "loss_scale": 4.0,
        }
        made |= {"sec_per_it": 2.0, "tflops": pytest.approx(flops / 2e12)}
        assert line == {**made, **rate, "grad_norm": 3.0, "skipped": int(number == 4), "nan": 0}


@pytest.mark.parametrize(
    ("env", "timeout_s", "starts"),
    [
        ({}, 9.0, 1),
        ({"LOCAL_RANK": "1"}, 9.0, 0),
        ({"TRILANE_RANK_LOGS": "x"}, 9.0, 0),
        ({}, 0.0, 0),
    ],
)
def test_the_first_rank_of_a_node_starts_a_watchdog_where_no_launcher_watches(
    env: dict, timeout_s: float, starts: int, tmp_path: Path, monkeypatch
) -> None:
    started, plan = (
        list[list[str]](),
        changed(small_plan(tmp_path), "run", hang_timeout_s=timeout_s),
    )
    monkeypatch.setattr(beating := "trilane_engine.heartbeat.start", started.append)
    monkeypatch.setattr(f"{beating[:-5]}_beats", beats := [])
    monkeypatch.setattr("faulthandler.register", lambda *given, **more: None)
    with mock.patch.dict(os.environ, {"RANK": "4", **env}):
        Later("trilane_engine.heartbeat").begin(plan, tmp_path)
        remove_records(tmp_path, os.environ)
    [beat.close() for beat in beats]
    watchdog = ["trilane_diagnose.watchdog", str(tmp_path), str(os.getpid()), "4"]
    assert [command[-4:] for command in started] == [watchdog] * starts
    assert len(beats) == len([*tmp_path.glob("ranks/4.stack")]) == (timeout_s > 0)
