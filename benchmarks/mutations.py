"""How many of some random faults in lib do the tests see? python benchmarks/mutations.py [--draw 200] [--seed 1]

Needs `pip install -e '.[mutations]'`: cosmic-ray, whose operators make the faults. First the whole suite runs once
under coverage, which notes the tests that run each line (20 minutes; kept in --map). Then each fault is planted
alone, in a clone of what is committed, and the tests that run its line are run, the quickest first, as many as take
LIMIT_S, then the recorded answers. Seen: one fails, or they do not end. A place (an operator, a number, a comparison
...) is drawn, not a fault, as a `+` can be replaced in eleven ways. Annotations and @dataclass(...) are left out:
mypy reads them. A fault with which a test cannot be imported is too crude to count. Each verdict is a line of --out;
what stands there is not run again.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

REPOSITORY = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0
ANSWERS = "tests/test_answers.py"  # slow, and look at more numbers than any other
PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
# pytest's, in the process that runs the tests and in the one that hears of them; and each child's, as sitecustomize
NOTES = """
import json, os, pytest
from coverage import Coverage
def note(name):
    if now := Coverage.current():
        now.switch_context(name)
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    os.environ["NOTED_TEST"] = item.nodeid
    note(item.nodeid)
    yield
    note("")
SECONDS = {}
def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] = SECONDS.get(report.nodeid, 0) + (report.duration if report.passed else float("inf"))
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        open(os.environ["NOTED_SECONDS"], "w").write(json.dumps(SECONDS))
"""
CHILD = """
import os
if name := os.environ.get("NOTED_TEST"):
    from coverage import Coverage
    if now := Coverage.current():
        now.switch_context(name)
"""


@dataclass(frozen=True)
class Fault:
    """One replacement in one file below lib: the operator's name and its number among what it can replace there."""

    file: str
    line: int
    operator: str
    number: int
    lines: tuple[int, ...]  # of the statement; of the whole file where it runs at import

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.operator.removeprefix('core/')} {self.number}"

    def planted(self, text: str) -> str:
        """The file's text with the fault."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        found = mutate_code(text, get_operator(self.operator)(), self.number)
        assert isinstance(found, str), self
        return found


def faults(file: str, text: str) -> list[list[Fault]]:
    """All that can be planted in a file, a list a place."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    tree, nodes = ast.parse(text), list(ast_nodes(get_ast(text)))
    declared = [getattr(n, name, None) for n in ast.walk(tree) for name in ("annotation", "returns")]
    marks = [m for n in ast.walk(tree) for m in getattr(n, "decorator_list", ()) if "dataclass" in ast.dump(m)]
    spans = [((n.lineno, n.col_offset - 1), (n.end_lineno, n.end_col_offset)) for n in (*declared, *marks) if n]
    places, at = dict[tuple[int, int], list[Fault]](), dict[str, list[tuple[int, int]]]()
    for name in sorted(n for n in operator_names() if "Variable" not in n):  # those two need a name that is given
        kind = (
            name.rpartition("_")[0] if "Binary" in name else name
        )  # whatever replaces them, they stand where they stand
        if kind not in at:
            at[kind] = [start for node in nodes for start, _ in get_operator(name)().mutation_positions(node)]
        for number, place in enumerate(at[kind]):
            if not any(start <= place < end for start, end in spans):
                places.setdefault(place, []).append(Fault(file, place[0], name, number, statement(tree, place[0])))
    return list(places.values())


def statement(tree: ast.Module, line: int) -> tuple[int, ...]:
    """The lines of the smallest statement around `line`; none where it runs at import, before any test."""
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    bodies = [n for n in around if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not any(body.body[0].lineno <= line for body in bodies):
        return ()
    least = min(around, key=lambda n: (n.end_lineno or 0) - n.lineno)
    return (
        tuple(range(least.lineno, line + 1))
        if hasattr(least, "body")
        else tuple(range(least.lineno, (least.end_lineno or 0) + 1))
    )


def drawn(root: Path, seed: int) -> Iterator[Fault]:
    """Faults without end: a file by its lines, a place in it, a fault there, each alike likely; none twice."""
    rng, files = random.Random(seed), sorted((root / "lib/trilane").rglob("*.py"))
    texts = {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in files}
    weights, known, seen = [t.count("\n") for t in texts.values()], dict[str, list[list[Fault]]](), set[Fault]()
    while True:
        file = rng.choices(list(texts), weights)[0]
        if file not in known:
            known[file] = faults(file, texts[file])
        if known[file] and (fault := rng.choice(rng.choice(known[file]))) not in seen:
            seen.add(fault)
            yield fault


def clone(folder: Path) -> Path:
    """What is committed, with this environment."""
    subprocess.run(["git", "clone", "-q", REPOSITORY, folder], check=True)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1])
    return folder


def environment(root: Path, **changes: str) -> dict[str, str]:
    """That of a test run of the clone `root`; PYTHONPATH stands before what the environment has installed."""
    return {
        **os.environ,
        "PYTHONPATH": f"{root / 'lib'}{os.pathsep}{root.parent / 'notes'}",
        "TMPDIR": str(root.parent),
        **changes,
    }


