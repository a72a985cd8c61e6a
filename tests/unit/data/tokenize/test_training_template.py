"""TRL's training variant of a tokenizer's template, and all of TRL's templates on a grid of conversations.

The templates are read from the folder in RAY_ULYSSES_TRL_TEMPLATES, or from the installed package.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize.chat_template import training_template, trl_templates
from ray_ulysses.data.tokenize.options import EncodingOptions
from ray_ulysses.data.tokenize.tokenizers import load_tokenizer
from ray_ulysses.errors import UserError
from tests.unit.data.tokenize.test_chat_templates import (
    GRID,
    TEMPLATES,
    WEATHER,
    directory_of,
    spans_of,
    talk,
    tokenizer_of,
    without_today,
)
from tests.unit.data.tokenize.test_forged_chats import reason_of

RESULTS = Path(__file__).parents[3] / "results" / "chat_templates.md"
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "</s>")


def test_the_training_variant_of_the_tokenizers_template_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("qwen3", "phi3"):
        directory = directory_of(tmp_path, name)
        variant = (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
        assert training_template(directory, TEMPLATES) == variant
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(UserError, match=r"^--chat-template=training: TRL has no training variant"):
        training_template(directory, TEMPLATES)
    monkeypatch.setattr("ray_ulysses.data.tokenize.chat_template.trl_templates", lambda: None)
    with pytest.raises(UserError, match="install trl"):
        training_template(directory)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"^--messages-field: .* has no chat template"):
        training_template(directory, TEMPLATES)


def templates() -> Path | None:
    named = os.environ.get("RAY_ULYSSES_TRL_TEMPLATES")
    return trl_templates() if named is None else Path(named)


def outcome_of(directory: Path, has_marks: bool) -> tuple[Counter[str], list[str]]:
    """Return counts of the outcomes of all conversations in the grid, and a list of errors."""
    from transformers import AutoTokenizer

    tokenizer, reference = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    chat, by_marks = tokenizer.chat(), tokenizer.chat(EncodingOptions(turns="marks")) if has_marks else None
    met: Counter[str] = Counter()
    wrong = []
    for turn in GRID:
        messages, tools = talk(*turn), [WEATHER] if turn[1] else []
        try:
            documents = chat.encode(messages, tools)
        except RowError as error:
            is_reasoned = re.match(r"the chat template (fails in line \d+: |omits |renders )", str(error))
            met["refused"] += 1
            met["because " + textwrap.shorten(re.sub(r"[0-9]+", "N", str(error)), 90, placeholder=" ...")] += 1
            if not is_reasoned:
                wrong.append(f"{turn}: {error}")
            continue
        met["rendered"] += 1
        answers = [one for one in messages if one["role"] == "assistant"]
        said = "".join(tokenizer.decode(one.ids[a:b]) for one in documents for a, b in spans_of(one))
        wrong += [f"{turn}: {one['content']!r} is not learned" for one in answers if said.count(one["content"]) < 1]
        # If the marks omit a part of a turn, such as earlier reasoning, turns are found by rendering instead.
        if by_marks is not None and reason_of(by_marks, messages, tools) is None:
            found: Any = reference.apply_chat_template(
                messages, tools=tools or None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            mask = np.zeros(documents[0].ids.size, dtype=np.int64)
            for start, stop in spans_of(documents[0]):
                mask[start:stop] += 1
            met["equal"] += found["assistant_masks"] == mask.tolist()
            met["compared"] += 1
            if found["input_ids"] != documents[0].ids.tolist():
                wrong.append(f"{turn}: other tokens than Transformers'")
    return met, wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(templates() is None, reason="the package trl is not installed")
def test_every_template_of_trl_renders_a_conversation_or_refuses_it_with_a_reason(tmp_path: Path) -> None:
    folder = templates()
    assert folder is not None
    rows, problems, all_met = [], [], Counter[str]()
    paths = sorted(folder.glob("*.jinja"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        has_marks = "generation %}" in text
        ends = [end for end in _ENDS if end in text] or ["<|im_end|>"]
        directory = tokenizer_of(tmp_path / path.stem, without_today(text), ends, ends[0])
        met, wrong = outcome_of(directory, has_marks)
        problems += [f"{path.stem}: {one}" for one in wrong]
        all_met += met
        compared = f"{met['equal']} of {met['compared']}" if met["compared"] else ""
        reasons = [f"{count} {name.removeprefix('because ')}" for name, count in met.items() if name[:7] == "because"]
        rows.append([path.stem, str(met["rendered"]), str(met["refused"]), compared, "; ".join(reasons)])
        if met["compared"] != met["equal"]:
            problems.append(f"{path.stem}: {compared} masks are equal")
    version = next(iter(folder.parent.parent.glob("trl-*.dist-info")), Path("trl")).name.removesuffix(".dist-info")
    head = ["template", "rendered", "refused", "spans equal Transformers' mask", "refused, why"]
    cells = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    RESULTS.write_text(
        f"# Chat templates\n\nAll {len(paths)} templates of {version}, each on {len(GRID)} conversations (1 to 3 turns "
        "x tools x reasoning x a system message), by `tests/unit/data/tokenize/test_training_template.py`. "
        f"{all_met['rendered']:,} are rendered and {all_met['refused']:,} refused with a reason; of those whose "
        f"turns the template marks whole, {all_met['equal']:,} of {all_met['compared']:,} have "
        "the spans of Transformers' mask.\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in cells) + "\n",
        encoding="utf-8",
    )
    assert problems == []
    assert len(paths) > 50 and all_met["rendered"] > 800 and all_met["compared"] > 350
