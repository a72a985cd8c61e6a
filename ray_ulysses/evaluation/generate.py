"""Generates text from a run's checkpoint or a model directory, in one process, with Transformers' ``generate``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ray_ulysses.clock import SystemClock
from ray_ulysses.data.sources.rows import RowError
from ray_ulysses.data.tokenize.chat_template import ChatTemplate, own_template
from ray_ulysses.data.tokenize.tokenizers import transformers_tokenizer
from ray_ulysses.engine.model import find_trained_part, meta_model, torch_dtype
from ray_ulysses.engine.model_config import described_config
from ray_ulysses.errors import RunError, UserError
from ray_ulysses.evaluation.model_source import ModelSource, find_model
from ray_ulysses.evaluation.report import ModelRequest
from ray_ulysses.export.architecture import describe, generation_settings
from ray_ulysses.export.check import free_memory_bytes
from ray_ulysses.export.tokenizer_files import TokenizerFiles, find_tokenizer, tokenizer_in
from ray_ulysses.model_shape import HYBRID_LAYER_TYPES

# Beyond this length, SDPA's memory-efficient kernel is wrong with a mask (pytorch#162588).
_MOST_EFFICIENT_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest(ModelRequest):
    """Options of a generation."""

    prompts: tuple[str, ...]
    max_new_tokens: int = 256
    temperature: float = 0.0
    """Temperature of sampling; 0 always takes the most probable token."""
    top_p: float = 1.0
    seed: int = 0
    """Seed of sampling, set anew for each prompt."""
    tokenizer: Path | None = None
    """Directory of the tokenizer, or ``bytes``; None for the run's or the model's own."""
    raw: bool = False
    """Whether to continue the prompt as plain text, even if the tokenizer has a chat template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The continuation of one prompt."""

    prompt: str
    prompt_tokens: int
    """Number of tokens of the prompt, including the chat template's."""
    tokens: tuple[int, ...]
    """Generated tokens, including an end token."""
    text: str
    """Text of the generated tokens, without special tokens."""
    ended: bool
    """Whether the model ended the text. If not, the text reached the maximum length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Continuations of all prompts, and how they were generated."""

    model: str
    step: int | None
    """Step of the checkpoint; None for a model directory."""
    dtype: str
    device: str
    chat_template: bool
    """Whether the prompts were formatted with the tokenizer's chat template."""
    outputs: tuple[Output, ...]
    seconds: float


