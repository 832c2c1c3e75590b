"""Prose: what the text around a hand-written table says of its rows: shapes, sizes of the machine, constants."""

import re

ASSIGNED = re.compile(
    r"\b(N?HIDDEN(?:_SIZE)?|N?LAYERS|N?HEADS|NUM_LAYERS|SEQ_LEN(?:GTH)?|VOCAB_(?:SIZE|LENGTH)|[TPD]P(?:_SIZE)?|GBS|MBS"
    r"|MICRO_BATCH_SIZE|GLOBAL_BATCH_SIZE)\s*=\s*(\d[\d_]*(?:\.\d+)?)(k?)\b(?!\s*\*)"
)

OURS = {
    **{"HIDDEN": "hidden", "NHIDDEN": "hidden", "HIDDEN_SIZE": "hidden", "NHIDDEN_SIZE": "hidden", "NLAYERS": "layers"},
    **{"LAYERS": "layers", "NUM_LAYERS": "layers", "NHEADS": "heads", "HEADS": "heads", "SEQ_LEN": "seq"},
    **{"SEQ_LENGTH": "seq", "VOCAB_SIZE": "vocab", "VOCAB_LENGTH": "vocab", "GBS": "gbs", "GLOBAL_BATCH_SIZE": "gbs"},
    **{"MBS": "mbs", "MICRO_BATCH_SIZE": "mbs", "TP": "tp", "PP": "pp", "DP": "dp"},
    **{"TP_SIZE": "tp", "PP_SIZE": "pp", "DP_SIZE": "dp"},
}

PERL = {"gbs": "gbs", "seqlen": "seq", "ms": "size"}  # variables of the one-line programs that compute TFLOPs
SCRIPT = re.compile(r"\$(gbs|seqlen|ms)=(\d+(?:\.\d+)?)")
TFLOPS_SEQ = re.compile(r"\*4\*2\*(\d+)\*\$gbs")

SENTENCES = [
    ("seq", re.compile(r"[Ss]eq(?:uence)?[ _-]?len(?:gth)? is (\d+)")),
    ("size", re.compile(r"\b(\d+(?:\.\d+)?)B model\b")),
    ("nodes", re.compile(r"^\W*(\d+) nodes?, ")),
    ("dp", re.compile(r"\b(\d+) replicas?\b")),
    ("told_size", re.compile(r"Model size: (\d+(?:\.\d+)?)B")),
    ("gpus_per_node", re.compile(r"--gres=gpu:([1-9]\d*)")),
    ("gpus_per_node", re.compile(r"\b(\d+)[ -]gpus?(?: per)? nodes?\b")),
]

LASTING = ("seq", "vocab", "gpus_per_node")  # said once, meant for the whole document
OF_THE_MACHINE = ("nodes", "dp")  # said in front of a shape, as in `10 nodes, 1 replica`


class Prose:
    """Takes the lines outside tables in order; `facts` is what holds at this line.

    A new heading forgets all but LASTING; a new group of assignments that names a shape forgets the shape before it.
    What a list item, `all` or a script says holds for the whole section, also for the tables above it.
    """

    def __init__(self) -> None:
        self.facts: dict[str, float] = {}
        self.section = 0  # counts headings
        self.said: dict[int, dict[str, set[float]]] = {}  # for whole sections
        self._group = False
        self._fenced = False

    def read(self, line: str) -> None:
        """One line of text."""
        if line.lstrip().startswith("```"):
            self._fenced = not self._fenced
        elif line.startswith("#") and not self._fenced:
            self.section += 1
            self.facts = {k: v for k, v in self.facts.items() if k in LASTING}
            self._group = False
            return
        if line.startswith("* "):  # a remark about results
            return
        found = assignments(line)
        wide = line.startswith("-") or " all " in f" {line}" or "$" in line
        if "$" in line:
            found |= script(line)
        if wide:
            for name, value in found.items():
                self.said.setdefault(self.section, {}).setdefault(name, set()).add(value)
        if "$gbs" in line or "$ms" in line:
            return
        if {"hidden", "layers"} & found.keys() and not self._group:
            self.facts = {k: v for k, v in self.facts.items() if k in LASTING + OF_THE_MACHINE}
        self._group = bool(found)
        self.facts |= found

    def around(self, section: int) -> dict[str, float]:
        """What is said of a whole section, where it is said in one way only."""
        return {name: min(values) for name, values in self.said.get(section, {}).items() if len(values) == 1}


def assignments(line: str) -> dict[str, float]:
    """The facts of a line, in our names; a name with two values is a choice, no fact."""
    values: dict[str, set[float]] = {}
    for name, digits, thousand in ASSIGNED.findall(line):
        values.setdefault(OURS[name], set()).add(float(digits.replace("_", "")) * (1000 if thousand else 1))
    found = {name: min(told) for name, told in values.items() if len(told) == 1}
    for name, pattern in SENTENCES:
        if told := pattern.search(line):
            found.setdefault(name, float(told[1]))
    return found


def script(line: str) -> dict[str, float]:
    """Batch, sequence and size (billions) that a one-line program computes TFLOPs with."""
    found = {PERL[name]: float(value) for name, value in SCRIPT.findall(line)}
    if seq := TFLOPS_SEQ.search(line):
        found["seq"] = float(seq[1])
    return found
