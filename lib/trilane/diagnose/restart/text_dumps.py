"""Weights that a training loop wrote as text before and after its iterations, a file for each rank, as in document 003.

    debug-805-pp11-tp1-dp4-global369-after-iteration-377074.txt
        module.tied_modules.embed.word_embeddings.norm.weight=Parameter containing:
        tensor([0.9961, 0.9961, 0.9961,  ..., 0.9961, 0.9961, 0.9961], device='cuda:1',
               dtype=torch.bfloat16, requires_grad=True)

The state after iteration 805 is the one before iteration 806. torch prints four decimals, and of a tensor with more
than 1,000 elements the first and the last three of each dimension. A unified diff of two such files holds both.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trilane.diagnose.restart.rules import RestartFinding, share
from trilane.diagnose.restart.snapshot import RankPrint
from trilane.utils.tables import grouped
from trilane.utils.validation import require

FILE = re.compile(
    r"debug-(\d{1,12})-pp(\d{1,6})-tp(\d{1,6})-dp(\d{1,6})-global(\d{1,7})-(before|after)-iteration-(\d{1,12})\.txt"
)
NAME = re.compile(r"([\w.\[\]-]{1,500})=(?:Parameter containing:|tensor\()")
NUMBER = re.compile(r"[-+]?(?:\d{1,40}\.\d{0,40}(?:e[-+]?\d{1,3})?|nan|inf)|\.\.\.|[\[\]]")
MOST = 1 << 20  # numbers of a tensor that are read
LARGEST = 1 << 28  # bytes of a file
PARTS = (("before", "-"), ("after", "+"))  # of a diff
UNRELATED = 0.5  # of the norm of what every matrix prints


@dataclass(frozen=True, kw_only=True)
class Printed:
    """What a tensor's text shows: numbers, half of the last place of each, and the brackets and dots between them."""

    values: np.ndarray  # (n,)
    slack: np.ndarray  # (n,)
    form: str


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One file: its rank, the iteration after which the state is (None: unknown), and its tensors."""

    rank: RankPrint
    iteration: int | None
    after: bool
    process: int
    tensors: Mapping[str, Printed] = field(default_factory=dict)


def is_dump(path: Path) -> bool:
    """Whether it is a text dump, a diff of two, a document that quotes one, or a folder that holds some."""
    if path.is_dir():
        return next(_files(path), None) is not None
    if not path.is_file() or path.stat().st_size > LARGEST:
        return False
    return bool(NAME.search(path.read_text(encoding="utf-8", errors="replace")))


def _files(folder: Path) -> Iterator[Path]:
    inside = [*folder.glob("debug-*.txt"), *folder.glob("*/debug-*.txt")]
    return (path for path in sorted(inside) if FILE.fullmatch(path.name))


def read_dumps(path: Path, side: str) -> list[Dump]:
    """The dumps at `path`; of a diff those of its `side`, "-" or "+". ValueError where a file is too large."""
    found = list[Dump]()
    for file in [path] if path.is_file() else _files(path):
        require(file.stat().st_size <= LARGEST, "dump", file, f"has more than {LARGEST} bytes")
        text = file.read_text(encoding="utf-8", errors="replace")
        found += [_dump(name, lines) for name, lines in _parts(file.name, text.splitlines(), side)]
    return found


def _parts(name: str, lines: Sequence[str], side: str) -> Iterator[tuple[str, list[str]]]:
    """Name and lines of each dump of a file: itself, or that side of each diff of dumps in it."""
    starts = [n for n, line in enumerate(lines) if line.startswith("--- ") and FILE.search(line)]
    if not starts:
        yield name, list(lines)
    for start in starts:
        head = next((line for line in lines[start : start + 2] if line.startswith(side * 3 + " ")), lines[start])
        body = list[str]()
        for line in lines[start + 2 :]:
            if line.startswith("@@"):
                continue
            if line[:1] not in (" ", "-", "+") or line.startswith(("--- ", "+++ ")):
                break
            body += [line[1:]] if line[0] in (" ", side) else []
        yield head, body


def _dump(name: str, lines: Iterable[str]) -> Dump:
    given = FILE.search(name)
    number, pp, tp, dp, rank = map(int, given.groups()[:5]) if given else (0, 0, 0, 0, 0)
    after = not given or given[6] == "after"
    texts = dict[str, list[str]]()
    held = list[str]()
    for line in lines:
        if found := NAME.match(line):
            held = texts.setdefault(found[1], [])
            line = line[found.end(1) :]
        held.append(line)
    return Dump(
        rank=RankPrint(rank=rank, tp=tp, pp=pp, dp=dp, parts=()),
        iteration=(number if after else number - 1) if given else None,
        after=after,
        process=int(given[7]) if given else 0,
        tensors={tensor: _printed(" ".join(text)) for tensor, text in texts.items()},
    )


def _printed(text: str) -> Printed:
    begin = text.find("tensor(")
    body = text[begin + len("tensor(") :] if begin >= 0 else text
    ends = [end for word in (" device=", " dtype=", " requires_grad=", ")") if (end := body.find(word)) >= 0]
    words = NUMBER.findall(body[: min(ends, default=len(body))])[:MOST]
    numbers = [word for word in words if word not in ("[", "]", "...")]
    form = "".join(word[0] if word in ("[", "]", "...") else "0" for word in words)
    slack = [_slack(word) for word in numbers]
    return Printed(values=np.array(numbers, float), slack=np.array(slack, float), form=form)


def _slack(word: str) -> float:
    """Half of the last place; 0 of "1.", which torch prints where all numbers are whole."""
    digits, _, exponent = word.partition("e")
    places = len(digits.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - places) if places else 0.0


def compare_dumps(before: Path, after: Path) -> tuple[list[str], list[RestartFinding], list[str]]:
    """What was compared, findings and notes, of the dumps at two paths. ValueError where one has none."""
    sides = [read_dumps(path, side) for path, (_, side) in zip((before, after), PARTS, strict=True)]
    for field_, path, dumps in zip("AB", (before, after), sides, strict=True):
        require(
            any(dump.tensors for dump in dumps),
            field_,
            path,
            "holds no weights as text, with which alone text is compared",
        )
    at, pairs = _pairs(*sides)
    findings = list[RestartFinding]()
    for dumps in ([one for one, _ in pairs], [two for _, two in pairs]):
        findings += [f for f in _replicas(dumps) if (f.kind, f.tensor) not in {(g.kind, g.tensor) for g in findings}]
    changed = _changed(pairs)
    findings += changed
    shown = max((len(p.values) for one, _ in pairs for p in one.tensors.values()), default=0)
    tensors = sum(len(one.tensors.keys() & two.tensors.keys()) for one, two in pairs)
    compared = [f"text dumps of {len(pairs)} ranks, {tensors} tensors, {at}"]
    notes = [
        f"text shows at most {shown} numbers of a tensor, to four places: what is equal in it may still differ",
        "not in the text, so not compared: Adam's moments and step, weight decay, rate, generators, samples",
    ]
    unmatched = {d.rank.rank for d in sides[0]} ^ {d.rank.rank for d in sides[1]}
    notes += [f"{len(unmatched)} ranks have a dump on one side alone"] if unmatched else []
    return compared, findings, notes


def _pairs(old: Sequence[Dump], new: Sequence[Dump]) -> tuple[str, list[tuple[Dump, Dump]]]:
    """Of each rank the dump before the restart and the one after it, and of which iterations they are.

    That is the last state which the one wrote after an iteration and the other, another process, before the next.
    """
    first = {(d.iteration, d.rank.rank): d for d in sorted(old, key=lambda d: (d.after, d.process))}
    second = {(d.iteration, d.rank.rank): d for d in sorted(new, key=lambda d: (not d.after, d.process))}
    both = first.keys() & second.keys()
    restarted = {key for key in both if first[key].process != second[key].process} or both
    known = {key for key in restarted if key[0] is not None}
    if known:
        last = max(number for number, _ in known if number is not None)
        keys = sorted(key for key in known if key[0] == last)
        return f"after iteration {last}", [(first[key], second[key]) for key in keys]
    newest = {d.rank.rank: d for d in sorted(old, key=lambda d: d.iteration or 0)}
    oldest = {d.rank.rank: d for d in sorted(new, key=lambda d: -(d.iteration or 0))}
    ranks = sorted(newest.keys() & oldest.keys())
    words = sorted({f"{newest[r].iteration} and {oldest[r].iteration}" for r in ranks})
    return f"after iterations {', '.join(words) or 'unknown'}", [(newest[r], oldest[r]) for r in ranks]


def _apart(one: Printed, other: Printed) -> float:
    """The difference relative to the larger norm; 0.0 where rounding explains it, 1.0 where the forms differ."""
    if one.form != other.form:
        return 1.0
    same = np.isclose(one.values, other.values, rtol=0, atol=1.01 * (one.slack + other.slack), equal_nan=True)
    if same.all():
        return 0.0
    size = max(float(np.linalg.norm(one.values)), float(np.linalg.norm(other.values)), 1e-38)
    return float(np.linalg.norm(one.values - other.values)) / size


def _default(name: str) -> float | None:
    """The initial value of a norm's weight or of a bias; None of others."""
    return 0.0 if name.endswith("bias") else 1.0 if "norm" in name.lower() else None


