from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from ray_ulysses.data.plan.corpus_set import CorpusSet, PlannedSource, plan_input
from ray_ulysses.data.plan.plan import Plan
from ray_ulysses.data.plan.planning import build_segment
from ray_ulysses.planner.report import StageFacts, build_report
from ray_ulysses.report.plan import _time, render_plan, render_verdict
from ray_ulysses.report.readme import render_readme
from ray_ulysses.report.words import folded
from ray_ulysses.run.checkpoint_store import checkpoint_location, needs_trust, stored_checkpoints
from ray_ulysses.storage.place import UnnamedServerError
from tests.unit.planner.runs import make_config, make_corpus, make_plan, make_shape


def text_of(config, corpus):
    return render_plan(build_report(config, make_shape(config), corpus, make_plan(config, corpus)))


def test_the_plan_text_starts_with_the_verdict_and_has_all_sections():
    text = text_of(make_config(), make_corpus([64, 64, 100, 1, 30]))
    for title in ("model", "layout", "data", "memory per rank: a first estimate by formula, not a measurement"):
        assert f"\n{title}\n" in text
    assert "  workers              4 = dp 2 x sp 2\n" in text
    assert "  balanced counts      2, 4, 8\n" in text
    assert "byte entropy       3.250 nats" in text
    assert text.startswith("run 'demo' (107k parameters, llama) is ready to start\n  memory   ")


def layout_text(**parallel):
    config = make_config(parallel=parallel, cluster={"workers": parallel["sp_size"]})
    text = text_of(config, make_corpus([64] * 9))
    return text.partition("\nlayout\n")[2].partition("\n\n")[0]


def test_the_row_split_is_explained():
    assert "  row split            sp 2 = ulysses 2 x ring 1\n" in layout_text(sp_size=2)
    assert "sp 8 = ulysses 4 x ring 2, chosen because 8 ranks can't share 4 heads\n" in layout_text(sp_size=8)
    assert "sp 4 = ulysses 2 x ring 2\n" in layout_text(sp_size=4, ring_size=2)


def test_uneven_heads_and_copied_key_value_heads_are_explained():
    assert "  heads per rank       2 query, 1 key-value\n" in layout_text(sp_size=2)
    uneven = layout_text(sp_size=3)
    assert "1 or 2 query" in uneven
    assert "uneven: the fullest rank has 1.50x the mean, which slows attention by as much" in uneven
    assert "each key-value head is sent 2 times" in layout_text(sp_size=4)


def test_peer_memory_has_its_size_and_frequency():
    text = text_of(make_config(), make_corpus([64] * 9))
    # 106,944 parameters on 4 workers, 14 bytes each, in two copies of two states.
    assert "1.43 MiB for each worker on the node; at most a third of free memory per node\n" in text
    assert "network              0.36 MiB per worker for each copy, to the partner node\n" in text
    assert "after each step longer than about a second (at 1 GiB/s per worker), otherwise less often\n" in text
    limited = text_of(make_config(elastic={"peer_memory_gib": 3.5}), make_corpus([64] * 9))
    assert "at most 3.5 GiB (elastic.peer_memory_gib) per node\n" in limited
    without = text_of(make_config(elastic={"peer_memory": False}), make_corpus([64] * 9))
    assert "peer memory: disabled (elastic.peer_memory); a failure loses the steps since the newest" in without
    assert "MiB  peer memory" in text and "MiB  peer memory" not in without


def test_a_quantized_checkpoint_is_named_with_the_type_of_exports():
    config = make_config()
    report = build_report(config, make_shape(config), make_corpus([64] * 9), make_plan(config, make_corpus([64] * 9)))
    assert report.to_json()["source_format"] is None and "dequantized" not in render_verdict(report)
    text = render_verdict(replace(report, source_format="MXFP4", dtype="bf16"))
    assert "\n  weights  MXFP4, dequantized while loading; exports are bf16\n" in text


def test_problems_come_first():
    text = text_of(make_config(run={"stop_step": 99}), make_corpus([64] * 9))
    assert text.startswith("1 problem:\n- run.stop_step=99: is beyond the planned data")
    assert "can't start" in text and "ready to start" not in text


