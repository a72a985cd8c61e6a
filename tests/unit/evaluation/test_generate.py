"""``ray-ulysses generate`` writes what plain Transformers writes from an export, and refuses what can't fit."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ray_ulysses.cli import app, run
from ray_ulysses.config.loading import load_config
from ray_ulysses.engine.model import build_model
from ray_ulysses.errors import UserError
from ray_ulysses.evaluation.generate import cache_bytes, refuse_unfit
from tests.unit.attention.models import ARCHITECTURES, zoo_model
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.evaluation.test_evaluate_command import VOCAB, make_trained
from tests.unit.export.runs import fields_of, write_checkpoint, write_config

PROMPTS = ("def main(", "Once upon a time")
CHAT = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}<assistant>"


class Ask:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, command: str = "generate", code: int = 0) -> str:
        assert run(app, [command, *map(str, arguments)]) == code
        captured = self._capsys.readouterr()
        return captured.err.strip() if code else captured.out

    def json(self, *arguments: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self(*arguments, "--json", "-q"))
        return found


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    return Ask(capsys)


def plain(folder: Path, prompt: str, num_tokens: int, **options: Any) -> list[int]:
    """Generate greedily with nothing but Transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    found = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    tokens: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", "bf16"), ("gemma2", "fp32")])
def test_a_run_writes_what_plain_transformers_writes_from_its_export(
    ask: Ask, tmp_path: Path, architecture: str, dtype: str
) -> None:
    folder, exported = tmp_path / "run", tmp_path / "hf"
    text_corpus(tmp_path, varied_texts(4))
    make_trained(folder, architecture, dtype)
    ask(folder, "--out", exported, "--no-check", "--tokenizer", "bytes", command="export")
    options = ("--max-new-tokens", 24, *(word for one in PROMPTS for word in ("--prompt", one)))
    ours = ask.json(folder, "--tokenizer", "bytes", *options)
    assert (ours["step"], ours["dtype"], ours["chat_template"]) == (4, dtype, False)
    assert [one["tokens"] for one in ours["outputs"]] == [plain(exported, one, 24) for one in PROMPTS]
    theirs = ask.json(exported, *options)
    assert theirs["step"] is None and theirs["outputs"] == ours["outputs"]
    assert all(one["ended"] == (one["tokens"][-1] == 256) for one in ours["outputs"])
    # As text: a single continuation alone, several below their prompts.
    assert ask(exported, *options[:4], "-q").startswith(ours["outputs"][0]["text"][:1])
    assert ask(exported, *options, "-q").startswith(f"> {PROMPTS[0]}\n")


