"""Which small faults do the quick tests see? python benchmarks/mutations.py [--only hang] [--jobs 2]

Each fault of the table is planted alone, in a copy of lib, and the quick tests of its area run: seen is what makes one
fail. The faults are slips that anybody makes: a comparison, a dropped factor, a wrong unit, a missing edge. Exit code 1
where fewer than nine in ten are seen. The working tree is never touched.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

import numpy  # noqa: F401 once, and not in each test run
import pandas  # noqa: F401
import pytest
import scipy.stats  # noqa: F401

REPOSITORY = Path(__file__).resolve().parents[1]
LEAST_SEEN = 0.9
LIMIT_S = 900.0  # a test that does not end sees the fault too

# (area, file below lib/trilane, tests below tests/): pairs of a text that stands in the file once, and its replacement.
TABLE: dict[tuple[str, str, str], list[tuple[str, str]]] = {
    ("planner", "costmodel/iteration.py", "costmodel/test_iteration.py"): [
        ("where(x.gpus > node", "where(x.gpus >= node"),
        ("(nodes - 1) / nodes / outside", "nodes / nodes / outside"),
        ("(2 + x.recomputed) * times, 1", "2 * times, 1"),
        ("(x.pp - 1) * p2p", "x.pp * p2p"),
        ("np.equal(x.offload, 0) * 30.0", "30.0"),
        ("(filled - start)", "(filled - full)"),
        ("last * layer + head)", "last * layer)"),
    ],
    ("planner", "costmodel/layers.py", "costmodel/test_layers.py"): [
        ("2 * (t - 1) / t * x.tokens", "(t - 1) / t * x.tokens"),
        ("(4 + 2 * whole + operators)", "(4 + whole + operators)"),
        ("2.5 * fused", "2 * fused"),
        ("1.5 * forward + cast", "forward + cast"),
    ],
    ("planner", "costmodel/columns.py", "costmodel"): [
        ("each * (others - 1)", "each * others"),
    ],
    ("planner", "config/parallelism.py", "config"): [
        ("t.microbatches % t.pp == 0", "t.microbatches % t.pp <= 1"),
        ("c.gpus_per_node % t.tp == 0", "t.tp <= c.gpus_per_node"),
        ("t.gpus <= c.max_gpus", "t.gpus < c.max_gpus"),
        ("t.dp * t.cp % t.shards == 0", "t.dp % t.shards == 0"),
        ('"uniform" else 2)', '"uniform" else 1)'),
    ],
    ("planner", "planning/search.py", "planning/test_search.py"): [
        ("probability[fits] > RISKY", "probability[fits] > IMPOSSIBLE"),
        ("len(fits) - fits.sum()", "fits.sum()"),
    ],
    ("planner", "costmodel/fit.py", "costmodel/test_fit.py"): [
        (".T / (2 * STEP)", ".T / STEP"),
    ],
    ("planner", "costmodel/fit.py", "costmodel/test_calibration.py"): [
        ("np.where(days, factor, 1.0)", "factor"),
    ],
    ("planner", "planning/search.py", "planning/test_space.py"): [
        ("[1:] < lowest[:-1]", "[1:] <= lowest[:-1]"),
    ],
    ("planner", "planning/space.py", "planning/test_space.py"): [
        (" if d * d != n]", "]"),
    ],
    ("planner", "planning/sizing.py", "planning/test_sizing.py"): [
        ("/ topology.gbs * sec_per_it", "/ topology.mbs * sec_per_it"),
    ],
    ("memory", "costmodel/memory.py", "costmodel/test_memory.py"): [
        ("chunks / v, x.pp - stage", "chunks, x.pp - stage"),
        ("c.gathered * unit", "unit"),
        ("(divides, x.sharded, 1)", "(divides, x.replicas, 1)"),
        ("scores: float = 5.0", "scores: float = 4.0"),
        ("(4 - fp8 + gate", "(4 + gate"),
        ("x.offload_checkpoints * inputs", "0 * inputs"),
        ("if named else calibration.stack", "if 0 else calibration.stack"),
        ("x.tokens * x.vocab / x.tp", "x.tokens * x.vocab"),
        ("np.minimum(1, last)", "np.minimum(0, last)"),
        ("(x.pp == 1) & (x.replicas > 1)", "(x.replicas > 1)"),
        ("c.slack * free * needed", "c.slack * needed"),
        ("np.where(np.equal(x.pp, 1), x.untied, 1)", "x.untied"),
        ("np.equal(x.offload, 2) * weights", "weights"),
        ("np.greater_equal(x.zero", "np.greater(x.zero"),
        ("(wide, 8, whole)", "(wide, 12, whole)"),
        ("* z - 0.07056", "* z + 0.07056"),
        ("min(14.0, c.optimizer)", "14.0"),
    ],
    ("calendar", "forecasting/failures.py", "forecasting/test_failures.py"): [
        ("interval_s**2 / 12 +", "interval_s**2 / 6 +"),
        (" + wait**2", ""),
        ("wait = self.queue_s", "wait = 0.0"),
        ("+ x / 9) - d", "+ x / 9)"),
        ("NODE_YEAR_S * repair_hours * 3600", "NODE_YEAR_S * repair_hours"),
        ("gammainc(spare_nodes, mean)", "gammainc(spare_nodes + 1, mean)"),
        ("idle * stop.charged", "idle"),
    ],
    ("calendar", "forecasting/simulation.py", "forecasting/test_simulation.py"): [
        (" * interval_s / 2 / work", " * interval_s / work"),
        ("worked * risks.queue_s /", "0 * risks.queue_s /"),
        ("sum(certain.values()) + charged)", "sum(certain.values()))"),
        ("pieces.cumsum(axis=1)", "pieces"),
    ],
    ("calendar", "forecasting/forecast.py", "forecasting/test_forecast.py"): [
        ("* np.diff(same, prepend=-1)", ""),
        ("plan.cluster.max_nodes - max(step", "plan.cluster.max_gpus - max(step"),
        ("ideal * (u.mean - 1)", "ideal * u.mean"),
        (".total_seconds() + 86400", ".total_seconds()"),
        ("watts * building / 1000", "watts / 1000"),
    ],
    ("calendar", "forecasting/failures.py", "forecasting/test_forecast.py"): [
        ("1 / 4 if topology", "1 / 3 if topology"),
    ],
    ("calendar", "forecasting/request.py", "forecasting/test_forecast.py"): [
        ("deviation * math.sqrt(1 - r.common)", "deviation * math.sqrt(r.common)"),
    ],
    ("calendar", "forecasting/schedule.py", "forecasting/test_schedule.py"): [
        ("new.job != old.job", "new.job[:2] != old.job[:2]"),
    ],
    ("calendar", "forecasting/decision.py", "forecasting/test_decision.py"): [
        ("        if p > MOST_RISK:", "        if p > 1:"),
        ("failed < own[0] or saves", "saves"),
        ("if other.is_safe and is_fair", "if is_fair"),
        ("hours < (1 - TIE) * own[2]", "hours < own[2]"),
    ],
    ("jobs", "slurm/script.py", "slurm/test_site_options.py"): [
        ('if one.startswith(word[2:].partition("=")[0])', "if False"),
        ('launcher == "srun" and not any', 'launcher == "x" and not any'),
        ("require(name not in variables", "require(True"),
    ],
    ("guard", "slurm/checks.py", "slurm/test_preflight.py"): [
        ("mine - least > 0.01", "mine - least > 0.5"),
        ("self.plan.run.goal - self.plan.run.start_iteration", "self.plan.run.goal"),
        ("gpus > qos.gpus", "gpus >= qos.gpus"),
        ('limit > qos.hours * 3600, "qos time"', 'limit >= qos.hours * 3600, "qos time"'),
        ("keep_last or saves) + 1", "keep_last or saves)"),
        ("need > free / 2", "need > free * 2"),
        ("files > inodes", "files > 2 * inodes"),
        ("checkpoint_bytes(plan.shape) / 1e9 * plan.run.saves_at_end", "checkpoint_bytes(plan.shape) / 1e9"),
        ("REFUSAL if many else WARNING", "REFUSAL"),
        ("compute_capability < (8, 0)", "compute_capability <= (8, 0)"),
        ("kept * checkpoint_files(", "checkpoint_files("),
        ("-(-self.plan.topology.gpus //", "(self.plan.topology.gpus //"),
    ],
    ("guard", "slurm/preflight.py", "slurm/test_preflight.py"): [
        ("(processes != used,", "(processes < used,"),
        ("replace(f, level=WARNING) if f.rule in allow", "replace(f, level=WARNING) if allow"),
        ('and not has("pipefail")', "and False"),
    ],
    ("jobs", "slurm/attempt.py", "slurm/test_attempt.py"): [
        ("[at] * 3", "[at] * 4"),
        ("            starts = []", "            pass"),
        ("            starts = starts[:-1]", "            pass"),
        ("at >= run.goal and is_saved", "at >= run.goal"),
    ],
    ("jobs", "slurm/jobs.py", "slurm/test_attempt.py"): [
        ("reversed(states)", "states"),
        ("(is_last or written.status is Status.COMPLETED)", "True"),
        ("len(live) - (current in live)", "len(live)"),
    ],
    ("jobs", "slurm/chain.py", "slurm/test_chain.py"): [
        ("if phase.gbs < gbs)", "if phase.gbs <= gbs)"),
        ("require(start < end", "require(start <= end"),
    ],
    ("jobs", "slurm/nodes.py", "slurm/test_attempt.py"): [
        ("if not set(faulty) & set(trained or nodes)", "if not faulty"),
    ],
    ("jobs", "slurm/nodes.py", "slurm/test_nodes.py"): [
        ("found if len(found) < len(nodes) else []", "found"),
        ("return [n for n in nodes if n in best]", "return list(best)"),
    ],
    ("jobs", "slurm/node_test.py", "slurm/test_nodes.py"): [
        ("if failed and len(failed) == len(results)", "if False"),
        ("statistics.median_high(rates", "statistics.median_low(rates"),
    ],
    ("jobs", "slurm/sites.py", "slurm/test_preflight.py"): [
        ("int(days or 0) * 24 + hours", "int(days or 0) * 12 + hours"),
        ("days is None and len(parts) < 3", "len(parts) < 3"),
    ],
    ("jobs", "workspace/status.py", "slurm/test_jobs.py"): [
        ("self.has_failed and self is not Status.OOM", "self.has_failed"),
    ],
    ("logs", "logs/endings.py", "logs/test_endings.py"): [
        ("2 if found.rows else 1", "1"),
        ("1000 if found.level == Level.SCHEDULER else ", ""),
    ],
    ("logs", "logs/prefixes.py", "logs"): [
        ("3600 * int(", "60 * int("),
    ],
    ("logs", "logs/dialects.py", "logs"): [
        ('"MiB": (2.0**20, 1.0)', '"MiB": (1e6, 1.0)'),
        ("row.get(span.column, 0.0) + span.value", "0.0 + span.value"),
    ],
    ("logs", "logs/reading/facts.py", "logs"): [
        ("enumerate(names, 2)", "enumerate(names, 1)"),
    ],
    ("logs", "logs/checks.py", "logs"): [
        ("1000.0**-off", "1000.0**off"),
    ],
    ("logs", "logs/reading/runs.py", "logs"): [
        ("= seconds / steps", "= seconds"),
        ("number > before if before is not None", "number >= before if before is not None"),
    ],
    ("logs", "logs/run.py", "logs"): [
        ('before["iteration"] < after', 'before["iteration"] <= after'),
    ],
    ("logs", "logs/reading/reader.py", "logs"): [
        ("or not dialect.is_blind", "or False"),
    ],
    ("logs", "logs/reading/blocks.py", "logs"): [
        ('data.rfind(b"\\n") + 1', 'data.rfind(b"\\n")'),
    ],
    ("logs", "analysis/steady_state.py", "analysis/test_measure.py"): [
        ("at - at[:1] < warm_up", "at - at[:1] <= warm_up"),
        ("every >= np.maximum(at - step, 1)", "every > np.maximum(at - step, 1)"),
        ("0.03 * wanted", "0.3 * wanted"),
    ],
    ("logs", "analysis/measure.py", "analysis/test_measure.py"): [
        ("(high - low) / 2 / seconds", "(high - low) / seconds"),
        (" & ~(np.nan_to_num(skipped) > 0)", ""),
    ],
    ("logs", "analysis/spikes.py", "analysis/test_spikes.py"): [
        ("np.maximum(least, SIGMAS * sigma)", "np.minimum(least, SIGMAS * sigma)"),
        ("level[i] + 3 * sigma[i]", "level[i]"),
        ("event.recovered is None", "event.recovered"),
    ],
    ("logs", "analysis/loss_curve.py", "analysis/test_spikes.py"): [
        ("WINDOW, min_periods=LEAST).median(), before.rolling(3).median())", "WINDOW, min_periods=LEAST).median())"),
        (" * (1 + 2 * LEAST / lines)", ""),
        ("before.diff().abs()", "before.abs()"),
    ],
    ("logs", "analysis/continuity.py", "analysis/test_continuity.py"): [
        ("slack = 0.5 * max(each) + 2 * uneven", "slack = 0.5 * max(each)"),
        ("value <= 1.5 * min(r.every, at_new[0]) * each[-1]", "value <= 1.5 * each[-1]"),
        ("* step**1.5", ""),
        ("if planned else", "if False else"),
        ("max(least, 1.5 * own, ONCE * error)", "least"),
        ("max(least, SIGMAS * error)", "least"),
        ("== y[:3]", "<= y[:3]"),
        ("- expected) > 0.5 * abs(moved)", "- expected) > 0"),
        ('r.differs("global_batch_size") or (r.has', "(r.has"),
    ],
    ("hang", "diagnose/suspects.py", "diagnose/test_hang_scenes.py"): [
        ("len(apart) * 2 <", "len(apart) <"),
        ("if least < most else []", "if least <= most else []"),
        (" or _fewest({r: w.call for r, w in waits.items()})", ""),
        ("len(steps) == 1 or min(steps) < 0", "len(steps) == 1"),
    ],
    ("hang", "diagnose/suspects.py", "diagnose/test_flight_recorder.py"): [
        ("(call.group, 0) < call.sequence", "(call.group, 0) <= call.sequence"),
    ],
    ("hang", "diagnose/flight_recorder.py", "diagnose/test_flight_recorder.py"): [
        (' and state != "started"', ""),
        ("max(entered[call.group], _whole(number))", "_whole(number)"),
        ("sorted(self.ranks)[number]", "number"),
        ("dispatch |= {", "{"),
    ],
    ("hang", "diagnose/waits.py", "diagnose/test_hang_scenes.py"): [
        ("{*evidence.unreadable}) > len(ranks)", "{*evidence.unreadable}) >= len(ranks)"),
        (" or dump.owns_gil", " or True"),
    ],
    ("hang", "diagnose/waits.py", "diagnose/test_hang.py"): [
        ("> stacks.total() > 1", "> stacks.total()"),
        ("> max(1, len(dumped) / 8)", "> max(0, len(dumped) / 8)"),
        (" >= stacks.total() > 1", " < 0"),
    ],
    ("hang", "diagnose/hang.py", "diagnose/test_hang.py"): [
        ("len(nodes) < len(evidence.grid.nodes)", "len(nodes) <= len(evidence.grid.nodes)"),
    ],
    ("hang", "diagnose/stragglers.py", "diagnose/test_stragglers.py"): [
        ("1.4826 * float", "float"),
        ("excess > 0.03 * middle", "excess > 0.03"),
    ],
    ("hang", "workspace/heartbeat.py", "workspace/test_heartbeat.py"): [
        ("max(LEAST_S, LATE", "min(LEAST_S, LATE"),
        ("(beat.phase != END and beat.idle_s", "(beat.idle_s"),
    ],
    ("restart", "workspace/run_folder.py", "workspace"): [
        ("_iteration(line) <= done", "_iteration(line) < done"),
        ("in reversed(read_text(", "in iter(read_text("),
    ],
    ("restart", "diagnose/restart.py", "diagnose/test_restart.py"): [
        ("rel_tol=1e-9", "rel_tol=1e-2"),
        ("and must_decay(name) and size", "and size"),
    ],
    ("restart", "diagnose/snapshot.py", "diagnose/test_restart.py"): [
        ("for part in parts) == prod(", "for part in parts) <= prod("),
        ("scalars = max(", "scalars = min("),
    ],
    ("restart", "workspace/fingerprints.py", "diagnose/test_restart.py"): [
        ("max(self.norm, other.norm, 1e-38)", "min(self.norm, other.norm)"),
        ('name.endswith(".bias") or "layernorm" in name)', 'name.endswith(".bias"))'),
        ("min(self.low, other.low)", "self.low"),
    ],
    ("restart", "config/batch_rampup.py", "config"): [
        ("phase.first + turn * phase.gbs", "phase.first + turn"),
    ],
    ("checkpoints", "utils/files.py", "workspace"): [
        ("os.fsync(file.fileno())\n        os.replace", "file.fileno()\n        os.replace"),
        ("os.fsync(handle)", "pass"),
        ("if name.isdecimal()), default=0)", "if name.isdecimal()), default=1)"),
    ],
    ("checkpoints", "workspace/checkpoints.py", "workspace"): [
        ("sync_folder(target.parent)", "pass"),
        ("st_size != size", "st_size < size"),
        ("_is_complete(path)), key=iteration_of)", "_is_complete(path)))"),
        ("complete(folder)[:-count]", "complete(folder)[: 1 - count]"),
        ("if path != named:", "if path:"),
        ("if digest(path) == checksum", "if checksum"),
        ("read == _sealed(read", "read['content'] == (read"),
    ],
    ("checkpoints", "engine/checkpoint/slices.py", "engine/test_slices.py"): [
        ("(-len(text) % 8)", "(len(text) % 8)"),
        ("os.fsync(file.fileno())", "file.fileno()"),
    ],
    ("checkpoints", "workspace/continuation.py", "workspace/test_continuation.py"): [
        ("iteration <= plan.run.train_iters", "iteration < plan.run.train_iters"),
    ],
    ("counts", "config/model.py", "config"): [
        ("(2 + self.is_gated) * h * self.ffn", "2 * h * self.ffn"),
        ("qkv + 2 * h +", "qkv + h +"),
        ("4 * B * s * s * h", "2 * B * s * s * h"),
        ("(4 if recompute_full else 3) * layers + 6", "(4 if recompute_full else 3) * (layers) + 8"),
        ("step = multiple * tp", "step = multiple"),
        ("+ 2 * h * self.embedding_layernorm", "+ h * self.embedding_layernorm"),
    ],
    ("counts", "config/training.py", "config"): [
        ("math.cos(math.pi * progress)) / 2", "math.cos(math.pi * progress))"),
        ("max(1, decay - warmup)", "max(1, decay)"),
    ],
    ("counts", "config/batch_rampup.py", "config"): [
        ("-(-(step + 1) * self.samples // steps)", "(step + 1) * self.samples // steps"),
        ("consumed + (iterations - done) * batch", "consumed + iterations * batch"),
    ],
    ("counts", "analysis/measure.py", "analysis/test_flops.py"): [
        ("again * (tp - 1)", "again * tp"),
        ("- 6.0 * batch", "- 12.0 * batch"),
    ],
    ("counts", "analysis/measure.py", "analysis/test_measure.py"): [
        ('(config.recompute == "selective")', '(config.recompute != "none")'),
    ],
    ("counts", "forecasting/request.py", "forecasting/test_forecast.py"): [
        ("math.ceil(self.tokens /", "int(self.tokens /"),
    ],
    ("counts", "costmodel/columns.py", "costmodel/test_memory.py"): [
        ("biases + 2 * self.norm_values", "biases + self.norm_values"),
    ],
    ("counts", "workspace/checkpoints.py", "workspace"): [
        ("4 * len(KINDS)", "2 * len(KINDS)"),
    ],
}


@dataclass(frozen=True)
class Fault:
    """The text `old`, which stands once in `file` (below lib/trilane), replaced by `new`; `tests` below tests/."""

    area: str
    file: str
    tests: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.area:11} {self.file}: {self.old.strip()}  ->  {self.new.strip() or '(nothing)'}"

    def planted(self, text: str) -> str:
        """The file's text with the fault; ValueError where `old` does not stand there exactly once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands there {found} times, not once; choose another text")
        return text.replace(self.old, self.new)


