from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ulysses.cli import app
from ray_ulysses.cli import run as run_command
from ray_ulysses.config.loading import parse_config
from ray_ulysses.report import publish
from ray_ulysses.report.drawing import not_finite, style, thin
from ray_ulysses.report.page import render_report
from ray_ulysses.report.pictures import (
    PICTURES,
    added_losses_picture,
    dead_experts_picture,
    loss_picture,
    mix_picture,
    mix_shares,
    router_entropy_picture,
    router_imbalance_picture,
    router_layers_picture,
    source_losses_picture,
    time_shares,
    tokens_per_second,
)
from ray_ulysses.report.publish import published, redraw
from ray_ulysses.report.run_record import NothingToDrawError, RunRecord, read_record
from ray_ulysses.report.words import count, duration
from ray_ulysses.storage.place import open_store, place_of
from ray_ulysses.tracking import mlflow_results
from ray_ulysses.tracking.journal_lines import encode_event, with_checksum
from ray_ulysses.tracking.mlflow_results import ArtifactError, store_text
from ray_ulysses.tracking.mlflow_tracker import TrackingIdentity
from ray_ulysses.tracking.run_time import run_timeline, time_spent
from tests.s3_server import S3Server
from tests.unit.config.trees import small_tree
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import Run, make_run
from tests.unit.tracking import journals

REPLAYED = 3
"""Steps that the second attempt trains again."""
SPIKE = 99.5
"""The loss of one step."""


def write_run(run_dir: Path, num_steps: int, *, added_losses: bool = True) -> Path:
    """Write a run of ``num_steps`` steps, one of which has a loss spike, and return its directory.

    Without ``added_losses`` it has neither a z-loss nor a router loss.
    """
    (run_dir / "journal").mkdir(parents=True)
    half = num_steps // 2
    for attempt, ranks, first, last in ((1, 4, 1, half + REPLAYED), (2, 2, half + 1, num_steps)):
        begin = 1.7e9 + 2.0 * first + 600.0 * attempt
        started = journals.started(
            first - 1, time=begin, attempt=attempt, session=f"s{attempt}", command_started=begin - 30.0,
            world_size=ranks, dp_size=ranks // 2, last_step=num_steps, versions={"torch": "2.13.0"},
            settings={"model.path": "hub/tiny", "data.context_tokens": 2048},
        )  # fmt: skip
        with (run_dir / f"journal/attempt-{attempt:04}.jsonl").open("wb") as file:
            file.write(with_checksum(encode_event(started)) + b"\n")
            for step in range(first, last + 1):
                loss, time = loss_of(step, attempt, num_steps), begin + 2.0 * (step - first + 1)
                added = f'"z_loss": {round(0.01 / step, 9)}, "router_loss": {round(0.02 + loss / 100, 9)}, '
                text = (
                    f'{{"event": "step", "time": {time}, "attempt": {attempt}, "step": {step}, "loss": {loss}, '
                    f'"tokens": 4096, "rows": [{2 * step - 2}, {2 * step}], "digest": "{step:016x}", "seconds": 1.5, '
                    f'{added if added_losses else ""}"learning_rate": 0.001, "grad_norm": {1 + step % 7}, "mfu": 0.5, '
                    '"peak_memory_gib": 12.5}'
                )
                file.write(with_checksum(text.encode()) + b"\n")
    return run_dir


def loss_of(step: int, attempt: int, num_steps: int) -> float:
    """Return the loss that `write_run` gives a step."""
    return SPIKE if (step, attempt) == (num_steps * 2 // 3, 2) else round(2 + 3 / (1 + step / 1000) + attempt / 8, 6)


@pytest.fixture
def report_run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "planned", [text_corpus(tmp_path / "texts", varied_texts(60)).path])


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


ROUTER_PICTURES = (router_imbalance_picture, dead_experts_picture, router_entropy_picture, router_layers_picture)


def imbalance_of(layer: int, step: int, attempt: int) -> float:
    return round(1 + attempt + layer / 10 + step / 100, 4)