def test_an_adapters_run_writes_what_its_merged_export_writes(ask: Ask, tmp_path: Path) -> None:
    fields = fields_of(ARCHITECTURES["qwen3"](vocab_size=VOCAB))
    write_config(tmp_path / "run", fields, model__adapter={"rank": 3, "targets": ["q_proj", "down_proj"]})
    model = build_model(load_config(tmp_path / "run/config.yaml"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
    write_checkpoint(
        tmp_path / "run", model, frozen=[name for name, one in model.named_parameters() if not one.requires_grad]
    )
    out = tmp_path / "hf"
    ask(tmp_path / "run", "--merge", "--out", out, "--no-check", "--tokenizer", "bytes", command="export")
    ours = ask.json(tmp_path / "run", "--tokenizer", "bytes", "--prompt", PROMPTS[0], "--max-new-tokens", 16)
    assert ours["outputs"][0]["tokens"] == plain(out, PROMPTS[0], 16)


def test_the_chat_template_formats_the_prompt_unless_raw(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trained(tmp_path / "run")
    ask(tmp_path / "run", "--out", folder := tmp_path / "hf", "--no-check", "--tokenizer", "bytes", command="export")
    (folder / "chat_template.jinja").write_text(CHAT)
    options = ("--max-new-tokens", 8)
    chat = ask.json(folder, "--prompt", "hi", *options)
    assert chat["chat_template"]
    assert chat["outputs"][0]["tokens"] == plain(folder, "<user>hi<assistant>", 8)
    raw = ask.json(folder, "--prompt", "<user>hi<assistant>", "--raw", *options)
    assert not raw["chat_template"] and raw["outputs"][0]["tokens"] == chat["outputs"][0]["tokens"]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert ask.json(folder, *options)["outputs"] == chat["outputs"], "the prompt is read from standard input"
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    said = ask(folder, "--prompt", "hi", "-q", code=2)
    assert "--prompt: the chat template fails" in said and said.endswith("add --raw to generate without the template")


def test_sampling_depends_on_the_seed_alone(ask: Ask, tmp_path: Path) -> None:
    make_trained(tmp_path / "run")
    options = (tmp_path / "run", "--tokenizer", "bytes", "--max-new-tokens", 12, "--temperature", 1, "--top-p", 0.9)
    both = ask.json(*options, "--prompt", "a", "--prompt", "b")["outputs"]
    assert both[1] == ask.json(*options, "--prompt", "b")["outputs"][0], "other prompts do not matter"
    assert both[1] != ask.json(*options, "--prompt", "b", "--seed", 1)["outputs"][0]


def test_what_a_model_writes_does_not_act_on_the_terminal(ask: Ask, tmp_path: Path) -> None:
    model = zoo_model("llama", vocab_size=VOCAB)
    with torch.no_grad():
        # Every hidden state is the same, and predicts the escape byte.
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if ".layers." in name or "lm_head" in name else 1.0)
        model.lm_head.weight[27] = 1
    write_config(tmp_path / "run", fields_of(ARCHITECTURES["llama"](vocab_size=VOCAB)))
    write_checkpoint(tmp_path / "run", model)
    said = ask(tmp_path / "run", "--tokenizer", "bytes", "--prompt", "a", "--max-new-tokens", 2, "-q")
    assert said == "\\x1b\\x1b\n"


def test_impossible_requests_are_refused_with_a_way_out(ask: Ask, tmp_path: Path) -> None:
    make_trained(folder := tmp_path / "run")
    zoo_model("gpt2", vocab_size=VOCAB).save_pretrained(gpt2 := tmp_path / "gpt2")
    given = ("--tokenizer", "bytes", "--prompt", "a")
    refused: dict[tuple[object, ...], str] = {
        (folder, "--prompt", "a"): "--tokenizer: is not set, and the run has no usable tokenizer (",
        (gpt2, "--prompt", "a"): "has no tokenizer file",
        (folder, *given[:2], "--prompt", ""): "--prompt: is empty",
        (folder, *given, "--step", "3"): "--step=3 is not a committed step of this run; use one of 4",
        (gpt2, *given, "--step", "3"): "--step=3: needs a run, but ",
        (folder, *given, "--top-p", "0.5"): "--top-p=0.5: has no effect with --temperature 0; set --temperature",
        (folder, *given, "--top-p", "0"): "--top-p=0.0: must be above 0",
        (gpt2, *given, "--max-new-tokens", 256): "(257) exceed the model's table of 256 positions",
        (folder, *given, "--max-new-tokens", 10**11): "does not fit into the memory of ",
        (tmp_path / "nowhere", *given): "is neither a run (no config.yaml) nor a model directory",
    }
    for arguments, text in refused.items():
        said = ask(*arguments, "-q", code=2).rpartition("\n")[2]
        assert said.startswith("error: ") and text in said, (arguments, said)
    diverged = zoo_model("llama", vocab_size=VOCAB)
    with torch.no_grad():
        diverged.lm_head.weight.fill_(3e38)
    write_checkpoint(folder, diverged, step=5)
    assert "the model's logits are not finite" in ask(folder, *given, "-q", code=1)


def test_the_plan_names_weights_cache_and_free_memory() -> None:
    gib = 2**30
    refuse = partial(refuse_unfit, weights=4 * gib, loaded=8 * gib, cache=3 * gib)
    refuse(8 * gib, 7 * gib)
    refuse(8 * gib, None)
    refuse(None, None)
    with pytest.raises(UserError, match=r"of the GPU: weights 4\.00 GiB, KV cache 3\.00 GiB, free 6\.00 GiB; use"):
        refuse(8 * gib, 6 * gib)
    with pytest.raises(UserError, match=r"of this machine: weights 4\.00 GiB, KV cache 3\.00 GiB, free 6\.00 GiB"):
        refuse(6 * gib, None)
    with pytest.raises(UserError, match=r"of this machine: weights 8\.00 GiB while loading, free 7\.00 GiB"):
        refuse(7 * gib, 80 * gib)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "deepseek_v3", "qwen3_next", "falcon_h1"])
def test_the_planned_cache_is_at_least_what_transformers_allocates(architecture: str) -> None:
    model = zoo_model(architecture, vocab_size=VOCAB)
    with torch.no_grad():
        cache = model(torch.zeros(1, 16, dtype=torch.long), use_cache=True).past_key_values
    held = sum(
        one.nbytes
        for layer in cache.layers
        for one in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(one, torch.Tensor)
    )
    planned = cache_bytes(model.config.get_text_config(decoder=True), 16, 4)
    # A sliding window keeps fewer tokens than planned.
    assert 0 < held <= planned and (held == planned or architecture == "gemma2")
