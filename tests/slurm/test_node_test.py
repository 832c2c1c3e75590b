"""Which nodes of a job train: by what the test of each alone, and of pairs, finds; on nodes that are made up."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from trilane.engine.bench import node_test as gpu_health
from trilane.slurm.nodes import allocation, node_test
from trilane.slurm.nodes.node_test import Group, Result

FAST = {"matmul FLOP/s": 100.0, "PCIe B/s": 10.0}


class Nodes:
    """Nodes with their speed (1: as the others, 0: broken) alone and in a network."""

    def __init__(self, alone: dict[str, float], network: dict[str, float], doubtful: Sequence[str] = ()) -> None:
        self.alone, self.network, self.doubtful, self.pairs = alone, network, doubtful, list[Group]()

    def __call__(self, mode: str, groups: Sequence[Group]) -> dict[Group, Result]:
        self.pairs += groups if mode == "pair" else []
        return {group: self.result(mode, group) for group in groups}

    def result(self, mode: str, group: Group) -> Result:
        if mode == "pair":
            share = min(self.network.get(node, 1.0) for node in group)
            return Result(rates={"all_reduce B/s": 5.0 * share}) if share else Result(broken="no answer")
        share = self.alone.get(group[0], 1.0)
        doubtful = "ECC errors" if group[0] in self.doubtful else ""
        return (
            Result(rates={k: v * share for k, v in FAST.items()}, doubtful=doubtful)
            if share
            else Result(broken="no GPU")
        )


@pytest.mark.parametrize(
    ("count", "alone", "network", "broken", "slow"),
    [
        (4, {}, {}, [], []),
        (2, {"b": 0.7}, {}, [], ["b"]),
        (2, {"b": 0.8}, {}, [], []),
        (3, {"b": 0.7}, {}, [], ["b"]),
        (3, {"a": 0.4, "b": 0.4, "c": 0.4}, {}, [], []),  # all slow: nothing to compare with
        (4, {"a": 0.0}, {}, ["a"], []),
        (2, {"a": 0.0, "b": 0.0}, {}, [], []),  # the test's own fault
        (2, {}, {"b": 0.0}, [], []),  # which of the two?
        (3, {}, {"a": 0.0}, ["a"], []),
        (4, {}, {"b": 0.0}, ["b"], []),
        (5, {}, {"e": 0.0}, ["e"], []),  # the odd one
        (6, {}, {"c": 0.3}, [], ["c"]),
        (7, {}, {"c": 0.6}, [], []),
        (8, {}, {"a": 0.0, "h": 0.3}, ["a"], ["h"]),
        (4, {"a": 0.0}, {"d": 0.0}, ["a", "d"], []),
        (4, {}, {"a": 0.0, "c": 0.0, "d": 0.0}, [], []),
    ],
)
def test_what_is_slow_or_broken_is_found_with_any_number_of_nodes(
    count: int, alone: dict[str, float], network: dict[str, float], broken: list[str], slow: list[str]
) -> None:
    nodes = Nodes(alone, network)
    found = node_test.findings("abcdefgh"[:count], nodes, is_cpu=False)
    assert (list(found.broken), list(found.slow)) == (broken, slow)
    assert len(set(nodes.pairs)) == len(nodes.pairs), "the same two were tried twice"


def test_a_node_that_may_fail_is_left_out_before_the_others_and_a_slow_one_before_it() -> None:
    found = node_test.findings("abcd", Nodes({"a": 0.5}, {}, doubtful=["b"]), is_cpu=False)
    for count, chosen in ((2, "cd"), (3, "bcd"), (4, "abcd")):
        choice = allocation.choose("abcd", count, found.broken, found.slow)
        assert "".join(choice.chosen) == chosen, "in the order of the job"
        assert set(choice.left_out) | set(choice.slow) == {"a", "b"}


def test_too_few_nodes_are_named_with_their_reasons() -> None:
    with pytest.raises(
        ValueError, match=r"^nodes=a,c: the plan needs 3 nodes, and 2 of the job's 3 are left: b: no GPU$"
    ):
        allocation.choose("abc", 3, {"b": "no GPU"}, {})


def test_half_of_the_nodes_may_import_for_minutes_and_then_the_others_are_late() -> None:
    """128 nodes that read Python's files from one file system for the first time."""
    empty = Path("/dev/null")

    def step(begin: float, ready: float) -> node_test._Step:
        return node_test._Step(process=SimpleNamespace(), output=empty, errors=empty, begin=begin, ready=ready)

    now = node_test.time.monotonic()
    late = step(now - 300, 0.0)
    assert not node_test._is_late(late, [late, step(now - 300, 200.0), step(now - 300, 0.0)])
    assert node_test._is_late(late, [late, step(now - 300, 60.0), step(now - 300, 80.0)])
    assert node_test._is_late(late, [late, step(now - 300, 60.0)])
    assert node_test._is_late(step(now - 300, 200.0), []) and not node_test._is_late(step(now - 300, 250.0), [])


