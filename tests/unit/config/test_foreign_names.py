"""Names of other tools are answered with ours, or with the reason why there is none; nothing is guessed wrongly."""

from __future__ import annotations

import re

import pytest

from ray_ulysses.config.foreign_names import FOREIGN, UNSUPPORTED
from ray_ulysses.config.schema import nested_paths, section_models
from ray_ulysses.errors import Problem
from tests.unit.config.test_loading import problems_of
from tests.unit.config.trees import small_tree

_PATHS = frozenset(nested_paths())
_MENTIONED = re.compile(rf"\b(?:{'|'.join(section_models())})\.[a-z_]+(?:\.[a-z_]+)?")


def _answers(names: list[str]) -> dict[str, Problem]:
    """Return the problem of each of these settings, all written into one configuration."""
    sections = {f"run.{name}" if "." not in name else name: name for name in names}
    return {sections[one.path]: one for one in problems_of(small_tree(), *(f"{path}=1" for path in sections))}


def test_each_name_of_another_tool_is_answered_with_a_setting_that_exists() -> None:
    found = _answers([*FOREIGN])
    assert [*found] == [*FOREIGN], "each name is refused, so none is a setting of the run section"
    for name, ours in FOREIGN.items():
        assert ours in _PATHS, f"{name} is answered with {ours}, which does not exist"
        assert found[name].hint.startswith(f"use {ours} instead") and found[name].nearest is None
        assert f"{ours.rpartition('.')[0]}.{name}" not in _PATHS, f"{name} is a setting of ours"


def test_each_name_without_a_setting_is_answered_with_the_reason() -> None:
    found = _answers([*UNSUPPORTED])
    assert set(found) == set(UNSUPPORTED) and not FOREIGN.keys() & UNSUPPORTED.keys()
    for name, (reason, way) in UNSUPPORTED.items():
        assert (found[name].rule, found[name].hint, found[name].nearest) == (reason, way, None)
        ours = [path for path in _PATHS if path.endswith(f".{name}") and path.rpartition(".")[0] not in way]
        assert not ours, f"{name} is a setting of ours in a section that the answer does not name"
        assert all(path in _PATHS for path in _MENTIONED.findall(f"{reason} {way}"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("optimizer.learning_rate=1e-4", "optimizer.learning_rate=0.0001: there is no such setting; use optimizer.lr "),
        ("optimizer.optim=muon", "use optimizer.kind instead, adamw, adamw_bf16_moments or muon"),
        ("training.fp16=true", "move its content into our sections"),
        ("model.fp16=true", "set model.dtype: bf16, or fp32 on CPU"),
        ("data.batch_size=8", "use data.rows_per_step instead, the rows of a step over all workers"),
        ("data.max-seq-length=8", "use data.context_tokens instead"),
        ("model.adapter.r=8", "use model.adapter.rank instead"),
        ("model.trust_remote_code=true", "code from a model repository is never run"),
        ("parallel.tp_size=2", "there is no tensor parallelism"),
        # Typing errors are still guessed, but not what only resembles a name.
        ("model.adapter.alphaa=8", "did you mean 'model.adapter.alpha'?"),
        ("run.context_tokns=8", "did you mean 'data.context_tokens'?"),
        ("parallel.mp_size=2", "docs/configuration.md lists every setting"),
        ("tracking.kind=x", "docs/configuration.md lists every setting"),
    ],
)
def test_what_users_of_other_tools_write_is_answered(written: str, said: str) -> None:
    tree = small_tree(model__adapter={"rank": 4})
    (problem,) = problems_of(tree, written)
    assert said in str(problem)
    assert ("did you mean" in str(problem)) == said.startswith("did")


def test_in_a_stage_the_name_of_the_stages_setting_is_given() -> None:
    stages = [{"name": "a", "learning_rate": 1e-4, "max_length": 8, "num_epochs": 2}]
    hints = [problem.hint for problem in problems_of({**small_tree(), "stages": stages})]
    assert [hint.split()[1] for hint in hints] == ["stages.0.lr", "stages.0.context_tokens", "data.epochs"]
