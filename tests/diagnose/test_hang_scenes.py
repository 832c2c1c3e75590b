"""Hangs whose culprits are known: who is named, or that stacks cannot show it; scenes.json has the
stacks.

Frames are those of Megatron-LM, megatron-core 0.16.1 and DeepSpeed 0.19.8
(github.com/NVIDIA/Megatron-LM, github.com/deepspeedai/DeepSpeed), lines partly so. A hook of a
parameter, behind a "+", stands in an unnamed thread of its own, as autograd's thread for a GPU has
it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from dumps import faulthandler_text, pyspy_text, topology
from job import Stack

from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.suspects import OPEN

SCENES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("scenes.json").read_text())


def stack(text: str) -> Stack:
    """`function file:line < ...`, innermost first."""
    frames = [part.replace(":", " ").split() for part in text.split(" < ")]
    return tuple((name, file, int(line)) for name, file, line in frames)


def dump(text: str, style: str, pid: int) -> str:
    """py-spy's text or faulthandler's."""
    main, *hooks = map(stack, text.split(" + "))
    if style == "text":
        frames = ("".join(f"    {f} ({file}:{n})\n" for f, file, n in hook) for hook in hooks)
        return pyspy_text(main, pid) + "".join(f"Thread 8287 (active)\n{lines}" for lines in frames)
    threads = [faulthandler_text(hook, "Thread").split("\n\n")[1] + "\n\n" for hook in hooks]
    return "".join(threads).replace("40a1b2c740", "40deadbe40") + faulthandler_text(main)


@pytest.mark.parametrize("name", SCENES)
def test_who_is_to_blame_is_named_or_it_is_said_that_stacks_cannot_show_it(name: str, tmp_path):
    """ "open": those are named with the doubt that remains."""
    scene, style = SCENES[name], "text" if len(name) % 2 else "faults"
    for ranks, text in scene["stacks"]:
        for rank in ranks:
            (tmp_path / f"rank_{rank}.txt").write_text(dump(text, style, 100 + rank))
    tp, pp, dp = scene["tp, pp, dp"]
    facts = [{"rank": int(rank), **values} for rank, values in scene.get("facts", {}).items()]
    if tp:
        topology(tmp_path, tp, pp, dp, ranks=facts, hosts=["a", "b", "c"], gpus_per_node=4)
    verdict = diagnose_hang(tmp_path)
    named, sure = scene["suspects"], not scene.get("open")
    assert sorted(verdict.suspects) == named, verdict.summary()
    assert all((OPEN not in reason) is sure for reason in verdict.reasons.values()), verdict.reasons
    assert named or OPEN in verdict.paragraph
    assert sure or verdict.exclude == ""
