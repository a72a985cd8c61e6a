"""The table of model types: its stored outcomes, and the page made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.distributed.sweep_case import BOUND, LENGTHS, MASKED, Outcome

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
_MOST_WORDS = 170
_KINDS = {
    "exact": "exact",
    "refused": "refused",
    "composite": "its text part",
    "not built": "not tried",
    "failed": "**failed**",
    "wrong": "**wrong**",
}
_ABOUT = """\
# Model types

Every model type that Transformers {transformers} trains as a causal language model, built tiny and trained one step on
two and on four ranks: loss, logits and every gradient of a row of packed documents ({lengths} tokens, and padding)
against each document alone in one process with eager attention, by norm, in fp64. **exact** is within {bound:g}.
**refused** is an error before weights are read, with the reason. **windows** is the type again with sliding windows or
local spans switched on, where a setting offers them. Nothing else may come out: the sweep is a test, and a type or an
outcome that is new in another version of Transformers turns it red.

`ray-ulysses doctor --model DIR` says the same for one model with its own settings, which may differ from the type's
defaults. This page is written by the test:
`STORE_SWEEP=1 python -m pytest -m slow tests/distributed/test_model_sweep.py`.
"""

_ABOUT_MASKED = """\
## Masked language models

The same for every model type that Transformers trains as a masked language model, with attention in both directions
and without dropout. {total} types: {exact} exact.
"""


def load() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(STORED.read_text())
    return stored


def store(outcomes: Sequence[Outcome], transformers: str) -> None:
    """Store the outcomes, and write the page."""
    stored = {"transformers": transformers, "outcomes": [asdict(one) for one in outcomes]}
    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    PAGE.write_text(page(stored))


def page(stored: dict[str, Any]) -> str:
    by_type: dict[str, dict[str, dict[str, str]]] = {}
    masked = [one for one in stored["outcomes"] if one["variant"] == MASKED]
    for one in (one for one in stored["outcomes"] if one not in masked):
        by_type.setdefault(one["model_type"], {})[one["variant"]] = one
    lengths = ", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}"
    lines = [_ABOUT.format(transformers=stored["transformers"], lengths=lengths, bound=BOUND), _counts(by_type), ""]
    lines += ["| type | default | windows | |", "| --- | --- | --- | --- |"]
    for name, variants in by_type.items():
        default, windows = variants["default"], variants.get("windows")
        cells = [f"`{name}`", _KINDS[default["kind"]], "" if windows is None else _KINDS[windows["kind"]]]
        lines.append("| " + " | ".join([*cells, _note(default)]) + " |")
    exact = sum(one["kind"] == "exact" for one in masked)
    lines += ["", _ABOUT_MASKED.format(total=len(masked), exact=exact), "| type | | |", "| --- | --- | --- |"]
    lines += [f"| `{one['model_type']}` | {_KINDS[one['kind']]} | {_note(one)} |" for one in masked]
    return "\n".join(lines) + "\n"


def _counts(by_type: dict[str, dict[str, dict[str, str]]]) -> str:
    kinds = [variants["default"]["kind"] for variants in by_type.values()]
    exact, refused = kinds.count("exact"), kinds.count("refused")
    composite, rest = kinds.count("composite"), len(kinds) - kinds.count("exact") - kinds.count("refused")
    return (
        f"{len(kinds)} types: {exact} exact, {refused} refused, {composite} multimodal ones whose text part is a type "
        f"of its own (`model.part: text`, [fine-tune.md](fine-tune.md)), {rest - composite} not tried."
    )


def _note(outcome: dict[str, str]) -> str:
    if outcome["kind"] == "composite":
        return f"`{outcome['note']}`"
    reason = (
        outcome["note"]
        .split("; ")[0]
        .replace("model.config: ", "")
        .removeprefix(f"{outcome['model_type']} ")
        .replace("|", "/")
    )
    return reason if len(reason) <= _MOST_WORDS else reason[:_MOST_WORDS].rsplit(" ", 1)[0] + " ..."
