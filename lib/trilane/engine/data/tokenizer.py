"""Text to token ids: bytes, or a Hugging Face tokenizer from a local folder."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trilane.utils.validation import require

BYTES_END = 256


# Names that tokenizers give the token which ends a document; the first one present is taken.
END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]", "<EOS>")


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """`size` ids, `end` closing each document, `digest` of all that decides them. Bytes need no tokenizers package.

    `eod`, `vocab_size` and `unique_identifiers` are what megatron-core's GPT dataset asks of a tokenizer.
    """

    name: str
    size: int
    end: int
    digest: str
    coder: Any = field(default=None, repr=False)

    @property
    def eod(self) -> int:
        """End of document, in megatron-core's word."""
        return self.end

    @property
    def vocab_size(self) -> int:
        """Number of ids, in megatron-core's word."""
        return self.size

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What tells this tokenizer from others in megatron-core's index cache."""
        return {"tokenizer": self.name, "digest": self.digest}

    def encode(self, text: str) -> np.ndarray:
        """Ids of one document, int32, its end included."""
        ids = np.frombuffer(text.encode(), np.uint8) if self.coder is None else self.coder.encode(text).ids
        return np.append(np.asarray(ids, np.int32), np.int32(self.end))


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", or the one in the folder `name`.

    Raises ValueError where the folder has no tokenizer.json, or that has no end-of-document token.
    """
    if name == "bytes":
        return Tokenizer(name=name, size=257, end=BYTES_END, digest="bytes-257")
    path = Path(name) / "tokenizer.json"
    require(path.is_file(), "data.tokenizer", name, "no folder with a tokenizer.json (known name: bytes)")
    from tokenizers import Tokenizer as Coder

    try:
        coder = Coder.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"data.tokenizer={name}: tokenizer.json cannot be read ({error})") from None
    ends = [coder.token_to_id(token) for token in END_NAMES]
    end = next((e for e in ends if e is not None), None)
    require(end is not None, "data.tokenizer", name, f"has none of the end-of-document tokens {', '.join(END_NAMES)}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert end is not None
    return Tokenizer(name=name, size=coder.get_vocab_size(), end=end, digest=digest, coder=coder)
