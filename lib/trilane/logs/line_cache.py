"""Dull: forms of lines that say nothing, remembered, so that the thousandth of a kind costs a look-up."""

import numpy as np

from trilane.logs.arguments import UNDOTTED
from trilane.logs.prefilter import MAYBE, tells

DIGITS = bytes.maketrans(b"123456789", b"000000000")  # a form is a line with every digit as 0
LONGEST = 1000  # bytes: longer forms hardly come twice
ROOM = 32 << 20  # bytes that the forms may take
FEW = 20_000  # forms known before it can be said that hardly one comes twice
RARE = 0.9  # of the lines have a new form
PAUSE = 7  # blocks


class LineCache:
    """Forms of lines that say nothing. When it is full it is emptied: a log goes on in other words.

    Where hardly a form comes twice, remembering costs more than looking, so for some blocks it is left.
    """

    def __init__(self) -> None:
        self._forms, self._room, self._pause = set[bytes](), ROOM, 0

    def add(self, line: bytes) -> None:
        """No line says anything that differs from this one in digits only."""
        self._remember([line.translate(DIGITS)])

    def tells(self, block: bytes, rest: np.ndarray) -> np.ndarray:
        """What the lines `rest` of a block may say (see tells.py), 0 for known forms."""
        told: np.ndarray = np.zeros(len(rest), np.uint8)
        if not len(rest):
            return told
        lines, forms, known = block.split(b"\n"), block.translate(DIGITS).split(b"\n"), self._forms
        numbers = rest.tolist()
        fresh = [i for i, number in enumerate(numbers) if forms[number] not in known]
        texts = [lines[numbers[i]] for i in fresh]
        found = tells(texts)
        if b"  " in block:
            names = [
                i
                for i, (tell, text) in enumerate(zip(found.tolist(), texts, strict=True))
                if not tell and UNDOTTED.match(text)
            ]
            found[names] = MAYBE
        told[fresh] = found
        if self._pause:
            self._pause -= 1
        else:
            self._remember(
                [
                    f
                    for f, tell in zip((forms[numbers[i]] for i in fresh), found.tolist(), strict=True)
                    if not tell and len(f) < LONGEST
                ]
            )
            if len(fresh) > RARE * len(rest) and len(known) > FEW:
                self._pause = PAUSE
        return told

    def _remember(self, forms: list[bytes]) -> None:
        size = sum(map(len, forms)) + 120 * len(forms)  # what Python adds to the bytes, and their place in the set
        if size > self._room:
            self._forms.clear()
            self._room = ROOM
        self._forms.update(forms)
        self._room -= size
