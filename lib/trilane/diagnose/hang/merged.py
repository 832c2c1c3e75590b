"""One text with the dumps of many hosts (pdsh, ds_ssh, clush, dshbak, `srun --label`, mpirun), by host."""

import re
from collections import defaultdict
from collections.abc import Iterator

from trilane.utils.tables import SEQUENCE

# What stands before each line. pdsh and clush: `node1: `; srun --label: ` 3: `; mpirun --tag-output: `[1,3]<stdout>:`;
# torch: `[rank3]: `.
PREFIX = re.compile(r"\s{0,8}(?:\[(?:\d{1,4},|rank)(\d{1,6})\](?:<std\w{3}>)?: ?|([\w.-]{1,80}):(?: |$))")

# The first line of a process or a thread in a dump, and the heading of dshbak and `clush -b` between two rules.
HEAD = re.compile(r"(?:Process \d{1,9}: |(?:Current thread|Thread) (?:0x)?[0-9a-fA-F]{1,16} (?:\(|\[)|Timeout \()")
RULE = re.compile(r"-{8,}\s*$")
NODES = re.compile(r"([\w.,\[\]-]{1,2000})(?: \(\d{1,6}\))?\s*$")
BRACKET = re.compile(r"([^\[\]]*)\[([\d,-]{1,500})\]([^\[\]]*)$")

MOST_HOSTS = 100_000


def texts_by_host(text: str) -> dict[str, str]:
    """The text of each host, without what stands before its lines, in the order in which the hosts appear.

    A text of one process or node, whose lines name no host, is given back under "". Lines of no host (a banner, an
    error of the tool itself) are left out; of a host whose lines all come twice one of each is kept.
    """
    if not HEAD.search(text):  # a log, which may be long
        return {"": text}
    lines = [SEQUENCE.sub("", line) if "\x1b" in line else line for line in text.splitlines()]
    found = _blocks(lines) or _prefixed(lines)
    ending = "\n" if text.endswith("\n") else ""
    return {host: "\n".join(_single(own)) + ending for host, own in found.items()} or {"": text}


def _prefixed(lines: list[str]) -> dict[str, list[str]]:
    """Lines by the host before them; a host counts where a process or a thread begins behind its name."""
    parts = [(match[1] or match[2], line[match.end() :]) for line in lines if (match := PREFIX.match(line))]
    hosts = dict.fromkeys(host for host, rest in parts if HEAD.match(rest))
    found: dict[str, list[str]] = {host: [] for host in hosts}
    for host, rest in parts:
        if host in found:
            found[host].append(rest)
    return found


def _blocks(lines: list[str]) -> dict[str, list[str]]:
    """Lines by the hosts of the heading above them: several hosts of one output have it each."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    hosts: list[str] = []
    for number, line in enumerate(lines):
        above, below = lines[number - 1 : number], lines[number + 1 : number + 2]
        heading = NODES.match(line) if above and below and RULE.match(above[0]) and RULE.match(below[0]) else None
        if heading:
            hosts = list(_host_names(heading[1]))
        elif not RULE.match(line):
            for host in hosts:
                found[host].append(line)
    return {host: own for host, own in found.items() if any(HEAD.match(line) for line in own)}


def _host_names(text: str) -> Iterator[str]:
    """The hosts of a list such as `node[1-4,7],login`; digits keep their leading zeros."""
    for part in re.split(r",(?![^\[]*\])", text):
        match = BRACKET.match(part)
        for span in match[2].split(",") if match else ():
            first, _, last = span.partition("-")
            if first.isdigit() and (last or first).isdigit():
                stop = min(int(last or first), int(first) + MOST_HOSTS)
                for number in range(int(first), stop + 1):
                    yield f"{match[1]}{number:0{len(first)}d}{match[3]}" if match else ""
        if match is None and part:
            yield part


def _single(lines: list[str]) -> list[str]:
    """The lines, without the second of each pair where every process and thread is announced twice in a row."""
    heads = [number for number, line in enumerate(lines) if HEAD.match(line)]
    pairs = sum(1 for number in heads if lines[number : number + 1] == lines[number + 1 : number + 2])
    if len(heads) < 2 or 2 * pairs < len(heads):
        return lines
    kept: list[str] = []
    twice = False
    for line in lines:
        twice = not twice and bool(kept) and line == kept[-1]
        if not twice:
            kept.append(line)
    return kept
