"""Values that a row has besides its document: an id, loss weights, and a class or the label of an answer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ray_ulysses.data.sources.rows import Content, RowError, TokenRow, describe_type, utf8_text

_LARGEST_WEIGHT = 1_000_000
_ANSWER_LABELS = dict.fromkeys(("true", "1", "1.0"), "true") | dict.fromkeys(("false", "0", "0.0"), "false")


def row_id(value: object) -> str:
    """Return a row's id as text, or an empty string if the id is null; raise RowError for any other type."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RowError(f"the id is {describe_type(value)}, not a string or an integer")
    return utf8_text(str(value))


def row_label(value: object) -> str:
    """Return the class of a row's document as text; raise RowError unless it is an integer or a string."""
    # A boolean is a class of 0 or 1.
    if not isinstance(value, str | int):
        raise RowError(f"the class is {describe_type(value)}, not an integer or a string")
    if value == "":
        raise RowError("the class is empty")
    return utf8_text(value) if isinstance(value, str) else str(int(value))


def answer_label(value: object) -> str:
    """Return ``true`` for a desirable answer and ``false`` for another; raise RowError unless it is one of them."""
    label = _ANSWER_LABELS.get(str(value).lower())
    if label is None:
        raise RowError(f"the label is {value!r:.40}, not true, false, 1 or 0 (other classes need --text-field)")
    return label


def row_weight(value: object, content: Content) -> float | NDArray[np.float32]:
    """Return the row's loss weight, or one weight per token. The default is 1.

    Raises:
        RowError: A weight is negative or not a number, or the list's length is not the number of tokens.
    """
    if value is None:
        return 1.0
    if not isinstance(value, list | np.ndarray):
        return _weight(value, "the weight")
    if not isinstance(content, TokenRow):
        raise RowError("the weight is a list, but only rows of tokens can have one weight per token")
    if len(value) != content.tokens.size:
        raise RowError(f"there are {len(value)} weights for {content.tokens.size} tokens")
    # A mask may contain booleans.
    numbers = (float(one) if isinstance(one, bool | np.bool_) else one for one in value)
    return np.array([_weight(one, f"weight {place}") for place, one in enumerate(numbers)], dtype=np.float32)


def _weight(value: object, name: str) -> float:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise RowError(f"{name} is {describe_type(number)}, not a number")
    if not 0 <= number <= _LARGEST_WEIGHT:
        raise RowError(f"{name} is {number!r:.40}, not a number from 0 to {_LARGEST_WEIGHT:,}")
    return float(np.float32(number))
