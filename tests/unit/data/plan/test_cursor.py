from __future__ import annotations

import json

import pytest

from ray_ulysses.data.plan.cursor import Cursor
from ray_ulysses.errors import UserError

CURSOR = Cursor(segment=0, plan_id="abc", epoch=1, next_row=12, step=2)


def test_a_cursor_survives_json() -> None:
    assert Cursor.from_json(json.loads(json.dumps(CURSOR.to_json()))) == CURSOR


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**CURSOR.to_json(), "extra": 1},
        {**CURSOR.to_json(), "next_row": "12"},
        {**CURSOR.to_json(), "step": True},
    ],
)
def test_a_cursor_with_other_fields_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"must hold exactly segment, plan_id, epoch, next_row, step"):
        Cursor.from_json(fields)
