"""Problems of a run, and hints that resolve them."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from ray_ulysses.config import Config
from ray_ulysses.config.loading import parse_config
from ray_ulysses.errors import Problem
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
from tests.unit.planner.runs import llama_config, make_config, make_corpus, make_plan, make_shape


def problems_of(config: Config) -> list[Problem]:
    shape = make_shape(config)
    return list(memory_problems(config, shape, configured_memory(config, shape)))


def pasted(config: Config, text: str) -> Config:
    """Return the configuration changed by a hint's options."""
    command = text.partition("the nearest settings that fit are ")[2].partition(" (see")[0]
    return parse_config(config.model_dump(mode="json"), shlex.split(command.replace("--set ", "")))


@pytest.mark.parametrize(
    ("sp_size", "ring_size", "hint"),
    [
        (3, None, ""), (4, 1, ""), (12, 3, ""), (8, 8, ""),
        (12, 2, "use 3, 4, 6, 12, or null to choose automatically"),
    ],
)  # fmt: skip
def test_a_ring_must_leave_a_head_for_each_rank(sp_size: int, ring_size: int | None, hint: str) -> None:
    config = make_config(parallel={"sp_size": sp_size, "ring_size": ring_size}, cluster={"workers": sp_size})
    problems = list(heads_problems(config, make_shape(config)))
    assert [(one.path, one.hint) for one in problems] == ([("parallel.ring_size", hint)] if hint else [])


def test_a_corpus_that_does_not_fit_the_run_is_refused() -> None:
    (token,) = vocabulary_problems(257, 257, "/corpus")
    assert (token.path, token.value) == ("data.path", "/corpus") and "at least 258" in token.hint
    assert not list(vocabulary_problems(256, 257, "/corpus"))
    config, corpus = make_config(data={"rows_per_step": 12}), make_corpus([64] * 10)
    (short,) = corpus_problems(config, make_plan(config, corpus))
    assert short.path == "data.rows_per_step" and "at most 10" in short.hint
    assert not list(corpus_problems(config, make_plan(config, make_corpus([64] * 12))))
    config = make_config(run={"eval_every_steps": 2})
    (evaluation,) = plan_problems(config, make_plan(config, corpus))
    assert evaluation.path == "data.eval_fraction"


def test_early_stopping_watches_an_evaluation_set_of_the_run() -> None:
    corpus = make_corpus([64] * 40)

    def problems(name: str | None) -> list[Problem]:
        stopping = {"patience": 1, "corpus": name}
        config = make_config(run={"eval_every_steps": 5, "early_stopping": stopping}, data={"eval_fraction": 0.5})
        return list(plan_problems(config, make_plan(config, corpus)))

    (unknown,) = problems("books")
    assert unknown.path == "run.early_stopping.corpus" and "held_out" in unknown.hint
    assert not problems("held_out") and not problems(None)


def test_a_stop_beyond_the_data_is_refused_with_epochs_that_suffice() -> None:
    def found(stop_step: int, epochs: int = 1) -> list[Problem]:
        config = make_config(run={"stop_step": stop_step}, data={"epochs": epochs})
        return list(plan_problems(config, make_plan(config, make_corpus([64] * 10))))

    (problem,) = found(8)
    assert problem.path == "run.stop_step" and "at most 3, or data.epochs=3" in problem.hint
    assert found(3) == found(8, epochs=3) == []


def test_memory_that_does_not_fit_is_refused_with_settings_that_do() -> None:
    (problem,) = problems_of(llama_config(device_gib=40.0, loss_tile="off"))
    assert re.match(
        r"memory\.device_gib=40\.0: each rank is estimated to take 5\d\.\d of 40 GiB \(a first estimate by formula, "
        r"not a measurement\), mostly for logits \(23\.5 GiB\) and attention outputs, kept \(8\.1 GiB\); ",
        str(problem),
    )
    assert (
        "; by this estimate, the nearest settings that fit are --set memory.loss_tile=auto (see `plan --fit`); "
        in str(problem)
    )


@pytest.mark.parametrize(
    ("limits", "path", "change"),
    [
        ({}, None, ""),
        ({"device_gib": 79.0, "host_gib": 83.0}, None, ""),
        ({"device_gib": 30.0}, "memory.device_gib", "memory."),
        # 78.5 GiB without offloaded activations, 52.4 of which are peer memory.
        ({"host_gib": 79.0, "offload_activations": ["layer_inputs"]}, "memory.host_gib", "offload_activations=[]"),
        ({"host_gib": 64.0}, "memory.host_gib", "elastic.peer_memory=false"),
        ({"device": "H100"}, None, ""),
        ({"device": {"name": "own", "tflops": 100.0, "gib": 30.0, "gbps": 900.0}}, "cluster.device", "memory."),
    ],
    ids=["no-limit", "fits", "device", "activations", "host", "known-device", "own-device"],
)
def test_the_hint_of_a_memory_problem_fits(limits: dict[str, Any], path: str | None, change: str) -> None:
    config = llama_config(**limits)
    problems = problems_of(config)
    assert [problem.path for problem in problems] == ([path] if path else [])
    for problem in problems:
        changed = pasted(config, problem.hint)
        assert change in problem.hint and changed != config and problems_of(changed) == []


def test_the_hint_changes_a_set_ring_or_reports_the_least_need() -> None:
    tree = llama_config(device_gib=13.0).model_dump()
    tree["parallel"] |= {"sp_size": 8, "ring_size": 2}
    tree["cluster"]["workers"] = 32
    (problem,) = problems_of(Config.model_validate(tree))
    assert "--set parallel.sp_size=16 --set parallel.ring_size=1" in problem.hint
    (problem,) = problems_of(llama_config(device_gib=2.0))
    assert "no settings fit" in problem.hint and "8.8 GiB per device and 103.1 GiB per host" in problem.hint
    assert "memory.offload_param=cpu" in problem.hint


@pytest.mark.parametrize("nothing_else_fits", [False, True])
def test_each_stage_that_does_not_fit_is_shortened_by_a_setting_of_its_own(nothing_else_fits: bool) -> None:
    lean: dict[str, Any] = {
        "attention_output": "none", "offload_activations": ["layer_inputs"], "offload_optimizer": "cpu",
        "offload_param": "cpu", "attention_head_groups": 1, "mlp_tile": "auto",
    }  # fmt: skip
    memory: dict[str, Any] = {"device_gib": 8.14, **lean} if nothing_else_fits else {"device_gib": 32.0}
    tree = llama_config(**memory).model_dump(mode="json", exclude_unset=True)
    tree["stages"] = [
        {"name": "short", "steps": 9, "context_tokens": 4096},
        {"name": "phase.1", "steps": 9, "context_tokens": 98304},
        {"name": "long"},
    ]
    config = parse_config(tree)
    shape = make_shape(config)
    hint = fit_hint(config, shape)
    assert ("no settings fit" in hint) == nothing_else_fits
    shorter = re.findall(r"(\S+=\d+) at most", hint)
    assert [one.partition("=")[0] for one in shorter] == ["stages.1.context_tokens", "stages.long.context_tokens"]
    first, second = (str(one) for one in memory_problems_of_run(config, shape))
    assert "(in stage 'phase.1')" in first and "(in stage 'long')" in second and hint in first and hint in second
    assert list(memory_problems_of_run(parse_config(tree, shorter), shape)) == []
