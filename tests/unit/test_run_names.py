from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ray_ulysses import run_names
from ray_ulysses.run_names import (
    ATTEMPT_KEY,
    CHECKPOINT_KEY,
    JOURNAL_FILE_NAME,
    MANIFEST_FILE,
    NOTE_NAME,
    SHARD_KEY,
    SHARD_NAME,
    STEP_LOCATION,
    claim_key,
    journal_file_name,
    manifest_key,
    note_key,
    shard_file,
    start_key,
    step_folder,
)

_PACKAGE = Path(run_names.__file__).parent
# Words that mean other things elsewhere, too.
_SHARED = {"README.md", "attempts", "checkpoints", "export", "identity", "journal", "plan", "probe", "refused"}
_SHARED |= {"diagnostics", "evaluation", "session", "trackers"}
_NAMES = {
    value for name, value in vars(run_names).items() if name.endswith(("_FILE", "_FOLDER")) and value not in _SHARED
}


@pytest.mark.parametrize("number", [1, 123_456_789])
def test_what_is_written_under_a_name_is_found_by_it(number: int) -> None:
    shard = shard_file(number, 3, 8, retry=1)
    for name in (MANIFEST_FILE, shard, note_key(number, 4).rpartition("/")[2]):
        match = CHECKPOINT_KEY.match(f"{step_folder(number)}/{name}")
        assert match and (int(match["step"]), match["name"]) == (number, name)
    assert manifest_key(number) == f"{step_folder(number)}/{MANIFEST_FILE}"
    found = SHARD_NAME.match(shard)
    assert found and (int(found["attempt"]), int(found["world_size"])) == (number, 8)
    found = SHARD_KEY.match(f"{step_folder(7)}/{shard}")
    assert found and f"{found['folder']}/{shard.partition('/')[2]}" == f"{step_folder(7)}/{shard}"
    found = NOTE_NAME.match(note_key(7, number).rpartition("/")[2])
    assert found and int(found["attempt"]) == number
    for key, step in ((claim_key(number), None), (start_key(number, 7), "00000007")):
        found = ATTEMPT_KEY.match(key)
        assert found and (int(found["attempt"]), found["step"]) == (number, step)
    for writer in (None, "controller"):
        found = JOURNAL_FILE_NAME.match(journal_file_name(number, writer))
        assert found and (int(found["attempt"]), found["writer"]) == (number, writer)
    found = STEP_LOCATION.match(f"s3://bucket/run/{step_folder(number)}?region=x")
    assert found and (found["run"], int(found["step"]), found["options"]) == ("s3://bucket/run", number, "?region=x")


def test_no_other_module_spells_a_name_of_a_runs_directory() -> None:
    spelled = [
        f"{file.relative_to(_PACKAGE)}:{node.lineno} {node.value}"
        for file in _PACKAGE.rglob("*.py")
        if file.name != "run_names.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in _NAMES
    ]
    assert spelled == []