def write_mixture(run_dir: Path, num_steps: int, layers: tuple[int, ...]) -> Path:
    """Write a run whose second attempt trains the last two steps of the first again."""
    (run_dir / "journal").mkdir(parents=True)
    half = num_steps // 2
    for attempt, first, last in ((1, 1, half + 2), (2, half + 1, num_steps)):
        stamp: dict[str, Any] = {"time": float(attempt), "attempt": attempt}
        records = [journals.started(first - 1, last_step=num_steps, **stamp)]
        for step in range(first, last + 1):
            imbalance = [imbalance_of(layer, step, attempt) for layer in layers]
            summary = {"router_imbalance": max(imbalance), "dead_experts": step % 3, "router_entropy": 1.5}
            records.append(journals.step(step, **summary, **stamp))
            lists = {"imbalance": imbalance, "dead": [0] * len(layers), "entropy": [1.5] * len(layers)}
            records.append({"event": "routers", "step": step, "layers": list(layers), **lists, **stamp})
        lines = (with_checksum(encode_event(one)) + b"\n" for one in records)
        (run_dir / f"journal/attempt-{attempt:04}.jsonl").write_bytes(b"".join(lines))
    return run_dir


def test_routers_are_drawn_by_step_and_layer_if_the_journal_has_them(tmp_path: Path) -> None:
    layers = (1, 2, 5)
    record = read_record(write_mixture(tmp_path / "run", 20, layers))
    attempts = [1 if step <= 10 else 2 for step in range(1, 21)]
    wanted = [[imbalance_of(layer, n, attempt) for n, attempt in enumerate(attempts, 1)] for layer in layers]
    with style():
        drawn = [draw(record).axes[0] for draw in ROUTER_PICTURES]
    curves = [list(axes.lines[0].get_ydata()) for axes in drawn[:3]]
    assert curves == [wanted[-1], [step % 3 for step in range(1, 21)], [1.5] * 20]
    assert drawn[3].images[0].get_array().tolist() == wanted
    assert [text.get_text() for text in drawn[3].get_yticklabels()] == ["1", "2", "5"]
    page = render_report(tmp_path / "run")
    assert all(f"<h2>{title}</h2>" in page for title in ("Router imbalance by layer", "Dead experts", "Router entropy"))
    dense = write_run(tmp_path / "dense", 30)
    for draw in ROUTER_PICTURES:
        with pytest.raises(NothingToDrawError, match="no routers"):
            draw(read_record(dense))
    assert "Dead experts" not in render_report(dense)


def test_the_loss_of_each_corpus_is_drawn_if_the_run_trains_on_several(tmp_path: Path) -> None:
    (tmp_path / "mixed/journal").mkdir(parents=True)
    for attempt, first, last in ((1, 1, 6), (2, 5, 8)):
        stamp: dict[str, Any] = {"time": float(attempt), "attempt": attempt}
        records = [journals.started(first - 1, last_step=8, **stamp)]
        for step in range(first, last + 1):
            losses = {"code": float(step + attempt), "_law$": 0.5} if step % 4 else {"code": float(step + attempt)}
            corpora = [{"name": name, "loss": loss, "tokens": 8.0} for name, loss in losses.items()]
            records.append(journals.step(step, **stamp))
            records.append({"event": "sources", "step": step, "corpora": corpora, **stamp})
        lines = (with_checksum(encode_event(one)) + b"\n" for one in records)
        (tmp_path / f"mixed/journal/attempt-{attempt:04}.jsonl").write_bytes(b"".join(lines))
    record = read_record(tmp_path / "mixed")
    with style():
        lines = {line.get_label(): line for line in source_losses_picture(record).axes[0].lines}
    # Steps 5 and 6 were trained twice.
    assert list(lines["code"].get_ydata()) == [2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 9.0, 10.0]
    other = lines["./_law\\$"]
    assert list(other.get_xdata()) == list(record.tokens_at(np.array([1, 2, 3, 5, 6, 7])))
    assert list(other.get_ydata()) == [0.5] * 6
    assert "<h2>Training loss by corpus</h2>" in render_report(tmp_path / "mixed")
    assert "Training loss by corpus" not in render_report(write_run(tmp_path / "single", 30))


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
    assert page.count("<svg") == 11, "two wide plots are drawn a second time for a phone"
    # Without an evaluation, a checkpoint or a plan, their cards are left out.
    assert not re.findall("Nothing to show|<h2>(?:Retrieval|Saving|Fill|Checkpoints|Data mix)", page)
    for title in ("Loss", "Where the time went", "Attempts", "Versions"):
        assert f"<h2>{title}</h2>" in page
    assert "<td>2.13.0</td><td>torch</td>" in page


