"""Settings by parameter name: a pattern without an effect is an error before a worker starts."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import UserError
from ray_ulysses.model_shape import ModelShape
from ray_ulysses.run.settings import model_shape
from tests.unit.config.trees import small_tree


def planned(**changes: Any) -> ModelShape:
    return model_shape(parse_config(small_tree(**changes)))


def groups(*patterns: str) -> list[dict[str, Any]]:
    return [{"match": [pattern]} for pattern in patterns]


EMBEDDING, LINEAR = "*.embed_tokens.*", "*_proj.weight"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer__groups": groups("*.ffn.*")}, r"^optimizer\.groups\.0\.match='\*\.ffn\.\*': .* trained parameter"),
        # A name is compared as a whole.
        ({"optimizer__groups": groups("embed_tokens")}, r"^optimizer\.groups\.0\.match.* model\.embed_tokens\.weight"),
        (
            {"optimizer__groups": groups(EMBEDDING), "model__freeze": [EMBEDDING]},
            r"^optimizer\.groups\.0\.match=.* trained parameter",
        ),
        ({"optimizer__groups": groups("model.*", EMBEDDING)}, r"^optimizer\.groups\.1\.match=.* earlier entries"),
        ({"model__freeze": ["*.ffn.*"]}, r"^model\.freeze='\*\.ffn\.\*': matches no parameter"),
        ({"model__freeze": [EMBEDDING, "*.ffn.*"]}, r"^model\.freeze='\*\.ffn\.\*': matches no parameter"),
        ({"model__freeze": ["*"]}, r"^model\.freeze=\['\*'\]: matches all parameters"),
        ({"model__freeze": ["model.*", "lm_head.*"]}, r"^model\.freeze=.* nothing would be trained"),
        ({"optimizer__kind": "muon", "model__freeze": [LINEAR]}, r"^optimizer\.kind=muon: no weight matrix"),
    ],
    ids=str,
)
def test_a_pattern_without_an_effect_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(**changes)


def test_each_entry_has_the_parameters_that_it_matches_first() -> None:
    shape = planned(optimizer__groups=groups(EMBEDDING, "model.layers.1.*", "model.*"), model__freeze=["lm_head.*"])
    assert [one.tensors for one in shape.matched] == [1, 9, 10]
    assert sum(one.parameters for one in shape.matched) == shape.trained_parameters
    assert shape.trained_parameters == shape.num_parameters - 320 * 96
