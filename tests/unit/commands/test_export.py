"""What a person sees of an export."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ulysses.commands.export import render_export
from ray_ulysses.export.card import model_card
from ray_ulysses.export.report import AdapterFacts, CheckResult, ExportReport, python_lines, serve_line

REPORT = ExportReport(
    run="long-8b", step=2000, attempt=3, trained_tokens=1_234_567_890, data_digest="00ff00ff00ff00ff",
    out="/models/long-8b", architecture="LlamaForCausalLM", parameters=8_030_261_248,
    weights="bf16, as used in training",
    files={
        "model-00001-of-00002.safetensors": 10**10, "model-00002-of-00002.safetensors": 6 * 10**9, "config.json": 700,
        "README.md": 900,
    },
    context_tokens=524_288, max_positions=131_072, rope="rope llama3, factor 8, theta 500000", tokenizer="from /base",
    published_tokenizer="the tokenizer that prepared the corpus", has_tokenizer=True, versions={"torch": "2.13.0"},
    check=CheckResult(
        tokens=512, documents=2, origin="the run's first training rows", difference=2e-6, scale=20.0, bound=1e-5
    ),
    seconds=75.2, was_there=False,
)  # fmt: skip
ADAPTER = replace(
    REPORT,
    adapter=AdapterFacts(base="org/model 8b", rank=24, has_modules=False),
    loaded_with="AutoPeftModelForCausalLM",
    files={"adapter_config.json": 700, "adapter_model.safetensors": 10**6, "generation_config.json": 70},
)


def test_an_export_says_what_where_and_how_to_load_it() -> None:
    lines = render_export(REPORT).splitlines()
    assert lines[0] == "run 'long-8b', step 2,000 (attempt 3, 1.23B trained tokens): exported in 1m15s"
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:8]}
    assert rows.pop("check").endswith("by 1.0e-07 relative to the largest logit; the bound is 1e-05")
    assert rows == {
        "directory": "/models/long-8b",
        "model": "LlamaForCausalLM, 8.03B parameters",
        "weights": "bf16, as used in training",
        "files": "2 of safetensors and 2 other files, 16 GB",
        "context": "rows of up to 524,288 tokens; max_position_embeddings 131,072, rope llama3, factor 8, theta "
        "500000, as trained",
        "tokenizer": "from /base",
    }
    assert lines[8].startswith("  note: ") and "max_position_embeddings=131,072" in lines[8]
    assert lines[-4:] == [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained("/models/long-8b", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("/models/long-8b")',
        "# or: vllm serve /models/long-8b --max-model-len 131072",
    ]


def test_equal_logits_are_called_equal() -> None:
    assert REPORT.check is not None
    equal = replace(REPORT.check, difference=0.0)
    assert equal.words.endswith("(the run's first training rows) equal the live model's bit for bit")
    assert equal.holds
    assert not replace(equal, difference=float("nan")).holds
    assert not replace(equal, difference=1.0).holds


def test_paths_can_be_pasted_into_a_shell_and_into_python() -> None:
    lines = render_export(replace(REPORT, out="/my models/ünïcode 😀")).splitlines()
    assert lines[-1] == "# or: vllm serve '/my models/ünïcode 😀' --max-model-len 131072"
    assert lines[-3] == 'model = AutoModelForCausalLM.from_pretrained("/my models/ünïcode 😀", dtype="auto")'


def test_an_adapter_is_served_with_its_base_its_rank_its_context_and_its_end_tokens() -> None:
    served = (
        "vllm serve 'org/model 8b' --enable-lora --max-lora-rank 32 --lora-modules adapter=/a --max-model-len 131072"
    )
    assert serve_line(ADAPTER, "/a") == f"{served} --generation-config /a"
    assert 'model.generation_config = GenerationConfig.from_pretrained("/a")' in python_lines(ADAPTER, "/a")
    moved = replace(ADAPTER, files=ADAPTER.files | {"config.json": 700})
    assert serve_line(moved, "/a") == f"{served} --hf-config-path /a --generation-config /a"


@pytest.mark.parametrize(("rank", "taken"), [(1, 1), (2, 8), (16, 16), (257, 320), (512, 512)])
def test_the_served_rank_is_the_next_that_vllm_takes(rank: int, taken: int) -> None:
    assert ADAPTER.adapter is not None
    report = replace(ADAPTER, adapter=replace(ADAPTER.adapter, rank=rank))
    assert f" --max-lora-rank {taken} " in serve_line(report, "/a")


@pytest.mark.parametrize("changed", [{"rank": 513}, {"has_modules": True}])
def test_an_adapter_that_vllm_does_not_take_is_to_be_merged(changed: dict[str, Any]) -> None:
    assert ADAPTER.adapter is not None
    report = replace(ADAPTER, adapter=replace(ADAPTER.adapter, **changed))
    said = render_export(report).splitlines()[-1]
    assert said.startswith("# vLLM does not load adapters with") and "export --merge" in said
    card = model_card(report).decode()
    assert f"```sh\n{said}\n```" in card and "| data digest | `00ff00ff00ff00ff` |" in card
    assert "was not compared with the live model" in model_card(replace(report, check=None)).decode()
