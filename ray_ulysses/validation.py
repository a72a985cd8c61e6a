"""Types for pydantic models of file contents, and pydantic's errors in this project's words."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from ray_ulysses.terminal import one_line

T = TypeVar("T")

_MOST_SHOWN = 80
_MOST_FAULTS = 3
_MOST_LEVELS = 50
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
_DIGEST = re.compile(r"[0-9a-f]{1,16}")

YEAR_10000_S = 253_402_300_800
"""Upper bound of seconds since the epoch, since Python has no later dates."""

Whole = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A non-negative 64-bit integer; ``true`` and ``1.0`` are refused."""
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**63)]
"""A positive 64-bit integer."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""A finite number; integers are accepted."""
Seconds = Annotated[float, Field(strict=True, ge=0, lt=YEAR_10000_S, allow_inf_nan=False)]
"""A duration, or a time since the epoch."""
Text = Annotated[str, Field(min_length=0)]
"""A text that UTF-8 can encode; JSON may contain lone surrogates."""
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""The name of a file without any folder."""


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
"""An object with any content of bounded nesting depth."""

Digest = Annotated[int, BeforeValidator(lambda value: int(_hexadecimal(value), 16))]
"""A sum of data digests modulo 2**64, written as up to 16 hexadecimal digits."""
DigestText = Annotated[str, BeforeValidator(_hexadecimal)]
"""A digest in its written form."""


# The rule of each kind of pydantic error; other kinds keep pydantic's own text.
_RULES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda c: f"must be above {c['gt']}",
    "greater_than_equal": lambda c: f"must be at least {c['ge']}",
    "less_than": lambda c: f"must be below {c['lt']}",
    "less_than_equal": lambda c: f"must be at most {c['le']}",
    "finite_number": lambda _: "must be a finite number",
    "int_type": lambda _: "must be a whole number",
    "int_from_float": lambda _: "must be a whole number",
    "float_type": lambda _: "must be a number",
    "float_parsing": lambda _: "must be a number",
    "bool_type": lambda _: "must be true or false",
    "string_type": lambda _: "must be text",
    "string_unicode": lambda _: "must be text that UTF-8 can hold",
    "string_too_short": lambda _: "must not be empty",
    "string_too_long": lambda c: f"must have at most {c['max_length']} characters",
    "literal_error": lambda c: f"must be {c['expected']}",
    "tuple_type": lambda _: "must be a list",
    "list_type": lambda _: "must be a list",
    "too_long": lambda c: f"must have {c['max_length']} values",
    "too_short": lambda c: f"must have at least {c['min_length']}",
    "dict_type": lambda _: "must be a mapping",
    "mapping_type": lambda _: "must be a mapping",
    "dataclass_type": lambda _: "must be a mapping",
    "extra_forbidden": lambda _: "there is no such field",
    "unexpected_keyword_argument": lambda _: "there is no such field",
    "string_pattern_mismatch": lambda c: f"must be of the form {c['pattern']}",
    "value_error": lambda c: str(c["error"]),
}


KNOWN_FIELDS_ONLY = ConfigDict(extra="forbid")
"""For a dataclass whose file has a version: an unknown field can only be a damaged name."""


class ContentError(ValueError):
    """The content of a file is invalid; the text lists each field, its value and the rule."""


def rule_of(detail: ErrorDetails) -> str:
    """Return the rule that a value breaks, as a predicate that follows the value's name."""
    rule = _RULES.get(detail["type"])
    return rule(detail.get("ctx", {})) if rule is not None else detail["msg"]


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return what checks values of a kind; made when it is first asked for."""
    return _adapter(kind)


def read_json(adapter: TypeAdapter[T], content: bytes | str) -> T:
    """Parse and validate a JSON text.

    Args:
        adapter: Type of the result.
        content: The text.

    Raises:
        ContentError: It is not JSON, or a field is missing or invalid.
    """
    try:
        return adapter.validate_json(content)
    except ValidationError as error:
        raise ContentError(faults_text(error)) from None


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text that somebody else may have written.

    Raises:
        ValueError: It is not JSON, is nested more than 200 deep, or holds half of a surrogate pair or a whole number of
            more digits than Python reads.
    """
    return from_json(content)


def checked(adapter: TypeAdapter[T], value: object) -> T:
    """Validate a parsed JSON value; raises as `read_json` does."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ContentError(faults_text(error)) from None


def faults_text(error: ValidationError) -> str:
    """Describe the first few errors, field by field."""
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
    """Format a value for an error."""
    try:
        return shown_text(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to show"


def shown_text(text: str) -> str:
    """Shorten a text for an error, and escape its unprintable characters."""
    short = text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
    return one_line(short)
