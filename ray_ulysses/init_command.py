"""The command ``init``; `cli` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_ulysses.command_options import Quiet
from ray_ulysses.views.streams import put_line
from ray_ulysses.views.waiting import Waiting

EXAMPLE = "Example: ray-ulysses init --model Qwen/Qwen3-8B --context 131072 --gpus 8 --out qwen3-8b.yaml"


def init(
    model: Annotated[str, typer.Option(help="Directory of a Hugging Face model, or its id on the hub.")],
    context: Annotated[int, typer.Option(help="Tokens of a row.", min=128)],
    gpus: Annotated[int, typer.Option(help="Number of GPUs, eight to a node.", min=1)],
    out: Annotated[Path, typer.Option(help="YAML file to write.")],
    gpu_memory: Annotated[float, typer.Option(help="Memory of one GPU in GB, as in its name.", min=4)] = 80.0,
    host_memory: Annotated[float, typer.Option(help="Memory of a node per GPU, in GiB.", min=4)] = 200.0,
    quiet: Quiet = False,
) -> None:
    """Write a commented configuration for a model, a context and a number of GPUs, which plans.

    Of the layouts that fit, the one whose step is modelled to be the fastest is taken. What a person has to decide is
    marked with `edit`.
    """
    from ray_ulysses.errors import RunError, UserError

    if out.exists():
        raise UserError(f"--out={str(out)!r}: exists already; give another file, or remove it")
    from ray_ulysses.planner.memory_terms import GIB
    from ray_ulysses.storage.atomic import write_text

    with Waiting("loading libraries", is_quiet=quiet) as wait:
        import yaml

        from ray_ulysses.config import parse_config
        from ray_ulysses.run.first_config import first_configs
        from ray_ulysses.run.preflight import report_run
        from ray_ulysses.views.first_config import render_first_config

        wait.phase(f"looking for layouts of {gpus} GPUs")
        problems = ""
        for first in first_configs(model, context, gpus, gpu_memory, host_memory):
            text = render_first_config(first, model, gpu_memory)
            # What is written is what is planned.
            report = report_run(parse_config(yaml.safe_load(text)), Path.cwd())
            if not report.problems:
                break
            problems = problems or "; ".join(map(str, report.problems))
        else:
            raise UserError(f"--model={model!r}: {problems}")
    try:
        write_text(out, text)
    except OSError as error:
        raise RunError(f"--out={str(out)!r}: can't be written ({error.strerror}); give another file") from error
    gib = first.memory.device_bytes / GIB
    put_line(
        f"{out}: {first.config.parallel.sp_size} of {gpus} GPUs share a row, {gib:.1f} GiB per GPU; "
        f"edit what is marked with `edit`, then: ray-ulysses plan {out}"
    )
