"""config.json and generation_config.json: what trained, in words that tools of every age read rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ray_ulysses.config.loading import parse_config
from ray_ulysses.export.architecture import describe, merged_ends, with_older_names
from tests.unit.attention.models import ARCHITECTURES
from tests.unit.config.trees import small_tree


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_older_names_change_nothing_for_transformers_5(tmp_path: Path, architecture: str) -> None:
    config = ARCHITECTURES[architecture]()
    config.dtype = "bfloat16"
    plain = json.loads(config.to_json_string(use_diff=True))
    loaded = []
    for name, fields in (("plain", plain), ("older", with_older_names(plain))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
        found = AutoConfig.from_pretrained(tmp_path / name)
        loaded.append(found.to_dict() | {"dtype": str(found.dtype), "_name_or_path": ""})
    # A class that does not know such a name keeps it as an attribute that nothing reads.
    unknown = loaded[1].keys() - loaded[0].keys()
    assert unknown <= {"rope_theta", "partial_rotary_factor"}
    assert {name: value for name, value in loaded[1].items() if name not in unknown} == loaded[0]


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}),
        (
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5},
        ),
        ({"full_attention": {"rope_theta": 1.0}}, {}),
        (None, {}),
    ],
)
def test_older_tools_find_rope_under_its_older_names(rope: dict[str, Any] | None, older: dict[str, Any]) -> None:
    fields = {"dtype": "float32", "rope_parameters": rope}
    assert with_older_names(fields) == fields | {"torch_dtype": "float32"} | older


@pytest.mark.parametrize(
    ("known", "trained", "ends"),
    [
        (None, (), None),
        (2, (), 2),
        (None, (5,), 5),
        (2, (5,), [5, 2]),
        ([2, 5], (5,), [2, 5]),
        ([2, 3], (5,), [5, 2, 3]),
        (None, (5, 6), [5, 6]),
        (6, (5, 6), [5, 6]),
    ],
)
def test_generation_ends_where_training_ended_documents(known: Any, trained: tuple[int, ...], ends: Any) -> None:
    assert merged_ends(known, trained) == ends


def test_an_inline_model_gets_the_end_token_of_its_corpus_unless_it_names_one() -> None:
    tree = small_tree()
    found = describe(parse_config(tree), "model", (256,))
    # Llama's class says 1 and 2, which are bytes of a text here.
    assert (found.model.config.bos_token_id, found.model.config.eos_token_id) == (None, 256)
    assert found.generation is not None and found.generation["eos_token_id"] == 256
    assert "bos_token_id" not in found.generation
    tree["model"]["config"]["eos_token_id"] = 7
    found = describe(parse_config(tree), "model", (256,))
    assert found.model.config.eos_token_id == 7
    assert found.generation is not None and found.generation["eos_token_id"] == [256, 7]


def test_the_end_token_of_the_corpus_stays_beside_that_of_another_tokenizer(tmp_path: Path) -> None:
    found = describe(parse_config(small_tree()), "model", (256, 65))
    for name, content in found.files().items():
        (tmp_path / name).write_bytes(content)
        assert json.loads(content)["eos_token_id"] == [256, 65], name
    assert AutoConfig.from_pretrained(tmp_path).eos_token_id == [256, 65]


def test_an_inline_model_whose_end_token_is_not_known_does_not_get_that_of_its_class() -> None:
    found = describe(parse_config(small_tree()), "model")
    assert (found.model.config.bos_token_id, found.model.config.eos_token_id) == (None, None)
    assert found.generation is not None and "eos_token_id" not in found.generation
