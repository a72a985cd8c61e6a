from __future__ import annotations

import json

import pytest

from ray_ulysses.data.plan.plan import Cursor
from ray_ulysses.errors import UserError

CURSOR = Cursor(segment=0, plan_id="abc", epoch=1, next_row=12, step=2)


def test_a_cursor_survives_json() -> None:
    assert Cursor.from_json(json.loads(json.dumps(CURSOR.to_json()))) == CURSOR


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "segment is missing"),
        ({**CURSOR.to_json(), "extra": 1}, "extra is 1, but there is no such field"),
        ({**CURSOR.to_json(), "next_row": "12"}, "next_row is '12', but must be a whole number"),
        ({**CURSOR.to_json(), "step": True}, "step is True, but must be a whole number"),
        ({**CURSOR.to_json(), "epoch": -1}, "epoch is -1, but must be at least 0"),
    ],
)
def test_a_cursor_with_other_fields_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=rf"^data cursor .*: {problem}.*; resume from another step$"):
        Cursor.from_json(fields)
