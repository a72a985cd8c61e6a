"""``plan --longest`` and ``--fit`` answer from the model's shape alone, and what they print can be pasted."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ray_ulysses.cli import app, run
from ray_ulysses.config import load_config
from ray_ulysses.run import preflight
from ray_ulysses.run.preflight import prepare_run
from ray_ulysses.run_names import CONFIG_FILE
from tests.distributed.run_case import claim_run
from tests.unit.data.corpora import text_corpus, varied_texts

_CONFIGS = Path(__file__).parents[3] / "configs"
_8B, _TINY = str(_CONFIGS / "llama3-8b_8xh100_sp4-dp2_32k.yaml"), str(_CONFIGS / "llama-tiny_cpu_sp2-dp2_8k.yaml")

_32 = str(_CONFIGS / "llama3-8b_32xh100_sp32-dp1_512k.yaml")


@pytest.fixture(autouse=True)
def architecture_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the probe of the architecture, which takes seconds for 32 layers."""
    monkeypatch.setattr(preflight, "check_architecture", lambda config: SimpleNamespace(num_positions=None))


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(app, ["plan", *arguments, "--synthetic"]) == code
    return capsys.readouterr().out


@pytest.mark.slow
def test_the_longest_context_fits_and_the_next_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = json.loads(told(capsys, _8B, "--longest", "--json"))["longest"]
    configured, changed = lengths["configured"], lengths["changed"]
    assert 262_144 < configured < changed["context_tokens"]
    told(capsys, _8B, f"--set=data.context_tokens={configured}")
    told(capsys, _8B, f"--set=data.context_tokens={configured + 32}", code=2)
    text = told(capsys, _8B, "--longest")
    assert f"as configured          {configured:,} tokens" in text
    options = shlex.split(" ".join(re.findall(r"--set (?:'[^']*'|\S+)", text)))
    most = changed["context_tokens"]
    told(capsys, _8B, *options, f"--set=data.context_tokens={most}")
    told(capsys, _8B, *options, f"--set=data.context_tokens={most + 32}", code=2)


def test_the_nearest_settings_are_said_as_options_with_reasons_and_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    longer = "--set=data.context_tokens=1048576"
    refusal = " ".join(told(capsys, _8B, longer, code=2).split())
    nearest = refusal.partition("the nearest settings that fit are ")[2].partition(" (see `plan --fit`)")[0]
    text = told(capsys, _8B, longer, "--fit")
    options = re.findall(r"--set (?:'[^']*'|\S+)", text)
    assert nearest == " ".join(options) and len(re.findall(r"(?:GiB|MiB) with .+, then ", text)) == len(options) > 0
    assert re.search(r"device  [0-9.]+ GiB of 79 GiB\n  host    [0-9.]+ GiB of 200 GiB\n  step    ", text)
    told(capsys, _8B, longer, *shlex.split(nearest))
    # The YAML says the same.
    written = yaml.safe_load(text.partition("as YAML\n")[2])
    pasted = [f"{section}.{name}" for section, values in written.items() for name in values]
    assert sorted(pasted) == sorted(option.partition(" ")[2].strip("'").partition("=")[0] for option in options)


def test_a_million_tokens_of_an_8b_model_fit_one_node_by_settings_that_plan_finds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(_CONFIGS / "llama3-8b_8xh100_sp8_1m.yaml")
    recorded = load_config(path)
    assert recorded.data.context_tokens >= 1_000_000 and recorded.cluster.workers.max == 8
    assert recorded.memory.host_gib is not None and recorded.memory.host_gib * 2**30 * 8 <= 1.9e12
    # Without what the file moves to the host, it does not fit, and the planner finds what to move.
    without = "--set=memory.offload_activations=[]"
    report = json.loads(told(capsys, path, without, "--json", code=2))
    assert report["memory"]["device_bytes"] > 79 * 2**30
    near = json.loads(told(capsys, path, without, "--fit", "--json"))["fit"]["nearest"]
    assert near["settings"].keys() == {"memory.offload_activations"} and near["step_s"] < 1000
    text = told(capsys, path, "--verbose")
    for name in ("layer inputs, kept", "attention outputs, kept", "layer inputs, in flight", "one MLP, tiled"):
        assert re.search(rf"[0-9.]+ GiB  {name}", text), name
    lengths = json.loads(told(capsys, path, "--longest", "--json"))["longest"]
    assert lengths["configured"] >= 1_048_576


