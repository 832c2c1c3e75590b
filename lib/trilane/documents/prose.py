"""Facts in the text around a table that hold for its rows: model shapes, machine sizes, constants."""

import re

from trilane.documents.markdown import known_columns

ASSIGNED = re.compile(
    r"\b(N?HIDDEN(?:_SIZE)?|N?LAYERS|N?HEADS|NUM_LAYERS|SEQ_LEN(?:GTH)?|VOCAB_(?:SIZE|LENGTH)|[TPD]P(?:_SIZE)?|GBS|MBS"
    r"|MICRO_BATCH_SIZE|GLOBAL_BATCH_SIZE)\s*=\s*(\d[\d_]*(?:\.\d+)?)(k?)\b(?!\s*\*)"
)
PERL = {"gbs": "gbs", "seqlen": "seq", "ms": "size"}  # variables of the one-line programs that compute TFLOPs
SCRIPT = re.compile(r"\$(gbs|seqlen|ms)=(\d+(?:\.\d+)?)")
TFLOPS_SEQ = re.compile(r"\*4\*2\*(\d+)\*\$gbs")
SENTENCES = [
    ("seq", re.compile(r"[Ss]eq(?:uence)?[ _-]?len(?:gth)? is (\d+)")),
    ("size", re.compile(r"\b(\d+(?:\.\d+)?)B model\b")),
    ("nodes", re.compile(r"^\W*(\d+) nodes?, ")),
    ("dp", re.compile(r"\b(\d+) replicas?\b")),
    ("stated_size", re.compile(r"Model size: (\d+(?:\.\d+)?)B")),
    ("gpus_per_node", re.compile(r"--gres=gpu:([1-9]\d*)")),
    ("gpus_per_node", re.compile(r"\b(\d+)[ -]gpus?(?: per)? nodes?\b")),
]
LASTING = ("seq", "vocab", "gpus_per_node")  # hold for the whole document
OF_THE_MACHINE = ("nodes", "dp")  # precede a shape, as in `10 nodes, 1 replica`


class Prose:
    """Reads the lines outside tables in order; `facts` holds at the current line.

    A heading clears all facts but LASTING; a new group of assignments with a shape clears the shape before it. The
    facts of a list item, of a line with `all` and of a script hold for the whole section, also for tables above them.
    """

    def __init__(self) -> None:
        self.facts: dict[str, float] = {}
        self.section = 0  # counts headings
        self.by_section: dict[int, dict[str, set[float]]] = {}
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
                self.by_section.setdefault(self.section, {}).setdefault(name, set()).add(value)
        if "$gbs" in line or "$ms" in line:
            return
        if {"hidden", "layers"} & found.keys() and not self._group:
            self.facts = {k: v for k, v in self.facts.items() if k in LASTING + OF_THE_MACHINE}
        self._group = bool(found)
        self.facts |= found

    def around(self, section: int) -> dict[str, float]:
        """The facts of a whole section that have a single value."""
        return {name: min(values) for name, values in self.by_section.get(section, {}).items() if len(values) == 1}


def assignments(line: str) -> dict[str, float]:
    """The facts of a line, named as table columns; a name with two values is a choice, not a fact."""
    values: dict[str, set[float]] = {}
    for name, digits, thousand in ASSIGNED.findall(line):
        column = known_columns()[name.lower().replace("_", "")]
        values.setdefault(column, set()).add(float(digits.replace("_", "")) * (1000 if thousand else 1))
    found = {name: min(numbers) for name, numbers in values.items() if len(numbers) == 1}
    for name, pattern in SENTENCES:
        if match := pattern.search(line):
            found.setdefault(name, float(match[1]))
    return found


def script(line: str) -> dict[str, float]:
    """Batch, sequence length and size (billions) in a one-line program that computes TFLOPs."""
    found = {PERL[name]: float(value) for name, value in SCRIPT.findall(line)}
    if seq := TFLOPS_SEQ.search(line):
        found["seq"] = float(seq[1])
    return found
