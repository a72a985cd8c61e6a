"""The command ``init``, which writes a commented configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_ulysses.commands.options import Quiet
from ray_ulysses.commands.output import Waiting, put, put_line
from ray_ulysses.errors import RunError, UserError

if TYPE_CHECKING:
    from ray_ulysses.planner.search import FirstConfig

EXAMPLE = "Example: ray-ulysses init --model Qwen/Qwen3-8B --context 131072 --gpus 8 --out qwen3-8b.yaml"
_NFS = """
  # More than one node: a path that every node can access.
  storage_kind: nfs"""
_TRACKING = "  enabled: true  # MLflow, in a file beside the runs; uri: http://HOST:5000 sends it to a server"
_NFS_TRACKING = "  trackers: [tensorboard]  # edit: [mlflow] needs uri: http://HOST:5000 of a server"
_SCHEMA = Path(__file__).parents[1] / "config.schema.json"


def _print_schema(is_wanted: bool) -> None:
    if is_wanted:
        put(_SCHEMA.read_text(encoding="utf-8"), end="")
        raise typer.Exit


def init(
    out: Annotated[Path, typer.Option(help="YAML file to write.")],
    model: Annotated[str | None, typer.Option(help="Directory of a Hugging Face model, or its id on the hub.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens per row.", min=128)] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs, eight to a node; 0 for this machine's CPU.", min=0)] = None,
    data: Annotated[str | None, typer.Option(help="A prepared corpus, from whose size the batch is chosen.")] = None,
    files: Annotated[
        list[Path] | None, typer.Option("--from", help="Convert this file of another tool; can be repeated.")
    ] = None,
    gpu_memory: Annotated[float, typer.Option(help="Memory of one GPU in GB, as in its product name.", min=4)] = 80.0,
    host_memory: Annotated[float, typer.Option(help="Host memory per GPU, in GiB.", min=4)] = 200.0,
    schema: Annotated[
        bool,
        typer.Option(
            "--schema", is_eager=True, callback=_print_schema, help="Print the JSON schema of a configuration."
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write a commented configuration for a model, a context length and a number of GPUs.

    It passes ``plan`` and uses the layout with the fastest predicted step among the layouts that fit. Settings that the
    user must decide are marked with `edit`.

    With --from, convert the configuration of DeepSpeed, Accelerate, Transformers, TRL, Axolotl, LLaMA-Factory, ms-swift
    or torchtitan. The other options are then needed only for values that the files do not state.
    """
    if out.exists():
        raise UserError(f"--out={str(out)!r}: already exists; use another file or remove this one")
    if files:
        if data is not None:
            raise UserError(f"--data={data!r}: applies to a new configuration; omit it with --from")
        from ray_ulysses.migration.write import convert

        given: dict[str, str | int | None] = {"--model": model, "--context": context, "--gpus": gpus}
        text = convert(files, {name: value for name, value in given.items() if value is not None})
        _write(out, text)
        edits = sum("# edit" in line for line in text.splitlines())
        put_line(f"{out}: edit the {edits} lines that are marked with `edit`, then: ray-ulysses plan {out}")
        return
    if model is None or context is None or gpus is None:
        raise UserError("--model, --context and --gpus: must be given, or --from FILE to convert another tool's file")
    from ray_ulysses.planner.memory_terms import GIB

    with Waiting("loading libraries", is_quiet=quiet) as wait:
        import yaml

        from ray_ulysses.config import parse_config
        from ray_ulysses.run.first_config import first_configs
        from ray_ulysses.run.preflight import report_run

        wait.phase(f"looking for layouts of {gpus} GPUs" if gpus else "planning a run on the CPU")
        problems = ""
        for first in first_configs(model, context, gpus, gpu_memory, host_memory, data):
            text = _render(first, model, gpu_memory, has_corpus=data is not None)
            # Plan the configuration exactly as written.
            report = report_run(parse_config(yaml.safe_load(text)), Path.cwd(), synthetic=True)
            if not report.problems:
                break
            problems = problems or "; ".join(map(str, report.problems))
        else:
            raise UserError(f"--model={model!r}: {problems}")
    _write(out, text)
    gib = first.memory.device_bytes / GIB
    layout = f"{first.config.parallel.sp_size} of {gpus} GPUs share a row, {gib:.1f} GiB per GPU"
    layout = layout if gpus else f"one worker on the CPU, {gib:.1f} GiB"
    put_line(f"{out}: {layout}; edit what is marked with `edit`, then: ray-ulysses plan {out}")


def _write(out: Path, text: str) -> None:
    from ray_ulysses.storage.atomic import write_text

    try:
        write_text(out, f"# yaml-language-server: $schema={_SCHEMA}\n{text}")
    except OSError as error:
        raise RunError(f"--out={str(out)!r}: can't be written ({error.strerror}); use another file") from error


