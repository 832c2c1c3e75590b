"""One file with the dumps of many hosts is taken apart: pdsh, ds_ssh, clush, dshbak, srun --label."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from dumps import faulthandler_text, pyspy_text
from job import DATA, STEP, Stack, c10d

from trilane.diagnose.hang.merged import texts_by_host
from trilane.diagnose.hang.verdict import diagnose_hang

LOSS: Stack = (*c10d("broadcast"), ("_aggregate_total_loss", "deepspeed/runtime/pipe/engine.py", 540), *STEP)
HOSTS = ("node1", "node2", "node10")


def dumps(host: int) -> list[str]:
    """Four ranks of a host, with the launcher; the second host's third rank is in its data."""
    parts = [pyspy_text((("_invoke_run", "torch/distributed/elastic/agent/server/api.py", 1),), 90)]
    stacks = [DATA.stack if (host, local) == (1, 2) else LOSS for local in range(4)]
    return "".join([*parts, *(pyspy_text(stack, 100 + local) for local, stack in enumerate(stacks))]).splitlines()


def pdsh(twice: bool = False, names: tuple[str, ...] = HOSTS, gap: str = ": ") -> str:
    """Lines of all hosts as they come: each host's in order, between those of the others."""
    left = {name: dumps(number) for number, name in enumerate(names)}
    left = {name: [x for line in lines for x in [line] * (1 + twice)] for name, lines in left.items()}
    random, lines = Random(3), ["/usr/bin/pdsh", "hostfile=hostfile"]
    while any(left.values()):
        name = random.choice([name for name, rest in left.items() if rest])
        lines.append(f"{name}{gap}{left[name].pop(0)}".rstrip())
    return "\n".join([*lines, "pdsh@login: node2: ssh exited with exit code 123"]) + "\n"


def again() -> str:
    """The recipe run twice into one file, first while the ranks still trained."""
    before = "\n".join(f"{name}: {line}" for name in HOSTS for line in pyspy_text(STEP, 102).splitlines())
    return f"{before}\n{pdsh()}"


def dshbak() -> str:
    rule = "-" * 16
    blocks = [("node[1,10]", dumps(0)), ("node2", dumps(1))]
    return "".join(f"{rule}\n{head}\n{rule}\n" + "\n".join(lines) + "\n" for head, lines in blocks)


FORMS: dict[str, Callable[[], str]] = {
    "pdsh": pdsh,
    "every line twice": lambda: pdsh(twice=True),
    "the recipe twice": again,
    "clush": lambda: "".join(f"{name}: {line}\n" for n, name in enumerate(HOSTS) for line in dumps(n)),
    "dshbak": dshbak,
    "srun --label": lambda: pdsh(names=(" 0", " 1", "10")),
    "mpirun": lambda: pdsh(names=("[1,0]<stdout>", "[1,1]<stdout>", "[1,2]<stdout>"), gap=":"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_culprit_in_a_file_of_three_hosts_is_named(form: str, tmp_path: Path) -> None:
    (tmp_path / "dump.txt").write_text(FORMS[form]())
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (6,), verdict.to_text()
    assert sum(len(group.ranks) for group in verdict.groups) == 12
    named = form not in ("srun --label", "mpirun")
    assert verdict.exclude == ("--exclude=node2" if named else "")


@pytest.mark.parametrize("label", ["{}: ", "[rank{}]: "])
@pytest.mark.parametrize("write", [pyspy_text, faulthandler_text])
def test_where_a_label_has_one_process_it_is_the_rank(
    write: Callable[[Stack], str], label: str, tmp_path: Path
) -> None:
    """`srun --label` of a job with a task for each GPU, and what torch puts before the lines of a rank."""
    texts = [write(DATA.stack if rank == 2 else LOSS) for rank in range(4)]
    lines = [f"{label.format(rank)}{line}" for rank, text in enumerate(texts) for line in text.splitlines()]
    (tmp_path / "dump.txt").write_text("\n".join(lines) + "\n")
    assert diagnose_hang(tmp_path).suspects == (2,)


def test_without_a_line_for_the_process_each_main_thread_is_one(tmp_path: Path) -> None:
    """As document 003 shows them."""
    frames = "\n".join(f"    {f} ({file}:{line})" for f, file, line in LOSS)
    other = "\n".join(f"    {f} ({file}:{line})" for f, file, line in DATA.stack)
    heads = [f'Thread 0x7F0{n} (active): "MainThread"\n{other if n == 5 else frames}' for n in (*range(8), 3)]
    text = "\n".join(f"host{n // 4 + 1}: {line}" for n, part in enumerate(heads[:8]) for line in part.splitlines())
    again = "\n".join(f"host1: {line}" for line in heads[8].splitlines())
    (tmp_path / "dump.txt").write_text(f"{text}\n{again}\n")
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and sum(len(group.ranks) for group in verdict.groups) == 8


@pytest.mark.parametrize("text", ["", "a: b\nc: d\n", pyspy_text(LOSS), "-" * 70_000, "node[1-\n" * 9, "x: " * 40_000])
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert texts_by_host(text) == {"": text}


def test_a_list_of_hosts_is_spelled_out() -> None:
    rule = "-" * 16
    text = f"{rule}\ngpu[08-10,12]-ib,login (5)\n{rule}\nProcess 7: python\n"
    assert list(texts_by_host(text)) == ["gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu12-ib", "login"]
