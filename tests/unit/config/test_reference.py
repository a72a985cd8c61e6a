from __future__ import annotations

from ray_ulysses.config.schema import setting_paths
from tests.configuration_page import PAGE, render_reference


def test_the_written_reference_is_the_schemas() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), "run `make docs`"


def test_the_reference_has_a_row_for_every_setting_and_one_in_the_table_of_resumes() -> None:
    lines = render_reference().splitlines()
    for path in setting_paths():
        assert sum(line.startswith(f"| `{path}` |") for line in lines) == 2, path
