"""Known: how the rank or the node that something happened on is known."""

from enum import IntEnum


class Known(IntEnum):
    """How a rank or a node is known; a node is blamed only from MAP on."""

    NO = 0
    ASSUMED = 1  # by an order, such as that of names
    MAP = 2  # by a map from ranks to nodes that was read
    LINE = 3  # one line prints it
