"""Words: which of many words a line holds."""

from collections.abc import Iterable

DIGITS = b"0123456789"
MOST, LONGEST = 1 << 12, 1 << 10  # lines that are remembered, and bytes of one


class Words:
    """Which of some hundred words a line holds. Lines that are alike but for their numbers hold the same words without
    digits, so that the words are looked for in the first of them alone."""

    def __init__(self, words: Iterable[bytes]) -> None:
        self._words = [(word.translate(None, DIGITS), word) for word in words]
        self._seen = dict[bytes, list[bytes]]()

    def of(self, line: bytes) -> list[bytes]:
        """The words in the line, in their order."""
        text = line.translate(None, DIGITS)  # has every word that the line has, without its digits
        likely = self._seen.get(text)
        if likely is None:
            likely = [word for rest, word in self._words if rest in text]
            if len(text) <= LONGEST:
                if len(self._seen) >= MOST:
                    self._seen.clear()
                self._seen[text] = likely
        return [word for word in likely if word in line]
