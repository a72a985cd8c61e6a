"""What every section of the configuration has in common, and how one refuses a value in its own words."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen group of settings that knows no other keys and converts no types.

    Strict types keep a slip visible: ``workers: "4"`` and ``seed: yes`` are refused instead of guessed at.
    The docstring below a field is its documentation; ``docs/configuration.md`` is made from it.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def refusal(rule: str, hint: str, shown: str | None = None) -> PydanticCustomError:
    """Return the error for a field validator to raise.

    Args:
        rule: The rule that the value breaks.
        hint: What to do instead.
        shown: What to show as the value, where the value itself may hold a secret.
    """
    shown_instead = {} if shown is None else {"shown": shown}
    return PydanticCustomError("refused", "{rule}", {"rule": rule, "hint": hint, **shown_instead})
