from __future__ import annotations

import re
from pathlib import Path

_PACKAGE = Path(__file__).parents[2] / "ray_ulysses"
_ROOMS = ("attention", "checkpoint", "engine", "parallel", "trainer")
"""The rooms whose code holds tensors of the process that trains."""
_STARTS_THREADS = re.compile(r"threading\.Thread\(|ThreadPoolExecutor\(|BackgroundCalls\(")
_WITHOUT_TENSORS = {"checkpoint/choice.py", "trainer/record.py"}


def test_a_thread_of_a_room_that_holds_tensors_chooses_its_device() -> None:
    files = [file for room in _ROOMS for file in sorted((_PACKAGE / room).rglob("*.py"))]
    made = {
        str(file.relative_to(_PACKAGE)): "choose_device" in text
        for file in files
        if _STARTS_THREADS.search(text := file.read_text(encoding="utf-8"))
    }
    assert {"checkpoint/background.py", "checkpoint/load.py"} <= made.keys()
    assert {file for file, chooses in made.items() if not chooses} == _WITHOUT_TENSORS
