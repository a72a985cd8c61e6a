"""Everything that can be refused is refused before a worker starts, by a text that names the way out."""

import re
import shlex

import pytest
import yaml

from ray_ulysses.config.loading import parse_config
from ray_ulysses.planner.memory import configured_memory
from ray_ulysses.planner.problems import (
    corpus_problems,
    fit_hint,
    heads_problems,
    memory_problems,
    memory_problems_of_run,
    plan_problems,
    vocabulary_problems,
)
from tests.unit.planner.runs import LLAMA_3_8B, make_config, make_corpus, make_plan, make_shape


def memory_texts(config) -> list[str]:
    shape = make_shape(config)
    return [str(problem) for problem in memory_problems(config, shape, configured_memory(config, shape))]


def llama_config(**memory):
    return make_config(
        LLAMA_3_8B,
        model={"config": LLAMA_3_8B, "init": "pretrained", "path": "/model"},
        data={"path": "/corpus", "context_tokens": 131072, "rows_per_step": 8},
        parallel={"sp_size": 8},
        cluster={"workers": 8, "gpus_per_worker": 1},
        memory=memory,
    )


@pytest.mark.parametrize(("sp_size", "ring_size"), [(3, None), (4, 1), (12, None), (12, 3), (8, 8)])
def test_heads_need_not_divide_and_a_ring_takes_over(sp_size, ring_size):
    config = make_config(parallel={"sp_size": sp_size, "ring_size": ring_size}, cluster={"workers": sp_size})
    assert not list(heads_problems(config, make_shape(config)))


def test_a_ring_that_leaves_more_ranks_than_heads_is_refused_with_those_that_do_not():
    config = make_config(parallel={"sp_size": 12, "ring_size": 2}, cluster={"workers": 12})
    (problem,) = heads_problems(config, make_shape(config))
    assert str(problem) == (
        "parallel.ring_size=2: leaves 6 of parallel.sp_size=12 ranks to share the model's 4 attention heads; "
        "use 3, 4, 6, 12, or null to choose automatically"
    )


def test_a_token_beyond_the_vocabulary_is_refused():
    (problem,) = vocabulary_problems(300, 257, "/corpus")
    assert str(problem) == (
        "data.path='/corpus': holds token id 300, and the model's vocab_size=257 ends at 256; prepare the corpus with "
        "the model's own tokenizer, or use a model whose vocab_size is at least 301"
    )


def test_the_last_token_of_the_vocabulary_is_allowed():
    assert not list(vocabulary_problems(256, 257, "/corpus"))
    assert len(list(vocabulary_problems(257, 257, "/corpus"))) == 1


def test_a_stop_beyond_the_data_is_refused_with_epochs_that_suffice():
    corpus = make_corpus([64] * 10)
    config = make_config(run={"stop_step": 8})
    (problem,) = plan_problems(config, make_plan(config, corpus))
    assert str(problem) == (
        "run.stop_step=8: is beyond the planned data, which ends after 3 steps (10 rows, 4 per step); use at most 3, "
        "or data.epochs=3 (for a run that has begun, with --branch)"
    )
    enough = make_config(
        run={"stop_step": 8}, data={"path": "/c", "context_tokens": 64, "rows_per_step": 4, "epochs": 3}
    )
    assert not list(plan_problems(enough, make_plan(enough, corpus)))


def test_the_last_planned_step_is_allowed():
    config = make_config(run={"stop_step": 3})
    assert not list(plan_problems(config, make_plan(config, make_corpus([64] * 10))))


def test_an_evaluation_without_rows_is_refused():
    config = make_config(run={"eval_every_steps": 2})
    (problem,) = plan_problems(config, make_plan(config, make_corpus([64] * 10)))
    assert str(problem).startswith("data.eval_fraction=0.0: holds out no document with a target")


def test_memory_is_not_judged_without_a_limit():
    assert memory_texts(llama_config()) == []


def test_memory_that_fits_is_not_refused():
    assert memory_texts(llama_config(device_gib=79.0, host_gib=83.0)) == []


def test_memory_that_does_not_fit_is_refused_with_what_does():
    (text,) = memory_texts(llama_config(device_gib=40.0, loss_tile="off"))
    assert re.match(
        r"memory\.device_gib=40\.0: each rank is estimated to take 5\d\.\d GiB \(a first estimate by formula, "
        r"not a measurement\), most of it logits \(23\.5 GiB\) and attention outputs, kept \(8\.1 GiB\); ",
        text,
    )
    assert "; by this estimate the nearest that fits is --set memory.loss_tile=auto (see `plan --fit`); " in text