def _render(first: FirstConfig, model: str, gpu_memory: float, *, has_corpus: bool) -> str:
    """Return the configuration file's text, for a model as the user gave it and GPUs of ``gpu_memory`` GB."""
    from ray_ulysses.config.yaml_text import dump_yaml
    from ray_ulysses.planner.memory_terms import GIB

    config, tree = first.config, first.tree
    data, cluster, run = config.data, config.cluster, config.run
    groups, gib = config.dp_size, first.memory.device_bytes / GIB
    time = "" if first.time is None else f" Predicted time of a step: {first.time.seconds:.3g} s."
    elastic = _chosen(first, "elastic")
    elastic = f"elastic:\n{elastic}\n" if elastic else ""
    path = tree["data"]["path"]
    has_gpus = cluster.gpus_per_worker > 0
    devices = f"{cluster.workers.max} GPUs of {gpu_memory:g} GB" if has_gpus else "the CPU of this machine"
    nfs = _NFS if run.storage_kind == "nfs" else ""
    evaluation = f"  eval_every_steps: {run.eval_every_steps}\n" if run.eval_every_steps else ""
    source = f"  # edit: ray-ulysses prepare SOURCES --tokenizer MODEL_DIRECTORY --out {path}\n"
    text = f"""\
# {model} at {data.context_tokens:,} tokens on {devices}.
# {config.parallel.sp_size} of {cluster.workers.max} workers share each row, and {groups} rows are trained at a time.
# Estimated memory of one worker: {gib:.1f} GiB.{time} `ray-ulysses plan` shows all estimates.
run:
  name: {run.name}  # its directory is STORAGE/NAME; the same name resumes
  storage: {tree["run"]["storage"]}  # edit: a directory that every node can access{nfs}
{evaluation}  # stop_step: 100  # ends here; by default after data.epochs

model:
{_model(tree["model"], first.trained_positions)}

data:
{"" if has_corpus else source}  {dump_yaml({"path": path}).strip()}
  context_tokens: {data.context_tokens}
  rows_per_step: {data.rows_per_step}  # {data.rows_per_step * data.context_tokens:,} tokens a step
  eval_fraction: {data.eval_fraction:g}  # of the documents, held out for evaluation

parallel:
  sp_size: {config.parallel.sp_size}
{_chosen(first, "parallel")}
optimizer:
  lr: 2.0e-5  # edit: not tuned for this model

schedule:
  warmup_ratio: {config.schedule.warmup_ratio:g}  # of the run's steps

{_memory(first)}checkpoint:
  every_steps: {config.checkpoint.every_steps}
{_chosen(first, "checkpoint")}
{elastic}tracking:
{_NFS_TRACKING if nfs else _TRACKING}

cluster:
  workers: {cluster.workers.max}{"  # {min: ..., max: ...} follows the nodes of a spot cluster" if has_gpus else ""}
  gpus_per_worker: {cluster.gpus_per_worker}
"""
    if cluster.device is not None:
        text += f"  device: {cluster.device}  # `plan` knows its speed; change it for another GPU\n"
    return text


def _memory(first: FirstConfig) -> str:
    """Return the ``memory`` section, or nothing for a CPU, whose memory is measured when the run is planned."""
    memory = first.config.memory
    if memory.device_gib is None or memory.host_gib is None:
        return ""
    return f"""\
memory:
  device_gib: {memory.device_gib:g}  # of one GPU, without the driver's share
  host_gib: {memory.host_gib:g}  # edit: memory of a node per GPU
{_chosen(first, "memory")}
"""


def _chosen(first: FirstConfig, section: str) -> str:
    """Return one YAML line for each chosen setting in a section, with the reason as a comment."""
    from ray_ulysses.planner.search import yaml_value

    own = {one.path.partition(".")[2]: one for one in first.chosen if one.path.startswith(f"{section}.")}
    lines = (f"  {name}: {yaml_value(one.value)}  # {one.reason}\n" for name, one in own.items() if name != "sp_size")
    return "".join(lines)


def _model(section: dict[str, Any], trained: int | None) -> str:
    import yaml

    from ray_ulysses.config.yaml_text import dump_yaml
    from ray_ulysses.planner.search import yaml_value

    # Quoted where YAML needs it.
    lines = [f"  {line}" for line in dump_yaml({"path": section["path"]}).splitlines()]
    if "dtype" in section:
        lines.append(f"  dtype: {section['dtype']}")
    if "part" in section:
        lines.append("  part: text  # the decoder of a multimodal checkpoint")
    if "config" in section:
        lines.append("  config:  # for `plan` without a network; the loaded model must match it")
        dumped = yaml.safe_dump(section["config"], sort_keys=False)
        lines += [f"    {line}" for line in dumped.splitlines()]
    if (rope := section.get("rope")) is not None:
        lines.append(f"  # The model was trained for {trained:,} positions. edit: this extension is untested.")
        lines.append(f"  rope: {yaml_value(rope)}")
    return "\n".join(lines)
