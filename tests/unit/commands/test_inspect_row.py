"""What a person is told of a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray_ulysses.commands.inspect import render_row
from ray_ulysses.inspect.row import PieceText, RowCorpus, RowPiece, RowReport, TimesTrained

PIECE = RowPiece(
    document=1234, corpus_document=1234, start=0, length=2000, goes_on=True, corpus="/data/a", labels=((1, 2001),),
    source="/texts/a.jsonl", offset=17, id="key", text=PieceText(head="first\nline", tail="the end", left_out=1983),
)  # fmt: skip
REPORT = RowReport(
    run="demo", row=5, planned_step=2, trained=(TimesTrained(step=2, attempt=3),),
    thrown_away=(TimesTrained(step=2, attempt=1),), segment=0, plan_id="aaaa", epoch=0, row_tokens=2008, tokens=2000,
    padding=8, supervised=2000, cost=4_000_000, corpora=(RowCorpus(path="/data/a", fingerprint="f", problem=None),),
    pieces=(PIECE,),
)  # fmt: skip


def make_report(**changes: Any) -> RowReport:
    return replace(REPORT, **changes)


def test_what_is_missing_is_said_and_the_rest_still_told() -> None:
    gone = replace(PIECE, labels=None, source=None, offset=None, id=None, text=None)
    corpus = RowCorpus(path="/data/a", fingerprint="f", problem="does not exist")
    text = render_row(make_report(corpora=(corpus,), pieces=(gone,)))
    assert "0  /data/a: CAN'T BE READ: does not exist" in text
    assert "      0     1,234      0   2,000       -        yes       0   -       -  -" in text
    assert "piece 0: tokens" not in text
    untold = render_row(make_report(pieces=(replace(PIECE, text=None, text_problem="no tokenizer"),)))
    assert "  NO TEXT: no tokenizer" in untold


def test_no_document_drives_the_terminal() -> None:
    text = render_row(make_report(pieces=(replace(PIECE, text=PieceText(head="\x1b]0;x\x07", tail="", left_out=0)),)))
    assert "\x1b" not in text and "\x07" not in text


def test_what_is_supervised_in_part_is_named_token_by_token() -> None:
    text = render_row(make_report(pieces=(replace(PIECE, labels=((7, 9), (1500, 1611))),)))
    assert "      0     1,234      0   2,000     113        yes" in text
    assert (
        "piece 0: tokens [0, 2,000) of document 1,234; supervised (between ⟦ and ⟧): [7, 9), [1,500, 1,611)\n" in text
    )
    assert "; supervised (between ⟦ and ⟧): nothing\n" in render_row(make_report(pieces=(replace(PIECE, labels=()),)))