def test_what_fits_and_what_never_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "32,768 tokens fit as configured; no setting needs to change" in told(capsys, _8B, "--fit")
    small = "--set=memory.device_gib=2"
    text = " ".join(told(capsys, _8B, "--fit", small, code=2).split())
    assert "32,768 tokens do not fit" in text and "the configured workers need at least" in text
    assert "no context fits" in told(capsys, _8B, "--longest", small, code=2)


@pytest.mark.parametrize("option", ["--longest", "--fit"])
def test_a_question_about_memory_needs_the_memory(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["plan", _TINY, option]) == 2
    assert f"{option} requires memory.device_gib" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_terminal_gets_styled_lines_of_its_width_and_no_color_is_respected(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = told(capsys, _8B, "--price=2.5", "--quiet").split()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    styled = told(capsys, _8B, "--price=2.5", "--quiet")
    text = re.sub(r"\x1b\[[0-9;]*m", "", styled)
    assert "\x1b[1;32mfits:" in styled and text.split() == piped
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) <= 12
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1mfits:" in told(capsys, _8B, "--price=2.5", "--quiet")


def test_a_wrong_corpus_path_is_a_problem_and_synthetic_documents_are_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = f"--set=data.path={tmp_path / 'typo'}"
    assert run(app, ["plan", _8B, wrong]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"1 problem: - data.path='{tmp_path / 'typo'}': there is no corpus;")
    assert "31.2 of 79 GiB per GPU" in said, "the memory does not depend on it"
    assert "can start once it has a corpus" in told(capsys, _8B, wrong)


def test_what_the_planner_chose_is_stored_with_the_run_and_kept_by_a_resume(tmp_path: Path) -> None:
    text_corpus(tmp_path, [text * 200 for text in varied_texts(100, longest=400)])
    overrides = [
        *(f"data.path={tmp_path / 'corpus'}", f"run.storage={tmp_path}", "memory.plan=auto", "parallel.sp_size=8"),
        *("data.context_tokens=1048576", "data.rows_per_step=1"),
    ]
    prepared = prepare_run(load_config(_8B, overrides), tmp_path)
    assert prepared.report.problems == ()
    assert prepared.config.memory.offload_activations, "a million tokens fit only with activations on the host"
    claim_run(prepared)
    stored = load_config(prepared.config.run_dir / CONFIG_FILE)
    assert stored == prepared.config and stored.memory.attention_output != "auto"
    # More memory would let the planner choose otherwise; a resume stays as it is.
    roomy = [*overrides, "memory.device_gib=500"]
    resumed = prepare_run(load_config(_8B, roomy), tmp_path)
    assert resumed.report.problems == ()
    assert resumed.config.memory.offload_activations == stored.memory.offload_activations
    assert {one.reason for one in resumed.report.chosen} == {"stored with the run"}
    assert not prepare_run(load_config(_8B, [*roomy, "run.name=new"]), tmp_path).config.memory.offload_activations


def test_layouts_are_listed_from_the_fastest_and_the_options_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    path, slow = _32, "--set=cluster.network_gbps=50"
    found = json.loads(told(capsys, path, slow, "--layouts", "--json"))
    seconds = [float(f"{one['step_s']:.3g}") for one in found]
    assert seconds == sorted(seconds)
    text = told(capsys, path, slow, "--layouts")
    assert len(re.findall(r"(?m)^ +[0-9.]+ s  ", text)) == len(found)
    options = re.findall(r"--set \S+", text)
    assert {option.removeprefix("--set ") for option in options} == {
        f"{name}={value}" for name, value in found[0]["settings"].items()
    }
    chosen = shlex.split(" ".join(options))
    assert "the configured layout is the fastest" in told(capsys, path, slow, *chosen, "--layouts")