@pytest.mark.parametrize(
    "limits",
    [
        {"device_gib": 30.0},
        {"device_gib": 22.0, "offload_optimizer": "cpu"},
        {"host_gib": 79.0, "offload_activations": ["layer_inputs"]},
    ],
)
def test_the_hint_of_a_memory_problem_fits(limits):
    config = llama_config(**limits)
    (text,) = memory_texts(config)
    command = text.partition("the nearest that fits is ")[2].partition(" (see")[0]
    tree = config.model_dump()
    for choice in shlex.split(command.replace("--set ", "")):
        path, _, value = choice.partition("=")
        section, _, field = path.partition(".")
        tree[section][field] = yaml.safe_load(value)
    assert tree != config.model_dump()
    assert memory_texts(type(config).model_validate(tree)) == []


def test_a_hint_with_another_sp_size_names_a_ring_where_one_is_set():
    config = llama_config(device_gib=13.0)
    tree = config.model_dump()
    tree["parallel"] |= {"sp_size": 8, "ring_size": 2}
    tree["cluster"]["workers"] = 32
    (text,) = memory_texts(type(config).model_validate(tree))
    assert "--set parallel.sp_size=16 --set parallel.ring_size=1" in text


def test_what_nothing_helps_says_so():
    (text,) = memory_texts(llama_config(device_gib=2.0))
    assert text.endswith(
        "by this estimate no setting fits, nor up to 8 times the workers: on these the least need is 8.6 GiB per "
        "device and 103.1 GiB per host, with --set memory.attention_output=none --set "
        "'memory.offload_activations=[layer_inputs]' --set memory.offload_optimizer=cpu --set "
        "memory.offload_param=cpu; use a smaller model"
    )


def test_host_memory_is_judged_too():
    (text,) = memory_texts(llama_config(host_gib=10.0))
    assert text.startswith("memory.host_gib=10.0: each rank is estimated to take 78.5 GiB")


def test_offloaded_activations_that_the_host_has_no_room_for_are_refused_with_the_way_out():
    # 78.5 GiB without them.
    (text,) = memory_texts(llama_config(host_gib=79.0, offload_activations=["layer_inputs"]))
    assert text.startswith("memory.host_gib=79.0: each rank is estimated to take 82.5 GiB")
    assert "memory.offload_activations=[]" in text
    assert memory_texts(llama_config(host_gib=83.0, offload_activations=["layer_inputs"])) == []


def test_peer_memory_is_counted_and_given_up_first():
    (text,) = memory_texts(llama_config(host_gib=64.0))
    assert "is estimated to take 78.5 GiB" in text and "peer memory (52.4 GiB)" in text
    assert "; by this estimate the nearest that fits is --set elastic.peer_memory=false (see `plan --fit`); " in text


@pytest.mark.parametrize("device_gib", [16.0, 24.0, 40.0, 48.0])
def test_no_hint_is_the_configuration_itself(device_gib):
    for text in memory_texts(llama_config(device_gib=device_gib)):
        assert "cluster.workers=8 " not in text
        assert "parallel.sp_size=8;" not in text


@pytest.mark.parametrize("nothing_else_fits", [False, True])
def test_each_stage_that_does_not_fit_is_shortened_by_a_setting_of_its_own(nothing_else_fits):
    """The context of the run may not be below that of any stage."""
    lean = {
        "attention_output": "none", "offload_activations": ["layer_inputs"], "offload_optimizer": "cpu",
        "offload_param": "cpu", "attention_head_groups": 1, "mlp_tile": "auto",
    }  # fmt: skip
    memory = {"device_gib": 7.95, **lean} if nothing_else_fits else {"device_gib": 32.0}
    tree = llama_config(**memory).model_dump(mode="json", exclude_unset=True)
    tree["stages"] = [
        {"name": "short", "steps": 9, "context_tokens": 4096},
        {"name": "phase.1", "steps": 9, "context_tokens": 98304},
        {"name": "long"},
    ]
    config = parse_config(tree)
    shape = make_shape(config)
    hint = fit_hint(config, shape)
    assert ("no setting fits" in hint) == nothing_else_fits
    shorter = re.findall(r"(\S+=\d+) at most", hint)
    assert [one.partition("=")[0] for one in shorter] == ["stages.1.context_tokens", "stages.long.context_tokens"]
    first, second = (str(one) for one in memory_problems_of_run(config, shape))
    assert "(in stage 'phase.1')" in first and "(in stage 'long')" in second and hint in first and hint in second
    assert list(memory_problems_of_run(parse_config(tree, shorter), shape)) == []


def test_a_corpus_shorter_than_one_step_is_refused():
    config = make_config(data={"path": "/c", "context_tokens": 64, "rows_per_step": 12})
    (problem,) = corpus_problems(config, make_plan(config, make_corpus([64] * 10)))
    assert str(problem) == (
        "data.rows_per_step=12: is more than the 10 rows of the corpus, so that not even one step is full; use "
        "at most 10, a shorter data.context_tokens, more data.epochs or a longer corpus"
    )
    assert not list(corpus_problems(config, make_plan(config, make_corpus([64] * 12))))
