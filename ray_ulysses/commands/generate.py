"""The command ``generate``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from ray_ulysses.commands.options import AsJson, Quiet, TrustRun, parse_step
from ray_ulysses.commands.output import Waiting, put
from ray_ulysses.errors import UserError
from ray_ulysses.report.words import as_text

EXAMPLE = "Example: ray-ulysses generate runs/llama-tiny --prompt 'Once upon a time' --max-new-tokens 64"


def generate(
    model: Annotated[str, typer.Argument(metavar="RUN|MODEL_DIR", help="A run's directory, or a model directory.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; can be repeated.  [default: standard input]")
    ] = None,
    step: Annotated[str, typer.Option(help="For a run: a committed step, latest or best.")] = "latest",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.", min=1)] = 256,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 takes the most probable token.", min=0.0)
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens with this total.", max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling.", min=0)] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer: directory, hub id or `bytes`.  [default: the run's or the model's]")
    ] = None,
    dtype: Annotated[
        Literal["model", "fp32", "bf16"], typer.Option(help="Type used for computation; model means the model's own.")
    ] = "model",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    trust_run: TrustRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Print what a model writes after a prompt, with Transformers, on one GPU or the CPU.

    If the tokenizer has a chat template, the prompt is a user's message and the model answers it.
    """
    options = dict(locals())
    del options["as_json"], options["quiet"], options["prompt"]
    from ray_ulysses.evaluation.report import names_run
    from ray_ulysses.storage.place import place_of

    place = place_of(model)
    is_run = names_run(place)
    if not is_run and step != "latest":
        raise UserError(f"--step={step}: needs a run, but {model} is a model directory; omit --step")
    options |= {"model": place, "is_run": is_run, "step": parse_step(step)}
    if not 0 < top_p <= 1:
        raise UserError(f"--top-p={top_p}: must be above 0 and at most 1")
    if top_p < 1 and temperature == 0:
        raise UserError(f"--top-p={top_p}: has no effect with --temperature 0; set --temperature, such as 0.7")
    options["prompts"] = tuple(prompt or [sys.stdin.read().removesuffix("\n")])
    if not all(options["prompts"]):
        raise UserError("--prompt: is empty; write a prompt, or pipe one to standard input")
    with Waiting("loading libraries", is_quiet=quiet) as wait:
        from ray_ulysses.evaluation.generate import GenerateRequest
        from ray_ulysses.evaluation.generate import generate as generate_texts

        wait.phase("generating")
        done = generate_texts(GenerateRequest(**options), wait.say)
    text = as_text(line for one in done.outputs for line in (f"> {one.prompt}", one.text, ""))
    if len(done.outputs) == 1:
        text = done.outputs[0].text
    put(json.dumps(asdict(done), indent=2) if as_json else text)