FAULTS = tuple(Fault(*place, *pair) for place, pairs in TABLE.items() for pair in pairs)


class Copy:
    """A copy of lib, into which one fault at a time is planted, and the test run against it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lib = folder, folder / "lib"
        shutil.copytree(REPOSITORY / "lib", self.lib, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for beside in ("notebooks", "slurm_templates"):  # what the library looks for next to itself
            (folder / beside).symlink_to(REPOSITORY / beside)
        self.ticks = iter(range(1, 1 << 30))

    def start(self, fault: Fault, plant: bool) -> None:
        """Start the fault's tests in a process of their own, with the fault or without."""
        self.fault, self.path, self.begin = fault, self.lib / "trilane" / fault.file, time.perf_counter()
        self.whole = self.path.read_text(encoding="utf-8")
        if plant:
            self._write(fault.planted(self.whole))
        self.process = get_context("fork").Process(target=run_tests, args=(self.folder, self.lib, fault.tests))
        self.process.start()

    @property
    def is_done(self) -> bool:
        """Whether the tests have ended; those that do not end are ended."""
        if self.process.is_alive() and time.perf_counter() - self.begin > LIMIT_S:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        return not self.process.is_alive()

    def finish(self) -> int:
        """pytest's exit code, 1 where the tests did not end; the copy is whole again."""
        self._write(self.whole)
        code = self.process.exitcode
        return 1 if code is None or code < 0 else code

    def _write(self, text: str) -> None:
        self.path.write_text(text, encoding="utf-8")
        # Python takes bytecode for current that is of the same size and second.
        os.utime(self.path, (next(self.ticks),) * 2)


