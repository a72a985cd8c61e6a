"""The words of the command line: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.commands.export import parse_size
from ray_ulysses.commands.options import parse_step


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
        (("--step", "newest"), "--step=newest: must be the number of a committed step, or latest, or best"),
        (("--step", "-1"), "--step=-1: must be the number of a committed step, or latest, or best"),
        (("--step", "7" * 5000), f"--step={'7' * 40}...: must be the number of a committed step, or latest, or best"),
        (("--step", "٣"), "--step=٣: must be the number of a committed step, or latest, or best"),
        (
            ("--max-shard-size", "9" * 400 + "GB"),
            f"--max-shard-size={'9' * 40}...: must be a number and a unit, such as 5GB, 500MB or 2GiB",
        ),
        (("--dtype", "int8"), "'int8' is not one of 'model', 'fp32', 'bf16', 'fp16'"),
        (("--max-shard-size", "5"), "--max-shard-size=5: must be a number and a unit, such as 5GB, 500MB or 2GiB"),
        (("--max-shard-size", "0GB"), "--max-shard-size=0GB: must be a number and a unit, such as 5GB, 500MB or 2GiB"),
        (("--out", "s3://bucket/out"), "--out='s3:/bucket/out': is a URI; give a local directory"),
    ],
)
def test_what_can_not_be_understood_is_named(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["export", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err