def _changed(pairs: Sequence[tuple[Dump, Dump]]) -> list[RestartFinding]:
    """A finding for each tensor whose text differs."""
    found = dict[str, tuple[float, list[RankPrint], Printed, Printed]]()
    for one, two in pairs:
        for name in one.tensors.keys() & two.tensors.keys():
            if away := _apart(one.tensors[name], two.tensors[name]):
                held = found.get(name)
                pair = (one.tensors[name], two.tensors[name]) if not held or away > held[0] else held[2:]
                found[name] = (max(away, held[0] if held else 0.0), [*(held[1] if held else []), one.rank], *pair)
    matrices = {n for one, two in pairs for n in one.tensors.keys() & two.tensors.keys() if _default(n) is None}
    if len(matrices) > 1 and all(n in found and found[n][0] > UNRELATED for n in matrices):
        return [RestartFinding(kind="run", what="no matrix shows the numbers of the other side: another run, or seed")]
    return [_finding(name, *facts) for name, facts in sorted(found.items())]


def _finding(name: str, away: float, ranks: Sequence[RankPrint], old: Printed, new: Printed) -> RestartFinding:
    value = _default(name)
    if old.form != new.form:
        what = f"the text has another form: {len(old.values)} numbers, now {len(new.values)}: another shape"
        return RestartFinding(kind="run", tensor=name, ranks=tuple(ranks), what=what, size=away)
    reset = value is not None and bool((new.values == value).all()) and not (old.values == value).all()
    kind, what = "not-restored", f"the {len(old.values)} numbers shown are {share(away)} of their norm away"
    if reset:
        kind, what = "reset", f"all {len(new.values)} numbers shown are {value:g} now, they were {old.values[0]:g}, ..."
    return RestartFinding(kind=kind, tensor=name, ranks=tuple(ranks), what=what, size=away)


