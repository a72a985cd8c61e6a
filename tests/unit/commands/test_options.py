"""The words of the command line: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.cli import app, run
from ray_ulysses.commands.export import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("2GiB", 2 * 2**30), ("500 MB", 5 * 10**8), ("1.5gb", 1_500_000_000), ("64kib", 65536)],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "option",
    [
        *(f"--step={step}" for step in ("newest", "-1", "7" * 5000, "٣")),
        *(f"--max-shard-size={size}" for size in ("9" * 400 + "GB", "5", "0GB")),
        "--dtype=int8",
        "--out=s3://bucket/out",
    ],
    ids=lambda option: option[:24],
)
def test_an_option_that_can_not_be_understood_is_named(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["export", str(tmp_path), option]) == 2
    error = capsys.readouterr().err
    assert option.partition("=")[0] in error and len(error) < 2000
