from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import numpy as np
import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.report.drawing import not_finite, style, thin
from ray_ulysses.report.page import render_report
from ray_ulysses.report.pictures import (
    PICTURES,
    added_losses_picture,
    loss_picture,
    mix_picture,
    mix_shares,
    time_shares,
    tokens_per_second,
)
from ray_ulysses.report.run_record import NothingToDrawError, RunRecord, read_record
from ray_ulysses.report.words import count, duration
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.tracking.run_time import run_timeline, time_spent
from tests.s3_server import S3Server
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import Run, make_run
from tests.unit.report.many_steps import REPLAYED, loss_of, write_run


def _curve(record: RunRecord, label: str) -> tuple[list[float], list[float]]:
    with style():
        lines = {line.get_label(): line for line in loss_picture(record).axes[0].lines}
    return list(lines[label].get_xdata()), list(lines[label].get_ydata())


def test_each_step_is_drawn_once(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path / "run", 30))
    tokens, losses = _curve(record, "training")
    assert tokens == [4096.0 * step for step in range(1, 31)]
    assert losses == [loss_of(step, 1 if step <= 15 else 2, 30) for step in range(1, 31)]
    assert record.tokens[-1] == record.history.tokens
    tokens, losses = _curve(record, "replayed")
    assert tokens == [4096.0 * step for step in (16, 17, 18)]
    assert losses == [loss_of(step, 1, 30) for step in (16, 17, 18)]
    assert tokens_per_second(record).tolist() == pytest.approx([4096 / 1.5] * 30)


def test_added_losses_are_drawn_if_the_journal_has_them(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path / "run", 30))
    with style():
        lines = {line.get_label(): line for line in added_losses_picture(record).axes[0].lines}
    assert list(lines["z-loss"].get_ydata()) == [round(0.01 / step, 9) for step in range(1, 31)]
    last = round(0.02 + loss_of(30, 2, 30) / 100, 9)
    assert list(lines["router loss"].get_ydata())[-1] == last
    without = read_record(write_run(tmp_path / "without", 30, added_losses=False))
    assert not np.isnan(without.kept["learning_rate"]).any()
    with pytest.raises(NothingToDrawError, match="neither a z-loss nor a router loss"):
        added_losses_picture(without)


def test_the_timeline_adds_up_to_the_ledger(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path / "run", 300))
    entries = record.journal.entries
    spent, line = time_spent(entries), run_timeline(entries)
    whole = np.array([line.begin, line.end])
    assert line.seconds_between("steps_s", whole).sum() == pytest.approx(spent.steps_s + spent.lost_steps_s)
    parts = sum(line.seconds_between(part, whole).sum() for part in line.spans)
    assert parts == pytest.approx(spent.total_s)
    edges, shares = time_shares(record)
    width = edges[1] - edges[0]
    assert shares["replayed steps"].sum() * width == pytest.approx(1.5 * REPLAYED)
    assert shares["steps that count"].sum() * width == pytest.approx(spent.steps_s, abs=width)
    assert max(np.add.reduce(list(shares.values()))) <= 1 + 1e-9
    # Nothing ran between the two commands.
    idle = 1 - np.add.reduce(list(shares.values()))
    assert idle.sum() * width == pytest.approx(spent.between_commands_s, abs=width)


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = render_report(write_run(tmp_path / "run", 40))
    assert not re.findall(r"https?://|//[a-z]+\.|<script|@import|<iframe", page)
    assert set(re.findall(r'<link[^>]*href="([^"]*)"', page)) == {"data:,"}
    # All colors are CSS variables of the page.
    assert not re.findall(r"#0[123]00\w\w|#0[12]0[12]0[12]", page)
    assert "prefers-color-scheme:dark" in page and "width=device-width" in page
    assert page.count("<svg") == 9
    for title in ("Loss", "Where the time went", "Attempts", "Checkpoints", "Versions"):
        assert f"<h2>{title}</h2>" in page
    assert "<td>2.13.0</td><td>torch</td>" in page