def test_the_key_figures_are_at_the_top(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 40)
    (run / "plan-facts.json").write_text('{"memory": {"device_bytes": 1}, "shape": {"num_parameters": 800000}}')
    evaluated = '{"event": "evaluation", "time": 1.8e9, "attempt": 2, "step": 40, "loss": 2.25, "tokens": 8}'
    with (run / "journal/attempt-0002.jsonl").open("ab") as file:
        file.write(with_checksum(evaluated.encode()) + b"\n")
    tiles = re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", render_report(run))
    assert tiles == [
        ("model", "tiny · 800k"),
        ("context", "2,048 tokens"),
        ("final loss", f"{loss_of(40, 2, 40):.4f}"),
        ("validation loss", "2.2500"),
        ("median step", "1.5 s"),
        ("median tokens/s", "2.73k"),
    ]


def test_each_validation_corpus_has_a_curve(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 40)
    losses = (("a", 2.0), ("_b", 3.5), ("evaluation", 3.0))
    corpora = [{"name": name, "path": f"/{name}", "loss": loss, "tokens": 8} for name, loss in losses]
    with (run / "journal/attempt-0002.jsonl").open("ab") as file:
        for step in (20, 40):
            fields = {"event": "evaluation", "time": 1.8e9, "attempt": 2, "step": step, "loss": 2.75, "tokens": 16}
            file.write(with_checksum(json.dumps({**fields, "corpora": corpora}).encode()) + b"\n")
    page = render_report(run)
    loss = page[page.index("<h2>Loss") : page.index("</svg>")]
    curves = r"evaluation 2.75\nevaluation: a 2\nevaluation: _b 3.5\nevaluation: evaluation 3"
    assert re.search(rf"<title>step 40, [^<]*\n{curves}</title>", loss)


def test_the_values_under_the_pointer_are_those_of_the_curves(tmp_path: Path) -> None:
    page = render_report(write_run(tmp_path / "run", 30))
    loss = page[page.index("<h2>Loss") : page.index("</svg>")]
    titles = re.findall(r"<title>([^<]*)</title></rect>", loss)
    assert titles[0] == f"step 1, 4.10k tokens\ntraining {loss_of(1, 1, 30):.4g}"
    assert f"step 16, 65.5k tokens\nreplayed {loss_of(16, 1, 30):.4g}\ntraining {loss_of(16, 2, 30):.4g}" in titles
    assert len(titles) == 30
    # Many steps share a range.
    long = render_report(write_run(tmp_path / "long", 1000))
    ranges = re.findall(r"<title>step ([0-9,]+), [^<]* to step ([0-9,]+),", long[: long.index("</svg>")])
    assert len(ranges) == 96 and ranges[0][0] == "1" and ranges[-1][1] == "1,000"


def test_the_curves_of_several_runs_are_in_the_same_plots(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps) for name, steps in (("short", 10), ("$long$", 40), ("_last", 20))]
    page = render_report(runs[0], runs[1:])
    assert "<title>short beside $long$ beside _last</title>" in page
    assert page.count("<h2>Loss</h2>") == page.count("<h2>Gradient norm</h2>") == 1
    assert [page.count(f"<h2>Where the time went · {name}</h2>") for name in ("short", "$long$", "_last")] == [1] * 3
    loss = page[page.index("<h2>Loss") : page.index("</svg>")]
    # The curve of the longest run ends at its last token.
    assert ">150k</text>" in loss and f"supervised tokens 163,840\n$long$ {loss_of(40, 2, 40):.4g}</title>" in loss
    speed = page[page.index("<h2>Speed") :]
    assert "short 2731\n$long$ 2731\n./_last 2731" in speed[: speed.index("</svg>")]


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
        "the planned memory: plan-facts.json has no memory.device_bytes or shape.num_parameters",
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
    began = time.process_time()
    page = render_report(run)
    assert time.process_time() - began < 20.0
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