GPUS = {"workers": {"min": 64, "max": 1024}, "gpus_per_worker": 1, "device": "RTX 4090"}


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"cluster": GPUS, "model": {"dtype": "bf16"}, "data": {"rows_per_step": 1024}, "memory": {"host_gib": 200.0}},
        {"run": {"stop_step": 99}, "memory": {"device_gib": 0.001, "host_gib": 0.001}},
        {"data": {"packing": "none", "overlong": "truncate", "context_tokens": 32}},
    ],
    ids=["cpu", "elastic", "problems", "lost"],
)
def test_the_verdict_fits_the_terminal_in_twelve_lines_and_breaks_no_word(sections: dict[str, Any], width: int) -> None:
    config, corpus = make_config(**sections), make_corpus([64] * 99_999)
    report = build_report(config, make_shape(config), corpus, make_plan(config, corpus))
    whole = render_verdict(report, 12345.67)
    text = folded(whole, width)
    assert text.split() == whole.split() and max(map(len, text.split("\n"))) <= width
    assert len(text[text.index("run 'demo'") :].split("\n")) <= 12
    assert text.endswith("\nmore: --verbose")
    assert ("fits: " in text) is ("host_gib" in sections.get("memory", {}) and not report.problems)
    assert ("does not fit: " in text) is bool(report.problems)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_plan_names_the_corpora_of_evaluations_with_their_tokens(width: int) -> None:
    config, corpus = make_config(cluster=GPUS, model={"dtype": "bf16"}), make_corpus([64] * 99)
    paths = ["/a/books", "/b/books", "/code", "/papers"]
    sources = [PlannedSource(path=path, fingerprint=path, num_documents=3) for path in paths]
    validation = tuple(replace(plan_input(make_corpus([30] * 3)), sources=(source,)) for source in sources)
    plan = make_plan(config, corpus)
    segment = build_segment(replace(plan_input(corpus), validation=validation), plan.settings)
    report = build_report(config, make_shape(config), corpus, Plan(segments=(segment,)))
    facts = {one.path: (one.name, one.rows, one.tokens) for one in report.data.evaluation}
    assert facts == {path: (path[1:], 2, 3 * 29) for path in paths}
    verdict = render_verdict(report, 3.0)
    assert "a/books (87 tokens), b/books (87 tokens), code (87 tokens) and 1 more" in verdict
    assert len(folded(verdict[verdict.index("run 'demo'") :], width).split("\n")) <= 12
    assert "2 rows, 87 tokens with a label, of /papers" in render_plan(report)


def test_the_verdict_of_a_mixture_has_a_table_of_its_sources():
    weights = (3.0, 1.0)
    corpora = [make_corpus([64] * size).corpora[0] for size in (6, 10)]
    sources = [
        PlannedSource(path=f"/{name}", fingerprint=one.fingerprint, num_documents=one.num_documents, weight=weight)
        for name, one, weight in zip("ab", corpora, weights, strict=True)
    ]
    config, both = make_config(data={"epochs": 2}), CorpusSet(sources, corpora)
    report = build_report(config, make_shape(config), both, make_plan(config, both))
    first, second = report.data.mixture
    assert first.tokens is not None and first.tokens + second.tokens == report.data.tokens
    assert first.share == pytest.approx(0.75, abs=0.05) and first.epochs == first.tokens / (6 * 64)
    header, *rows = [line.split() for line in render_verdict(report).split("\n")[-4:-1]]
    assert header == ["weight", "tokens", "used", "share", "epochs", "source"]
    assert [(row[0], row[-1]) for row in rows] == [("3", "/a"), ("1", "/b")]