def test_layouts_without_a_prediction_are_refused_with_the_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*arguments: str) -> str:
        assert run(app, ["plan", *arguments, "--layouts"]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "without cluster.device" in refused(_TINY)
    assert "cluster.device" not in refused(_8B, "--set=model.dtype=fp32", "--set=model.attention=auto")
    nvme = ("--set=memory.offload_optimizer=nvme", f"--set=memory.nvme_path={tmp_path}")
    assert "memory.offload_optimizer=nvme; use none or cpu" in refused(_8B, *nvme)
    # More ranks than heads: only the model's directory says how many heads there are.
    described = load_config(_32).model.config
    (tmp_path / "config.json").write_text(json.dumps(described))
    model = (f"--set=model.path={tmp_path}", "--set=model.config=null", "--set=model.init=random")
    ranks = ("--set=cluster.workers=64", "--set=parallel.sp_size=64", "--set=parallel.ring_size=1")
    text = refused(_32, *model, *ranks)
    assert "leaves 32 attention heads for 64 ranks" in text and "cluster.device" not in text


@pytest.mark.parametrize(
    ("options", "both"),
    [
        (["--layouts", "--fit"], ("--layouts", "--fit")),
        (["--longest", "--layouts"], ("--layouts", "--longest")),
        (["--layouts", "--price=2"], ("--layouts", "--price")),
        (["--layouts", "-v"], ("--layouts", "--verbose")),
        (["--fit", "--branch"], ("--fit", "--branch")),
        (["--longest", "--price=0"], ("--longest", "--price")),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    options: list[str], both: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["plan", _32, *options]) == 2
    assert f"{both[0]} can't be combined with {both[1]}" in " ".join(capsys.readouterr().err.split())


def test_layouts_say_if_the_configured_layout_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--set=memory.device_gib=40"
    assert "the configured layout does not fit into memory" in told(
        capsys, _32, small, "--set=parallel.sp_size=8", "--layouts"
    )
    assert "does not fit" not in told(capsys, _32, small, "--layouts")


def test_secondary_shards_are_listed_only_where_they_have_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    shards = "--set=memory.zero_secondary=node"
    assert not re.search(r"\bnode  ", told(capsys, _8B, shards, "--layouts"))
    assert re.search(r"\bnode  ", told(capsys, _32, shards, "--layouts"))


def test_seconds_have_three_digits(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, _32, "--layouts")
    assert re.search(r"exchange of heads 0\.\d{3} s instead of \d\.\d\d s, the step \d{3} s instead of \d{3} s", text)
    long = told(capsys, _32, "--set=data.rows_per_step=256", "--layouts")
    assert re.search(r"(?m)^ +\d{3}0 s  ", long) and "e+" not in long


def test_layouts_of_a_begun_run_can_be_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text_corpus(tmp_path, [text * 200 for text in varied_texts(100, longest=400)])
    overrides = [
        *(f"data.path={tmp_path / 'corpus'}", f"run.storage={tmp_path}", "run.storage_kind=local"),
        *("tracking.enabled=false", "data.rows_per_step=1", "cluster.network_gbps=50"),
    ]
    changes = [f"--set={one}" for one in overrides]
    rings = {one["ring_size"] for one in json.loads(told(capsys, _32, *changes, "--layouts", "--json"))}
    new = prepare_run(load_config(_32, overrides), tmp_path)
    claim_run(new)
    begun = prepare_run(load_config(_32, overrides), tmp_path)
    notes = [[note for note in one.report.notes if "faster layout" in note] for one in (new, begun)]
    assert "parallel.ring_size=4" in notes[0][0] and "ring_size=4" not in "".join(notes[1])
    found = json.loads(told(capsys, _32, *changes, "--layouts", "--json"))
    assert {one["ring_size"] for one in found} < rings
    for one in found:
        changed = [*overrides, *(f"{path}={value}" for path, value in one["settings"].items())]
        assert prepare_run(load_config(_32, changed), tmp_path).report.problems == ()
    text = told(capsys, _32, *changes, "--set=parallel.ring_size=4", "--layouts")
    assert "the configured layout does not fit the stored rows, whose lengths are multiples of 32" in text
