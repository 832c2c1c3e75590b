"""Arguments of Megatron-LM that a plan does not represent: it has another value, they are irrelevant, or unknown."""

import functools
from collections.abc import Mapping
from typing import Any

from trilane.config.plan import Plan
from trilane.interop.megatron_args import BYTES
from trilane.utils.validation import DATA, read_json

ASSUMED = {"lr_decay_style": "linear"}  # the default of the programs
DERIVED = {"max_position_embeddings"}  # from the shape of a plan
TOKENIZERS = ("HuggingFaceTokenizer", "PretrainedFromHF")  # those in a folder


@functools.cache
def known_arguments() -> dict[str, Any]:
    """`one_way`: what a plan has in one way only, other values are listed in `differs`; `ignored`: what is irrelevant,
    such as where and how often files are written, kernels, workers, the launcher's arguments.
    """
    return read_json(DATA / "megatron_arguments.json", "arguments")


def differing(values: Mapping[str, list[str]], plan: Plan) -> tuple[str, ...]:
    """The values that the plan read from them has otherwise, as `name=value: a plan has ...`."""
    wanted: dict[str, Any] = known_arguments()["one_way"]
    if plan.shape.positions == "learned":  # a table of so many rows
        wanted = wanted | {"max_position_embeddings": plan.shape.seq_length}
    given = {n: " ".join(values.get(n, [ASSUMED.get(n, str(value))])) or "yes" for n, value in wanted.items()}
    found = [f"{n}={given[n]}: a plan has {value}" for n, value in wanted.items() if not _same(given[n], value)]
    coder = " ".join(values.get("tokenizer_type", ["its own"] if "vocab_file" in values else []))
    ours = coder == "NullTokenizer" and values.get("vocab_size") == [BYTES]
    if coder and coder not in TOKENIZERS and not ours:
        found.append(f"tokenizer_type={coder}: a plan has the tokenizer of a folder, or {plan.data.tokenizer}")
    if "data_path" not in values:
        found.append(f"data_path=missing: the plan has {plan.data.source}")
    return tuple(found)


def unread(names: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the names that were not read: those irrelevant to a plan, and those unknown."""
    rest, ignored = names - set(known_arguments()["one_way"]) - DERIVED, set(known_arguments()["ignored"])
    return tuple(sorted(rest & ignored)), tuple(sorted(rest - ignored))


def _same(text: str, value: Any) -> bool:
    try:
        return float(text) == float(value)
    except ValueError:
        return text == str(value)
