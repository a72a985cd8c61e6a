"""Field types for pydantic models of file contents, and the conversion of pydantic errors to readable messages."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from ray_ulysses.logging import one_line

T = TypeVar("T")

_MOST_SHOWN = 80
_MOST_FAULTS = 3
_MOST_LEVELS = 50
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
_DIGEST = re.compile(r"[0-9a-f]{1,16}")

YEAR_10000_S = 253_402_300_800
"""Exclusive upper bound for seconds since the epoch: Python's dates end with the year 9999."""

Whole = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A non-negative 64-bit integer; ``true`` and ``1.0`` are invalid."""
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
"""A positive 64-bit integer."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number; integers are valid."""
Seconds = Annotated[float, Field(strict=True, ge=0, lt=YEAR_10000_S, allow_inf_nan=False)]
"""A duration, or a time since the epoch, in seconds."""
Text = Annotated[str, Field(min_length=0)]
"""A string that UTF-8 can encode. The constraint makes pydantic reject lone surrogates, which JSON may contain."""
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A file name without a folder."""


def _hexadecimal(value: object) -> str:
    if isinstance(value, str) and _DIGEST.fullmatch(value):
        return value
    raise ValueError("must be up to 16 hexadecimal digits")


def _bounded(value: object) -> object:
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return value
    raise ValueError(f"must not be nested deeper than {_MOST_LEVELS} levels")


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


Free = Annotated[dict[str, Any], AfterValidator(_bounded)]
"""A JSON object with arbitrary content, up to 50 levels deep."""

Digest = Annotated[int, BeforeValidator(lambda value: int(_hexadecimal(value), 16))]
"""A sum of data digests modulo 2**64, parsed from up to 16 hexadecimal digits."""
DigestText = Annotated[str, BeforeValidator(_hexadecimal)]
"""A sum of data digests as up to 16 hexadecimal digits."""


# Rule and hint by pydantic's error type, formatted with the error's context. Other types keep pydantic's message.
_RULES = {
    "greater_than": ("must be above {gt}", "use a number above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "use {ge} or more"),
    "less_than": ("must be below {lt}", "use a number below {lt}"),
    "less_than_equal": ("must be at most {le}", "use {le} or less"),
    "finite_number": ("must be a finite number", "use an ordinary number"),
    "int_type": ("must be a whole number", "write a number without a fraction or quotes"),
    "int_from_float": ("must be a whole number", "write a number without a fraction"),
    "float_type": ("must be a number", "write a number without quotes"),
    "float_parsing": ("must be a number", None),
    "bool_type": ("must be true or false", "write true or false"),
    "string_type": ("must be a string", "put values that look like numbers, dates or booleans in quotes"),
    "string_unicode": ("must be a string that UTF-8 can encode", None),
    "string_too_short": ("must not be empty", "set a non-empty string"),
    "string_too_long": ("must have at most {max_length} characters", "use a shorter string"),
    "literal_error": ("must be {expected}", "use one of these values"),
    "tuple_type": ("must be a list", "write it as [a, b]"),
    "list_type": ("must be a list", None),
    "too_long": ("must have {max_length} values", "write it as [a, b]"),
    "too_short": ("must have {min_length} or more values", "add a value, or use null"),
    "dict_type": ("must be a mapping", "write it as indented 'key: value' lines"),
    "mapping_type": ("must be a mapping", None),
    "dataclass_type": ("must be a mapping", None),
    "extra_forbidden": ("there is no such field", None),
    "unexpected_keyword_argument": ("there is no such field", None),
    "string_pattern_mismatch": ("must match the pattern {pattern}", "use a matching name"),
    "value_error": ("{error}", None),
    # For settings only.
    "missing": ("the setting is required", "add it to the file, or pass it with --set"),
    "model_type": ("must be a group of settings", "indent the group's settings below its name"),
    "refused": (None, "{hint}"),
}


KNOWN_FIELDS_ONLY = ConfigDict(extra="forbid")
"""Pydantic configuration for dataclasses of versioned files, in which an unknown field indicates damage."""


class ContentError(ValueError):
    """The content of a file is invalid. The message lists the invalid fields, their values and the violated rules."""


def rule_of(detail: ErrorDetails) -> str:
    """Return the violated rule as a phrase such as ``must be a list``, to follow the name of the value."""
    rule, _ = _RULES.get(detail["type"], (None, None))
    return rule.format(**detail.get("ctx", {})) if rule is not None else detail["msg"]


def hint_of(detail: ErrorDetails) -> str | None:
    """Return a hint on how to fix a setting, or None if there is no hint for the error type."""
    _, hint = _RULES.get(detail["type"], (None, None))
    return hint.format(**detail.get("ctx", {})) if hint is not None else None


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the cached `TypeAdapter` for a type."""
    return _adapter(kind)


def read_json(adapter: TypeAdapter[T], content: bytes | str) -> T:
    """Parse and validate JSON.

    Args:
        adapter: Adapter for the expected type.
        content: JSON text.

    Raises:
        ContentError: The content is not JSON, or a field is missing or invalid.
    """
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        raise ContentError(faults_text(error)) from None


def parse_json(content: bytes | str) -> Any:
    """Parse JSON from an untrusted source.

    Raises:
        ValueError: The content is not JSON, is nested more than 200 levels deep, contains a lone surrogate, or contains
            an integer with more digits than Python parses.
    """
    return from_json(content)


def checked(adapter: TypeAdapter[T], value: object) -> T:
    """Validate a parsed JSON value.

    Raises:
        ContentError: A field is missing or invalid.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ContentError(faults_text(error)) from None


def faults_text(error: ValidationError) -> str:
    """Return a message with the first few invalid fields and the number of remaining invalid fields."""
    faults = error.errors(include_url=False)
    texts = [_fault_text(detail) for detail in faults[:_MOST_FAULTS]]
    more = len(faults) - len(texts)
    return "; ".join([*texts, *([f"and {more} more"] if more else [])])


def _fault_text(detail: ErrorDetails) -> str:
    if detail["type"] == "json_invalid":
        return f"not valid JSON: {detail['ctx']['error']}"
    place = shown_text("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])[1:])
    if detail["type"] in ("missing", "union_tag_not_found"):
        return f"{place or detail['ctx']['discriminator']} is missing"
    return f"{place or 'its content'} is {shown_value(detail['input'])}, but {rule_of(detail)}"


def shown_value(value: object) -> str:
    """Format a value for an error message, on one line."""
    try:
        return shown_text(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to show"


def shown_text(text: str) -> str:
    """Shorten text for an error message, and escape line feeds and unprintable characters."""
    short = text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
    return one_line(short)