def write_map(root: Path, folder: Path) -> None:
    """Run every test in the clone: folder/data has the tests of each line, folder/seconds.json what each took."""
    notes = root.parent / "notes"
    notes.mkdir()
    (notes / "noting.py").write_text(NOTES)
    (notes / "sitecustomize.py").write_text(CHILD)
    folder.mkdir(parents=True, exist_ok=True)
    env = environment(root, COVERAGE_FILE=str(folder / "data"), NOTED_SECONDS=str(folder / "seconds.json"))
    run = [sys.executable, "-m", "coverage", "run", *PYTEST[1:], "-p", "noting", "-n", "3", "--dist", "loadgroup"]
    subprocess.run(run, cwd=root, env=env, check=False)  # tests that fail here are not used
    subprocess.run([sys.executable, "-m", "coverage", "combine", "--quiet"], cwd=root, env=env, check=True)
    (notes / "sitecustomize.py").unlink()


class Map:
    """Which tests run a line, and how long each takes."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self.data = CoverageData(str(folder / "data"))
        self.data.read()
        self.files = {name.partition("/lib/trilane/")[2]: name for name in self.data.measured_files()}
        self.seconds = json.loads((folder / "seconds.json").read_text())

    def tests(self, fault: Fault) -> list[str]:
        """Those that run the statement: of its own module, then the quickest, as many as take LIMIT_S, and ANSWERS."""
        path = Path(fault.file)
        name = self.files.get(fault.file.removeprefix("lib/trilane/"), "")
        by_line = self.data.contexts_by_lineno(name)
        names = {n for line in fault.lines or by_line for n in by_line.get(line, ()) if n in self.seconds}
        if not fault.lines:  # the records of options and fields look at what was made at import
            names |= {n for n in self.seconds if n.startswith(ANSWERS)}
        passed = (n for n in names if self.seconds[n] < float("inf"))
        ordered = sorted(passed, key=lambda n: (f"{path.parent.name}/test_{path.stem}" not in n, self.seconds[n], n))
        taken = 0.0
        chosen = [n for n in ordered if (taken := taken + self.seconds[n]) < LIMIT_S or n == ordered[0]]
        chosen += [n for n in ordered if n.startswith(ANSWERS) and n not in chosen]
        return [n.rpartition("@")[0] or n for n in chosen]  # pytest-xdist adds @GROUP


def verdict(root: Path, fault: Fault, tests: list[str]) -> str:
    """`seen`, `not seen` or `crude`, of the fault in this clone, which is whole again afterwards."""
    path, chosen, said = root / fault.file, root.with_suffix(".tests"), root.with_suffix(".output")
    whole = path.read_text(encoding="utf-8")
    path.write_text(fault.planted(whole), encoding="utf-8")
    chosen.write_text("\n".join(tests))
    command = [*PYTEST, "-x", f"@{chosen}"] if tests else [sys.executable, "-c", "pass"]
    env = environment(
        root, PYTHONDONTWRITEBYTECODE="1"
    )  # bytecode of the same size and second would be taken for current
    with said.open("wb") as out:
        run = subprocess.Popen(
            command, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(4 * LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)  # tests that do not end see the fault, too
    run.wait()
    path.write_text(whole, encoding="utf-8")
    if run.returncode == 0:
        return "not seen"
    return "crude" if b"ERROR collecting" in said.read_bytes() or run.returncode > 1 else "seen"


def main() -> int:
    """Print a line for each fault, and the count; 1 where fewer than 85 % are seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draw", type=int, default=200, help="how many that count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="test runs at a time")
    parser.add_argument("--map", type=Path, default=Path(tempfile.gettempdir()) / "mutations-map", metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("mutations.txt"), help="a line of each verdict is added")
    given = parser.parse_args()
    known = (
        dict(line.rsplit("  ", 1)[::-1] for line in given.out.read_text().splitlines()) if given.out.exists() else {}
    )
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as root:
        clones = SimpleQueue[Path]()
        for number in range(given.jobs):
            clones.put(clone(Path(root) / str(number)))
        first = clones.get()
        if not (given.map / "seconds.json").exists():
            write_map(first, given.map.resolve())
        clones.put(first)
        tests = Map(given.map)

        count, lock = Counter[str](), threading.Lock()

        def judged(fault: Fault) -> str:
            if str(fault) in known:
                return known[str(fault)]
            here = clones.get()
            found = verdict(here, fault, tests.tests(fault))
            clones.put(here)
            with lock, given.out.open("a") as out:
                print(f"{found}  {fault}", file=out)
            print(f"{found:8} {fault}", flush=True)
            return found

        with ThreadPoolExecutor(given.jobs) as pool:
            faults_left = drawn(first, given.seed)
            while (left := given.draw - count["seen"] - count["not seen"]) > 0:
                count.update(pool.map(judged, itertools.islice(faults_left, left)))
    print(f"{count['seen']} of {given.draw} faults seen, {count['crude']} too crude to count")
    return int(count["seen"] < 0.85 * given.draw)


if __name__ == "__main__":
    sys.exit(main())