def refuse_unfit(host_free: int | None, gpu_free: int | None, *, weights: int, loaded: int, cache: int) -> None:
    """Refuse a generation that does not fit into the memory. Unknown free memory is not checked.

    Args:
        host_free: Free memory of this machine in bytes.
        gpu_free: Free memory of the GPU in bytes, or None to generate on the CPU.
        weights: Size of the weights on the device in bytes.
        loaded: Size of the weights on the host while they are loaded.
        cache: Size of the KV cache at the end of the longest text, at most.

    Raises:
        UserError: The model or its KV cache does not fit.
    """
    way_out = (
        "use a smaller --max-new-tokens or --dtype bf16, a machine with more memory, or export the model and serve it "
        "on several GPUs with vLLM"
    )
    free, where = (host_free, "this machine") if gpu_free is None else (gpu_free, "the GPU")
    if free is not None and weights + cache > free:
        raise UserError(
            f"generation does not fit into the memory of {where}: weights {_gib(weights)}, KV cache {_gib(cache)}, "
            f"free {_gib(free)}; {way_out}"
        )
    if host_free is not None and loaded > host_free:
        raise UserError(
            f"loading does not fit into the memory of this machine: weights {_gib(loaded)} while loading, free "
            f"{_gib(host_free)}; {way_out}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"


def cache_bytes(text_config: Any, num_tokens: int, item_bytes: int) -> int:
    """Return an upper bound of the size of the keys and values of one text, for all attention layers.

    Sliding-window layers are counted as if they kept every token. The constant state of recurrent layers is left out.

    Args:
        text_config: The decoder's Transformers configuration.
        num_tokens: Length of the text.
        item_bytes: Size of an element in bytes.
    """
    recurrent = HYBRID_LAYER_TYPES.get(text_config.model_type, frozenset()) - {"hybrid"}
    kinds = getattr(text_config, "layer_types", None)
    num_layers = sum(one not in recurrent for one in kinds) if kinds else int(text_config.num_hidden_layers)
    num_heads = int(text_config.num_attention_heads)
    if getattr(text_config, "kv_lora_rank", None):
        # Transformers 5.23 caches latent attention before its expansion for each query head.
        width = int(text_config.kv_lora_rank) + int(text_config.qk_rope_head_dim)
    else:
        head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // num_heads
        width = 2 * _most(getattr(text_config, "num_key_value_heads", None) or num_heads) * _most(head_dim)
    return num_layers * width * num_tokens * item_bytes


def _most(size: int | Sequence[int]) -> int:
    return max(size) if isinstance(size, Sequence) else int(size)


def generate(request: GenerateRequest, say: Callable[[str], None]) -> Generation:
    """Generate a continuation of each prompt, on the first GPU or, without a GPU, on the CPU.

    Args:
        request: The options.
        say: Called with one line per stage.

    Raises:
        UserError: An option can't be satisfied, or the model does not fit into the memory.
        RunError: The weights can't be read, or the model's logits are not finite.
    """
    clock = SystemClock()
    started = clock.monotonic()
    source = find_model(request)
    if source.config.objective.task != "causal_lm":
        kind = source.config.objective.kind
        raise UserError(f"{request.model}: can't generate text (objective.kind={kind}); use a causal language model")
    files = _tokenizer_files(request)
    files.refuse_unknown_tokens(source.vocab_size)
    hf_config = described_config(source.config, _tied(source))
    tokenizer, template = _loaded_tokenizer(files, hf_config, raw=request.raw)
    prompts = [_encode(tokenizer, template, prompt) for prompt in request.prompts]
    longest = max(map(len, prompts)) + request.max_new_tokens
    if source.num_positions is not None and longest > source.num_positions:
        raise UserError(
            f"--max-new-tokens={request.max_new_tokens}: prompt and new tokens ({longest:,}) exceed the model's table "
            f"of {source.num_positions:,} positions; use a shorter prompt or fewer new tokens"
        )
    most_trained = max(source.rotary_positions or 0, source.context_tokens)
    if source.rotary_positions is not None and longest > most_trained:
        say(f"note: texts above {most_trained:,} tokens exceed the positions the model was trained on")
    model = meta_model(hf_config, source.config.model.part)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    added, item_bytes = find_trained_part(source.config), torch_dtype(source.dtype).itemsize
    parameters = sum(one.numel() for one in model.parameters()) + (0 if added is None else added.added)
    refuse_unfit(
        free_memory_bytes(),
        torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
        weights=parameters * item_bytes,
        # A checkpoint's weights are loaded in fp32.
        loaded=parameters * (item_bytes if source.checkpoint is None else 4),
        cache=cache_bytes(model.config.get_text_config(decoder=True), longest, item_bytes),
    )
    ends = _end_tokens(source, model, files)
    say(f"loading {request.model}" + ("" if source.step is None else f", step {source.step:,}"))
    live = source.build().eval().to(device)
    # An adapter's layers stay in place without the PEFT wrapper.
    live = live.get_base_model() if source.config.model.adapter is not None else live
    outputs = []
    for number, (text, tokens) in enumerate(zip(request.prompts, prompts, strict=True), 1):
        say(f"generating: prompt {number} of {len(prompts)}, {len(tokens):,} tokens")
        found = _continue(live, tokens, ends, request, device)
        outputs.append(
            Output(
                prompt=text,
                prompt_tokens=len(tokens),
                tokens=tuple(found),
                text=str(tokenizer.decode(found, skip_special_tokens=True)),
                ended=bool(found) and found[-1] in ends,
            )
        )
    return Generation(
        model=str(request.model),
        step=source.step,
        dtype=source.dtype,
        device=str(device),
        chat_template=template is not None,
        outputs=tuple(outputs),
        seconds=round(clock.monotonic() - started, 3),
    )


def _tied(source: ModelSource) -> bool | None:
    return None if source.checkpoint is None else bool(source.checkpoint[1].state.tied)


def _tokenizer_files(request: GenerateRequest) -> TokenizerFiles:
    if request.is_run:
        files = find_tokenizer(request.model, request.tokenizer, trust_run=request.trust_run)
        if not files.files:
            why = files.words.removeprefix("none: ").partition("; add a tokenizer")[0]
            raise UserError(f"--tokenizer: is not set, and the run has no usable tokenizer ({why}); set --tokenizer")
        return files
    assert isinstance(request.model, Path)
    try:
        return tokenizer_in(request.tokenizer or request.model)
    except UserError as error:
        raise UserError(f"--{error}") from error


def _loaded_tokenizer(files: TokenizerFiles, hf_config: Any, *, raw: bool) -> tuple[Any, ChatTemplate | None]:
    """Load a tokenizer with Transformers, and its chat template if it has one and ``raw`` is not set."""
    with tempfile.TemporaryDirectory(prefix="ray-ulysses-tokenizer-") as name:
        folder = Path(name)
        # AutoTokenizer reads the model type from config.json.
        (folder / "config.json").write_text(hf_config.to_json_string())
        for file, content in files.files.items():
            (folder / file).write_bytes(content)
        tokenizer = transformers_tokenizer(folder)
        try:
            source = None if raw else own_template(folder)
        except UserError:
            source = None
        return tokenizer, None if source is None else ChatTemplate(folder)


def _encode(tokenizer: Any, template: ChatTemplate | None, prompt: str) -> list[int]:
    if template is None:
        tokens: list[int] = tokenizer(prompt)["input_ids"]
    else:
        try:
            text = template.render([{"role": "user", "content": prompt}], (), asks=True)
        except RowError as error:
            raise UserError(f"--prompt: {error}; add --raw to generate without the template") from error
        # The template has written the special tokens.
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not tokens:
        raise UserError("--prompt: has no tokens; write a prompt")
    return tokens


def _end_tokens(source: ModelSource, model: Any, files: TokenizerFiles) -> list[int]:
    """Return the tokens that end a text: the same as in an export of the run, or those of the model directory."""
    config = source.config
    if source.checkpoint is None:
        settings = generation_settings(config, model, ())
    elif config.model.part == "text":
        settings = generation_settings(config, model, files.end_tokens)
    else:
        settings = describe(config, "model", files.end_tokens, is_tied=_tied(source)).generation or {}
    ends = settings.get("eos_token_id")
    return [ends] if isinstance(ends, int) else list(ends or ())


@torch.no_grad()
def _continue(
    model: Any, prompt: list[int], ends: list[int], request: GenerateRequest, device: torch.device
) -> list[int]:
    from transformers import GenerationConfig

    is_sampled = request.temperature > 0
    sampling = {"temperature": request.temperature, "top_p": request.top_p, "top_k": 0} if is_sampled else {}
    # The base model's own settings, such as a repetition penalty, do not apply.
    model.generation_config = GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        do_sample=is_sampled,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
        **sampling,
    )
    torch.manual_seed(request.seed)
    tokens = torch.tensor([prompt], device=device)
    exact = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
    with nullcontext() if len(prompt) + request.max_new_tokens <= _MOST_EFFICIENT_TOKENS else exact:
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), logits_processor=[_refuse_not_finite])
    generated: list[int] = found[0, len(prompt) :].tolist()
    return generated


def _refuse_not_finite(_tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    if not bool(logits.isfinite().all()):
        raise RunError(
            "the model's logits are not finite: the model has diverged, or its dtype overflows; select an earlier step "
            "with --step, or compute with --dtype fp32"
        )
    return logits
