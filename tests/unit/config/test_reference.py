from __future__ import annotations

from ray_ulysses.config.schema import setting_paths
from tests.configuration_page import PAGE, render_reference


def test_the_reference_page_is_current_and_lists_every_setting_in_both_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_reference(), "run `make docs`"
    lines = render_reference().splitlines()
    for path in setting_paths():
        assert sum(line.startswith(f"| `{path}` |") for line in lines) == 2, path