def _replicas(dumps: Sequence[Dump]) -> list[RestartFinding]:
    """Findings for replicas that differ: data-parallel ones, norms across tensor ranks, tied modules across stages."""
    found = list[RestartFinding]()
    held = [(d.rank, name, printed) for d in dumps for name, printed in d.tensors.items()]
    for kind, axis in (("data-replicas", "dp"), ("tensor-replicas", "tp"), ("tied", "pp")):
        rest = [a for a in ("tp", "pp", "dp") if a != axis]
        usable = [h for h in held if axis == "dp" or ("norm" in h[1].lower() if axis == "tp" else "tied" in h[1])]
        lines = grouped(usable, lambda h, rest=rest: (h[1], *(getattr(h[0], a) for a in rest)))  # type: ignore[misc]
        odd = dict[str, tuple[float, list[RankPrint]]]()
        for (name, *_), line in lines.items():
            for rank, _, printed in line[1:]:
                if away := _apart(line[0][2], printed):
                    size, ranks = odd.get(name, (0.0, []))
                    odd[name] = (max(size, away), [*ranks, rank])
        for name, (size, ranks) in odd.items():
            what = f"the numbers shown are {share(size)} of their norm away from those of the first replica"
            found.append(RestartFinding(kind=kind, tensor=name, ranks=tuple(ranks), what=what, size=size))
    return found