CARDS = {
    "gpu index,memory.used": [["0", "4"], ["1", "5"]],
    "gpu index,ecc.errors.uncorrected.volatile.total": [["0", "0"], ["1", "[N/A]"]],
    "gpu index,retired_pages.pending": [["0", "No"], ["1", "[N/A]"]],
    "remapped-rows gpu_bus_id,remapped_rows.pending,remapped_rows.failure": [["A", "0", "0"], ["B", "No", "No"]],
}


@pytest.mark.parametrize(
    ("change", "broken", "doubtful"),
    [
        ({}, "", ""),
        ({name: [] for name in CARDS}, "", ""),  # no nvidia-smi, or one that knows none of it
        ({"memory.used": [["0", "4"]]}, "1 of 2 GPUs", ""),
        ({"memory.used": [["0", "4"], ["1", "30000"]]}, "GPU 1: 29.3 GiB in use before the training", ""),
        ({"volatile": [["0", "3"]]}, "", "GPU 0: 3 uncorrectable ECC errors since its last reset"),
        ({"retired": [["0", "Yes"]]}, "", "GPU 0: pages to be retired at its next reset"),
        ({"remapped": [["A", "Yes", "No"]]}, "", "GPU A: rows to be remapped at its next reset"),
        ({"remapped": [["A", "1", "1"]]}, "GPU A: its memory has no rows left to remap", ""),
    ],
)
def test_the_health_of_gpus_is_what_nvidia_smi_reports(change: dict, broken: str, doubtful: str) -> None:
    def ask(what: str, names: Sequence[str]) -> list[list[str]]:
        key = f"{what} {','.join(names)}"
        return next((rows for word, rows in change.items() if word in key), CARDS[key])

    assert gpu_health.findings(2, ask) == ([broken] * bool(broken), [doubtful] * bool(doubtful))


def test_the_test_of_a_node_uses_the_sites_network_and_no_signal_before_the_time_limit_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sends it to every step of the job; a node whose test it ended, or whose name leads elsewhere, is broken."""
    srun = (
        'if [ "$1" = --version ]; then echo slurm 23.02.7; exit; fi\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"'
    )
    result = '{"broken": [], "doubtful": [], "rates": {"matmul FLOP/s": 1.0}}'
    for name, text in {
        "srun": srun,
        "python": f"[[ $MASTER_ADDR == n1i ]] || exit; kill -USR1 $$; echo READY; echo '{result}'",
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    steps = node_test.Steps(["n1"], 0, [], {**os.environ, "SLURM_JOB_ID": "7", "HOST_SUFFIX": "i"})
    assert steps("alone", [("n1",)]) == {("n1",): node_test.Result(rates={"matmul FLOP/s": 1.0})}


def test_a_node_without_nvidia_smi_has_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpu_health.findings(0) == ([], [])
