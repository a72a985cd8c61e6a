"""A run's ring size and padding depend only on its configuration and its heads."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.parallel.layout import automatic_ring_size, row_multiple
from ray_ulysses.planner.settings import allowed_sp, fits_rows, pad_multiple, plan_settings, ring_size, run_layout
from tests.unit.planner.runs import LLAMA_3_8B, MODEL, make_config, make_shape


def config_of(heads=4, workers=None, **parallel):
    model = {**MODEL, "num_attention_heads": heads, "num_key_value_heads": 1, "hidden_size": 16 * heads}
    return make_config(model, parallel=parallel, cluster={"workers": workers or parallel.get("sp_size", 1)})


def pad_of(heads=4, **parallel):
    config = config_of(heads, **parallel)
    return pad_multiple(config, make_shape(config))


@pytest.mark.parametrize(
    ("parallel", "multiple"),
    [
        ({"sp_size": 1}, 4),
        ({"sp_size": 3}, 12),
        # More ranks than heads: a ring of 2 with 4 Ulysses ranks.
        ({"sp_size": 8}, 16),
        ({"sp_size": 4, "ring_size": 2}, 8),
        ({"sp_size": 1, "allowed_sp": [1, 8]}, 16),
        ({"sp_size": 2, "ring_size": 2, "allowed_sp": [1, 2, 4]}, 4),
        ({"sp_size": 1, "allowed_sp": [1, 3, 5]}, 30),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_rows_are_padded_for_every_allowed_sp_size(parallel, multiple):
    assert pad_of(4, **parallel) == multiple


@given(heads=st.integers(1, 24), sp_size=st.integers(1, 48))
def test_a_new_run_fits_its_own_rows_and_those_of_every_divisor_of_the_heads(heads, sp_size):
    config = config_of(heads, sp_size=sp_size)
    shape = make_shape(config)
    multiple = pad_multiple(config, shape)
    assert fits_rows(config, shape, multiple)
    for size in allowed_sp(config, shape):
        assert multiple % row_multiple(size, automatic_ring_size(size, heads)) == 0
        assert fits_rows(config_of(heads, sp_size=size), shape, multiple)


def test_a_ring_is_chosen_beyond_the_heads_and_a_given_one_is_taken():
    assert [ring_size(c, make_shape(c)) for c in (config_of(4, sp_size=n) for n in (1, 3, 4, 6, 8))] == [1, 1, 1, 3, 2]
    config = config_of(4, sp_size=8, ring_size=4)
    shape = make_shape(config)
    assert ring_size(config, shape) == 4
    # It was set for 8 ranks; for another size one is chosen.
    assert [ring_size(config, shape, size) for size in (4, 16)] == [1, 4]
    layout = run_layout(config, shape, 16)
    assert (layout.world_size, layout.sp_size, layout.ring_size, layout.ulysses_size) == (16, 8, 4, 2)
    assert run_layout(config, shape).world_size == 8


def test_a_multiple_that_a_run_has_settled_stays():
    config = make_config(LLAMA_3_8B, parallel={"sp_size": 8}, cluster={"workers": 8})
    shape = make_shape(config)
    assert plan_settings(config, shape).pad_multiple == 32
    settled = plan_settings(config, shape, replace(plan_settings(config, shape), pad_multiple=96, token_cost=7))
    assert (settled.pad_multiple, settled.token_cost) == (96, 7)
    assert not fits_rows(config, shape, 4)