def test_two_runs_have_the_same_axes(tmp_path: Path) -> None:
    short, long = write_run(tmp_path / "short", 10), write_run(tmp_path / "long", 40)
    page = render_report(short, long)
    assert "<title>short beside long</title>" in page
    assert page.index("<h2>Loss · short</h2>") < page.index("<h2>Loss · long</h2>")
    loss = page[page.index("<h2>Loss · short") : page.index("<h2>Where the time")]
    ticks = [re.findall(r">([0-9]+k)</text>", part) for part in loss.split("<h2>Loss · long")]
    assert ticks[0] == ticks[1] and "150k" in ticks[0]


def test_a_run_with_a_plan_shows_its_fill_and_balance(tmp_path: Path, report_run: Run) -> None:
    report_run.trained(6)
    record = read_record(report_run.folder)
    plan = record.plan
    assert plan is not None
    with style():
        figures = {one.title: one.draw(record) for one in PICTURES if one.title in ("Fill", "Imbalance")}
    fill = figures["Fill"].axes[0].lines[0]
    rows = [plan.stats(plan.step_rows(step)) for step in range(1, 7)]
    expected = [one.document_tokens.sum() / (len(one.document_tokens) * plan.settings.capacity) for one in rows]
    assert list(fill.get_ydata()) == pytest.approx(expected)
    assert min(figures["Imbalance"].axes[0].lines[0].get_ydata()) >= 1.0


def test_the_data_mix_counts_the_tokens_of_each_corpus_in_the_trained_rows(tmp_path: Path) -> None:
    corpora = [text_corpus(tmp_path / name, varied_texts(40, seed)).path for seed, name in enumerate(("code", "prose"))]
    run = make_run(tmp_path / "planned", corpora)
    run.trained(6)
    record = read_record(run.folder)
    assert record.plan is not None
    segment = record.plan.newest
    edges, shares = mix_shares(record)
    assert edges.tolist() == [step + 0.5 for step in range(7)]
    boundary = segment.sources[0].num_documents
    for step in range(1, 7):
        pieces = [piece for row in record.plan.step_rows(step) for piece in segment.train.pieces(row)]
        tokens = [sum(p.length for p in pieces if (p.document >= boundary) == second) for second in (False, True)]
        assert shares[step - 1].tolist() == pytest.approx([one / sum(tokens) for one in tokens])
    assert len({round(share, 6) for share in shares[:, 0]}) > 1
    with style():
        legend = mix_picture(record).legends[0]
    assert {text.get_text() for text in legend.get_texts()} == {"code/corpus", "prose/corpus"}


def test_corpus_names_are_escaped(tmp_path: Path) -> None:
    names = ("_hid$x^$den", "a$b")
    corpora = [text_corpus(tmp_path / name, varied_texts(40, seed)).path for seed, name in enumerate(names)]
    run = make_run(tmp_path / "planned", corpora)
    run.trained(2)
    page = render_report(run.folder)
    assert ">./_hid$x^$den/corpus<" in page and ">a$b/corpus<" in page