def tracked(folder: Path, uri: str = "sqlite:///nowhere.db", run_id: str = "r") -> Path:
    """Store the id of an MLflow run in a directory."""
    folder.mkdir(exist_ok=True)
    TrackingIdentity(uri=uri, experiment="e", key="k", run_id=run_id, experiment_id="1").save(folder)
    return folder


def test_the_report_is_an_artifact_of_the_mlflow_run(tmp_path: Path, report_run: Run, mlflow_tables: Path) -> None:
    from mlflow import MlflowClient

    shutil.copy(mlflow_tables, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    run_dir = tracked(report_run.folder, uri, client.create_run(experiment).info.run_id)
    (run_dir / "config.yaml").write_text(parse_config(small_tree(tracking__uri=uri)).to_yaml())
    subprocess.run([sys.executable, "-m", "ray_ulysses.report.publish", str(run_dir)], check=True, timeout=120)
    (stored,) = (tmp_path / "artifacts").rglob("report.html")
    assert stored.read_text(encoding="utf-8") == render_report(run_dir)


def test_a_foreign_tracking_json_is_not_used(report_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(small_tree(tracking__uri="https://mlflow.example"))
    (tracked(report_run.folder, "http://127.0.0.1:9") / "config.yaml").write_text(config.to_yaml())
    assert publish.main([str(report_run.folder)]) == 1
    assert capsys.readouterr().err == "the run has no MLflow run yet\n"


def test_an_existing_report_in_mlflow_is_updated(
    tmp_path: Path, report_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (report_run.folder / "config.yaml").write_text(parse_config(small_tree()).to_yaml())
    stored: list[str] = []
    monkeypatch.setattr(mlflow_results, "store_text", lambda run_dir, name, text, **options: stored.append(text))
    redraw(tracked(report_run.folder))
    assert stored == [render_report(report_run.folder)]
    assert not (report_run.folder / "report.html").exists()


def test_a_failed_upload_is_an_error_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"^the run has no MLflow run yet$"):
        store_text(tmp_path, "report.html", "x")
    away = tracked(tmp_path / "run", "http://someone:secret@127.0.0.1:9")
    with pytest.raises(ArtifactError, match=r"did not store report\.html") as caught:
        store_text(away, "report.html", "x", trust_run=True)
    assert "secret" not in str(caught.value)


def publish_after(run_dir: Path, command: list[str], error: BaseException | None = None) -> list[str]:
    """Train with or without an error, and return the events in order."""
    happened: list[str] = []
    with published(run_dir, lambda: happened.append("drawing"), command=command):
        happened.append("trained")
        if error is not None:
            raise error
    return happened


@pytest.mark.parametrize(("error", "times"), [(None, 1), (KeyError("it failed"), 1), (KeyboardInterrupt(), 0)])
def test_a_tracked_run_is_published_at_its_end_unless_it_is_interrupted(
    tmp_path: Path, error: BaseException | None, times: int
) -> None:
    noted = tmp_path / "noted"
    command = ["sh", "-c", f"printf x >> {noted}"]
    with nullcontext() if error is None else pytest.raises(type(error)):
        assert publish_after(tracked(tmp_path / "run"), command, error) == ["trained", "drawing"]
    assert publish_after(tmp_path / "untracked", command) == ["trained"]
    assert (noted.read_text() if noted.exists() else "") == "x" * times


def test_a_failure_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish_after(tracked(tmp_path / "run"), ["sh", "-c", "printf 'first\\nthe server is away\\n' >&2; exit 1"])
    assert [record.getMessage() for record in caplog.records] == [
        "the report could not be stored in MLflow (the server is away); run `ray-ulysses report` to create it"
    ]


def test_a_hanging_report_does_not_block_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_LONGEST_S", 1.0)
    publish_after(tracked(tmp_path / "run"), ["sleep", "600"])
    assert "rendering and upload did not finish within 1 s" in caplog.text