def run_tests(folder: Path, lib: Path, tests: str) -> NoReturn:
    """Run these quick tests against `lib`, in a fork of a process without trilane; what they print goes to a file."""
    assert not any(name.partition(".")[0] == "trilane" for name in sys.modules)
    os.setsid()
    os.chdir(REPOSITORY)
    os.environ |= {"PYTHONPATH": str(lib), "TRILANE_OUTPUTS": str(folder / "outputs")}
    sys.path.insert(0, str(lib))
    with (folder / "output").open("wb") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"]
    os._exit(int(pytest.main([*options, f"tests/{tests}"])))


def exit_codes(copies: Sequence[Copy], faults: Sequence[Fault], plant: bool) -> Iterator[tuple[Copy, Fault, int]]:
    """The exit code of each fault's tests, as they end, a test run a copy at a time."""
    left, busy, free = list(reversed(faults)), list[Copy](), list(copies)
    while left or busy:
        while left and free:
            busy.append(free.pop())
            busy[-1].start(left.pop(), plant)
        time.sleep(0.02)
        for copy in [copy for copy in busy if copy.is_done]:
            busy.remove(copy)
            yield copy, copy.fault, copy.finish()
            free.append(copy)


def main() -> int:
    """Print a line for each fault, and the count; 1 where fewer than LEAST_SEEN are seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose area, file or text contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="test runs at a time")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if given.only in str(fault)]
    for fault in FAULTS:
        fault.planted((REPOSITORY / "lib/trilane" / fault.file).read_text(encoding="utf-8"))
    seen = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as root:
        copies = [Copy(Path(root) / str(number)) for number in range(given.jobs)]
        for copy, fault, code in exit_codes(copies, list({f.tests: f for f in chosen}.values()), plant=False):
            if code:
                print((copy.folder / "output").read_text(encoding="utf-8", errors="replace")[-3000:])
                raise ValueError(f"tests/{fault.tests}: exit code {code} without a fault; nothing can be concluded")
        for copy, fault, code in exit_codes(copies, chosen, plant=True):
            verdict = {0: "NOT SEEN", 1: "seen"}.get(code, "broken")  # tests that cannot start: too crude a fault
            seen += code == 1
            print(f"{verdict:8} {time.perf_counter() - copy.begin:6.1f} s  {fault}", flush=True)
    print(f"{seen} of {len(chosen)} faults seen by the quick tests")
    return int(seen < LEAST_SEEN * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