def test_the_report_of_a_broken_run_lists_the_missing_parts(tmp_path: Path) -> None:
    (tmp_path / "empty/journal").mkdir(parents=True)
    assert "no step has completed yet" in render_report(tmp_path / "empty")
    run = write_run(tmp_path / "run", 20)
    torn = (run / "journal/attempt-0002.jsonl").read_bytes()[:-20].split(b"\n")
    (run / "journal/attempt-0002.jsonl").write_bytes(b"\n".join([*torn[:3], b"rubbish", *torn[4:]]))
    evaluation = run / "evaluation/step-00000020/evaluation.json"
    evaluation.parent.mkdir(parents=True)
    evaluation.write_text('{"format_version": 1, "position_loss": {"bins": 3}, "retrieval": [7]}')
    (run / "plan-facts.json").write_text("{}")
    page = render_report(run)
    assert page.count("drawing failed") == 2, "both parts of the evaluation"
    for words in (
        "at step 19",
        "steps 13 to 13 have no record in the journal",
        "damaged line in the journal: journal/attempt-0002.jsonl",
        "has no data plan yet",
        "the planned memory: plan-facts.json has no memory.device_bytes",
    ):
        assert words in page
    cell = '{"kind": 3, "length": 1, "depth": 0.5, "accuracy": 1}'
    evaluation.write_text(f'{{"format_version": 1, "retrieval": [{cell}]}}')
    assert render_report(run).count("drawing failed") == 1


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 12)
    assert run_command(app, ["report", str(run)]) == 0
    text = (run / "report.html").read_text(encoding="utf-8")
    assert text.endswith("</html>\n") and f"({len(text.encode()):,} bytes)" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert run_command(app, ["report", str(run), "--out", str(tmp_path / "file" / "r.html")]) == 1
    assert "can't be written" in capsys.readouterr().err
    assert run_command(app, ["report", str(run), "--out", ".."]) == 2
    assert "--out='..': is not a file name" in capsys.readouterr().err
    assert run_command(app, ["report", str(tmp_path)]) == 2
    assert run_command(app, ["report", str(run), "--beside", str(tmp_path)]) == 2
    assert "--beside=" in capsys.readouterr().err


def test_a_report_is_written_to_an_object_store(
    tmp_path: Path, s3: S3Server, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", 12)
    there = place_of(s3.uri(f"{prefix}/reports/run.html"))
    assert run_command(app, ["report", str(run), "--out", str(there)]) == 0
    assert str(there) in capsys.readouterr().out
    assert open_store(there.parent).read_whole(there.name).endswith(b"</html>\n")
    assert run_command(app, ["report", str(run), "--out", "s3:/bucket/run.html"]) == 2
    assert "has only one slash after the scheme" in capsys.readouterr().err


@pytest.mark.parametrize("num_steps", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_report_is_small_and_fast(tmp_path: Path, num_steps: int) -> None:
    run = write_run(tmp_path / "run", num_steps)
    began = time.monotonic()
    page = render_report(run)
    assert time.monotonic() - began < 20.0
    assert len(page.encode()) < 1_000_000


@pytest.mark.parametrize("spike", [-7.0, 99.5])
@pytest.mark.parametrize("place", [0, 54_321, 99_999])
def test_no_spike_is_dropped(spike: float, place: int) -> None:
    y = np.sin(np.arange(100_000) / 1000)
    y[place] = spike
    columns, values = thin(np.arange(100_000, dtype=np.float64), y, columns=100)
    assert len(values) <= 400
    assert values[columns == place] == [spike]


def test_a_thinned_curve_keeps_the_extremes_and_the_order() -> None:
    rng = np.random.default_rng(0)
    x, y = np.cumsum(rng.random(50_000)), rng.standard_normal(50_000)
    columns, values = thin(x, y, columns=64)
    assert (np.diff(columns) > 0).all()
    edges = np.linspace(x[0], x[-1], 65)
    for low, high in itertools.pairwise(edges):
        inside, kept = y[(x >= low) & (x < high)], values[(columns >= low) & (columns < high)]
        assert (kept.min(), kept.max()) == (inside.min(), inside.max())


def test_few_points_are_unchanged_and_non_finite_points_are_separate() -> None:
    x, y = np.arange(5.0), np.array([1.0, np.nan, 3.0, np.inf, 5.0])
    assert [list(one) for one in thin(x, y)] == [[0, 2, 4], [1, 3, 5]]
    assert list(not_finite(x, y)) == [1, 3]
    many = not_finite(np.arange(10_000.0), np.full(10_000, np.nan), columns=10)
    assert list(many[:2]) == [0, 1000] and len(many) == 10


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.6, "1.00k"), (12_345, "12.3k"), (999_600, "1.00M"), (8_030_261_248, "8.03B")],
)
def test_counts_have_three_digits_and_a_unit(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-3, "0s"), (59.4, "59s"), (59.6, "1m00s"), (252, "4m12s"), (11_100, "3h05m"), (187_200, "2d04h")],
)
def test_durations_have_their_two_largest_units(seconds, text):
    assert duration(seconds) == text
