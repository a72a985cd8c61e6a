"""The words of the command line: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.errors import UserError
from ray_ulysses.export.request import ExportRequest, parse_size, parse_step
from ray_ulysses.storage.place import place_of

_OPTIONS: dict[str, Any] = {
    "step": "latest",
    "out": None,
    "dtype": "model",
    "max_shard_size": "5GB",
    "tokenizer": None,
    "check": True,
    "overwrite": False,
}


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("2GiB", 2 * 2**30), ("500 MB", 5 * 10**8), ("1.5gb", 1_500_000_000), ("64kib", 65536)],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_step_is_a_number_or_one_of_two_words() -> None:
    assert [parse_step(text) for text in ("12", "latest", "best")] == [12, "latest", "best"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": "newest"}, "--step=newest: must be the number of a committed step, or latest, or best"),
        ({"step": "-1"}, "--step=-1: must be the number of a committed step, or latest, or best"),
        ({"step": "7" * 5000}, f"--step={'7' * 40}...: must be the number of a committed step, or latest, or best"),
        ({"step": "٣"}, "--step=٣: must be the number of a committed step, or latest, or best"),
        (
            {"max_shard_size": "9" * 400 + "GB"},
            f"--max-shard-size={'9' * 40}...: must be a number and a unit, such as 5GB, 500MB or 2GiB",
        ),
        ({"dtype": "int8"}, "--dtype=int8: must be one of model, fp32, bf16, fp16"),
        ({"max_shard_size": "5"}, "--max-shard-size=5: must be a number and a unit, such as 5GB, 500MB or 2GiB"),
        ({"max_shard_size": "0GB"}, "--max-shard-size=0GB: must be a number and a unit, such as 5GB, 500MB or 2GiB"),
        ({"out": Path("s3://bucket/out")}, "--out='s3:/bucket/out': is a URI; give a local directory"),
    ],
)
def test_what_can_not_be_understood_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        ExportRequest.from_options(Path("runs/a"), **(_OPTIONS | options))
    assert str(error.value) == said


def test_a_run_may_be_in_an_object_store() -> None:
    place = place_of("gs://bucket/run")
    assert ExportRequest.from_options(place, **_OPTIONS).run_dir == place