def test_fill_and_padding_have_the_right_denominators():
    """Rows have 64 tokens. Three documents of 41 leave unused capacity, of which only the padding is computed."""
    config, corpus = make_config(data={"context_tokens": 64}), make_corpus([41, 41, 41])
    data = build_report(config, make_shape(config), corpus, make_plan(config, corpus)).data
    assert (data.num_rows, data.row_tokens) == (3, 64)
    computed = 3 * -(-41 // data.pad_multiple) * data.pad_multiple
    text = text_of(config, corpus)
    assert f"; rows of 64 tokens are {123 / (3 * 64):.2%} full\n" in text
    assert (
        f"{computed - 123} of {computed} computed tokens ({(computed - 123) / computed:.2%}); "
        f"rows are padded to a multiple of {data.pad_multiple}\n"
    ) in text


def test_the_step_time_is_broken_down_and_the_run_is_priced():
    corpus = make_corpus([64] * 9)
    assert "\ntime: not predicted (needs cluster.device, GPUs, bf16 and no NVMe optimizer)\n" in text_of(
        make_config(), corpus
    )
    config = make_config(cluster={"workers": 4, "gpus_per_worker": 1, "device": "H100"}, model={"dtype": "bf16"})
    report = build_report(config, make_shape(config), corpus, make_plan(config, corpus))
    assert report.step_time is not None and report.to_json()["step_time"]["seconds"] == report.step_time.seconds
    text = render_plan(report, 3600.0).partition("\ntime per step: ")[2].partition("\n\n")[0]
    title, *terms, run = text.splitlines()
    assert title.startswith(
        f"{report.step_time.seconds:.3g} s on 4 H100, predicted, compute within 10% of measured steps; MFU "
    )
    assert [line.split(" s  ")[1].split("  ")[0] for line in terms if " s  " in line] == [
        term.name for term in report.step_time.terms
    ]
    steps = report.data.stop_step
    cost = report.step_time.seconds * steps * 4
    assert run == f"  {steps} steps: 0s, 0.0 GPU-hours, {cost:,.2f} at 3600 each, without faults and saves"


def test_the_run_time_covers_all_stages_up_to_the_stop_step():
    corpus = make_corpus([64] * 9)
    config = make_config(cluster={"workers": 4, "gpus_per_worker": 1, "device": "H100"}, model={"dtype": "bf16"})
    report = build_report(config, make_shape(config), corpus, make_plan(config, corpus))
    facts = dict.fromkeys(field.name for field in fields(StageFacts))
    stages = tuple(
        StageFacts(**{**facts, "name": name, "steps": steps, "step_seconds": seconds})  # type: ignore[arg-type]
        for name, steps, seconds in (("short", (1, 10), 60.0), ("long", (11, 30), 600.0))
    )

    def said(stop, base=10):
        data = replace(report.data, stop_step=stop, base_step=base)
        text = "\n".join(_time(replace(report, data=data, stages=stages), 1.0))
        return text.splitlines()[-1]

    assert said(30) == "  30 steps: 3h30m, 14.0 GPU-hours, 14.00 at 1 each, without faults and saves"
    assert said(10) == "  10 steps: 10m00s, 0.7 GPU-hours, 0.67 at 1 each, without faults and saves"
    assert said(4).startswith("  4 steps: 4m00s, ")
    ended = replace(report, data=replace(report.data, stop_step=4, base_step=10))
    assert _time(ended, 1.0)[-1].startswith("  0 steps: 0s, "), "a branch behind the stop"


MINIO = "s3://bucket/runs?endpoint_override=minio:9000&scheme=http"


@pytest.mark.parametrize(
    ("sections", "needs"),
    [
        ({}, False),
        ({"cluster": {"secrets_file": "/secrets.env"}}, False),
        ({"checkpoint": {"storage": "s3://bucket/runs"}}, False),
        ({"checkpoint": {"storage": "s3://bucket/runs"}, "cluster": {"secrets_file": "/secrets.env"}}, True),
        ({"checkpoint": {"storage": MINIO}}, True),
        ({"data": {"path": MINIO}}, True),
        # The user specifies the server with RUN.
        ({"run": {"storage": MINIO}, "tracking": {"uri": "http://mlflow:5000"}}, False),
        ({"run": {"storage": MINIO}, "checkpoint": {"storage": MINIO}, "tracking": {"enabled": False}}, False),
    ],
)
def test_the_readme_mentions_trust_run_only_if_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], needs: bool
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    config, corpus = make_config(**sections), make_corpus([64] * 9)
    report = build_report(config, make_shape(config), corpus, make_plan(config, corpus))
    assert needs_trust(config) == needs
    text = render_readme(report, Path("/runs/demo"), checkpoint_location(config), needs_trust=needs)
    assert ("--trust-run" in text) == needs
    if config.checkpoint.storage is not None and config.cluster.secrets_file is None:
        try:
            stored_checkpoints(config, config.run_dir)
            is_refused = False
        except UnnamedServerError:
            is_refused = True
        assert is_refused == needs
