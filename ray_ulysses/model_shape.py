"""Reads a decoder's sizes from its Hugging Face configuration and its family's defaults, without importing torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_ulysses.errors import UserError
from ray_ulysses.storage.regular import read_regular
from ray_ulysses.trained_part import MatchedParameters, MuonPart, TrainedPart
from ray_ulysses.validation import parse_json

# Families whose query and key norms run in fp32 in Transformers; a test compares this list with Transformers' modules.
HEAD_NORMS = frozenset((
    "afmoe", "apertus", "beam", "blt", "doge", "dots1", "exaone4", "exaone_moe", "flex_olmo", "flint",
    "gemma3_text", "gemma4_text", "gemma4_unified_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
    "inkling_text", "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama4_text", "mellum", "minimax_m2",
    "minimax_m3_vl_text", "nanochat", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next",
))  # fmt: skip
WHOLE_HEAD_NORMS = frozenset({"cohere"})
"""Families whose query and key norms, if enabled, have separate weights for each head and therefore can't be tiled."""

TIED_BY_DEFAULT = frozenset((
    "bert", "bert-generation", "big_bird", "biogpt", "camembert", "cohere", "cohere2", "cohere2_moe",
    "cohere_compass_text", "data2vec-text", "electra", "ernie", "ernie4_5", "ernie4_5_moe", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "gemma4_unified_text", "granite_swa", "jetmoe", "lfm2", "lfm2_moe", "lfm3",
    "megatron-bert", "minicpm3", "modernbert-decoder", "recurrent_gemma", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "smollm3", "starcoder2", "vaultgemma", "xlm-roberta", "xlm-roberta-xl", "xmod", "youtu", "zamba",
    "zamba2",
))  # fmt: skip
"""Families that tie the embedding and the output head if ``tie_word_embeddings`` is omitted, which is common in files
on the hub. A test compares this list with Transformers' classes."""

BALANCING_BIASES = frozenset((
    "axk1", "bailing_hybrid", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "kimi_linear",
    "kolibri1", "lfm2_moe", "longcat_flash", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "nemotron_h",
    "solar_open",
))  # fmt: skip
"""Families whose routers have a bias that balances them, which `optimizer.router_bias_rate` updates. A test compares
this list with Transformers' modules."""
UNCOUNTED_ROUTERS = frozenset({"dbrx", "jetmoe"})
"""Families whose routers do not return the chosen experts. A test compares this list with Transformers' modules."""

_LINEAR = frozenset({"linear_attention"})
HYBRID_LAYER_TYPES: Mapping[str, frozenset[str]] = {
    "lfm2": frozenset({"conv"}),
    "lfm2_moe": frozenset({"conv"}),
    "lfm3": frozenset({"conv"}),
    "qwen3_next": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "olmo_hybrid": _LINEAR,
    "kimi_linear": _LINEAR,
    "bailing_hybrid": _LINEAR,
    "minimax": _LINEAR,
    "jamba": _LINEAR,
    "bamba": _LINEAR,
    "granitemoehybrid": _LINEAR,
    "nemotron_h": _LINEAR,
    "falcon_h1": frozenset({"hybrid"}),
    "zamba": _LINEAR | {"hybrid"},
    "zamba2": _LINEAR | {"hybrid"},
}
"""Supported recurrent layer types by model type (see `ray_ulysses.attention.mixer_layouts`)."""


# Maximum value by a substring of the field's name: larger than in any model, but small enough to plan with in seconds.
_MOST: tuple[tuple[str, int], ...] = (
    ("theta", 1 << 53),
    ("experts_per_tok", 1 << 14),
    ("vocab_size", 1 << 26),
    ("layer", 1024),
    ("block", 1 << 20),
    ("experts", 1 << 14),
    ("heads", 1 << 16),
    ("_dim", 1 << 20),
    ("d_model", 1 << 20),
    ("_size", 1 << 24),
    ("_rank", 1 << 20),
    ("_inputs", 1 << 10),
)
_MOST_NUMBER = 1 << 53
_MOST_VALUES = 1 << 16
_MOST_LEVELS = 20
_PARTS = ("text_config", "vision_config", "audio_config")
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")

# Default number of key-value heads in the configuration classes of Transformers 5.23; other families use the number of
# attention heads.
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_VALUE_DIM = {"mimo_v2_flash": 128}

EXACT_FAMILIES: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose parameter count is exact. A test compares the count with Transformers' modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Sizes of a mixture-of-experts layer. If layers differ, each field has the largest value over all layers."""

    count: int
    """Number of routed experts."""
    active: int
    """Number of routed experts per token."""
    width: int
    """Inner width of a routed expert."""
    shared: int
    """Total inner width of the shared experts, or 0 if there are none."""
    dense_layers: int
    """Number of layers that have a dense MLP instead of experts."""
    has_router_loss: bool = False
    """Whether the training loss includes the routers' load-balancing loss."""

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any], source: str = "model.config") -> Experts | None:
        """Read the experts' sizes from a Hugging Face configuration, or return None for a dense model.

        Raises:
            UserError: A size is neither an integer nor a list with one integer per layer.
        """

        def first(*names: str) -> int:
            return next((_largest(config, name, source) for name in names if config.get(name)), 0)

        count = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        if count <= 1:
            return None
        width = first("moe_intermediate_size", "intermediate_size")
        shared = first("shared_expert_intermediate_size", "shared_intermediate_size")
        return cls(
            count=count,
            active=min(count, first("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token") or 1),
            width=width,
            shared=shared or width * first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
            dense_layers=first("first_k_dense_replace", "num_dense_layers"),
            has_router_loss=config.get("output_router_logits") is True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a causal decoder or of an encoder."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the gated MLP; for a model with experts, see ``mlp_width``."""
    num_heads: int
    num_kv_heads: int
    """Number of key-value heads, a divisor of ``num_heads``. If layers differ, the largest number; with latent
    attention, which computes keys and values for each query head, ``num_heads``."""
    head_dim: int
    """Width of a query or key head; if layers differ, the largest width."""
    value_dim: int
    """Width of a value head, and of a head in the attention output."""
    attention_width: int
    """Total width of all layers' query heads, or the mean with the value heads'; doubled without a causal mask."""
    output_width: int
    """Total width of all layers' attention outputs."""
    vocab_size: int
    tied_embeddings: bool
    layer_parameters: int
    """Number of parameters per decoder layer."""
    is_exact: bool
    """Whether the parameter counts are exact (see `EXACT_FAMILIES`) instead of estimates from a Llama-like model."""
    other_parameters: int = 0
    """Correction to the layers' total parameter count if layers differ."""
    mixer_layers: int = 0
    """Number of recurrent layers: short convolutions, gated delta nets and Mamba."""
    mixer_sp_sizes: tuple[int, ...] = ()
    """Values of ``parallel.sp_size`` that divide the recurrent layers' heads, ascending."""
    mixer_width: int = 0
    """Total input width of the recurrent layers' output projections."""
    mixer_multiply_adds: int = 0
    """Total multiply-adds per token in the recurrences' forward passes."""
    repeated_parameters: int = 0
    """Number of parameters in modules that several layers share, included once for each use after the first."""
    counted_idle: int | None = None
    """Value of `idle_parameters` if the model's modules were counted; None to compute it from the sizes."""
    part: TrainedPart | None = None
    """The trained part, or None if all parameters are trained."""
    matched: tuple[MatchedParameters, ...] = ()
    """Trained parameters of each entry of ``optimizer.groups``."""
    muon: MuonPart | None = None
    """Matrices that Muon updates, or None with other optimizers."""
    has_head_norms: bool = False
    """Whether queries and keys are normalized in fp32."""
    experts: Experts | None = None
    """Sizes of the experts, or None if all layers have dense MLPs."""
    streams: int = 1
    """Number of parallel residual streams. Gemma 3n has several."""
    attentions: int = 1
    """Number of attention calls per layer: 2 in DiffLlama, which subtracts one output from the other; otherwise 1."""
    is_gated: bool = True
    """Whether an MLP multiplies its activation by a gate."""
    has_mlp_modules: bool = True
    """Whether each layer's MLP is a module of its own, which can run over tiles of tokens."""

    @property
    def mlp_width(self) -> int:
        """Inner width of a layer's MLP per token; with experts, the total over the token's experts."""
        experts = self.experts
        return self.intermediate_size if experts is None else experts.active * experts.width + experts.shared

    @property
    def mlp_parameters(self) -> int:
        """Number of parameters in a layer's MLP, including all experts but not the router."""
        experts = self.experts
        width = self.intermediate_size if experts is None else experts.count * experts.width + experts.shared
        return (3 if self.is_gated else 2) * self.hidden_size * width

    @property
    def idle_parameters(self) -> int:
        """Number of parameters in all layers that a token does not use in a matrix product, such as other experts'."""
        if self.counted_idle is not None or self.experts is None:
            return self.counted_idle or 0
        layers = max(0, self.num_layers - self.experts.dense_layers)
        return layers * (self.mlp_parameters - 3 * self.hidden_size * self.mlp_width)

    @property
    def layer_multiply_adds(self) -> int:
        """Multiply-adds per token of all layers in a forward pass, excluding attention scores and values."""
        used = self.num_parameters - self.idle_parameters + self.repeated_parameters
        used -= 0 if self.part is None else self.part.added_to_sums
        return used + self.mixer_multiply_adds - (1 if self.tied_embeddings else 2) * self.embedding_parameters

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters in the token embedding. An untied output head has the same number."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the model, including any adapters. Tied parameters are included only once."""
        heads = 1 if self.tied_embeddings else 2
        layers = self.num_layers * self.layer_parameters + self.other_parameters
        added = 0 if self.part is None else self.part.added
        return layers + self.hidden_size + heads * self.embedding_parameters + added

    @property
    def trained_parameters(self) -> int:
        """Number of parameters with a gradient and optimizer state."""
        return self.num_parameters if self.part is None else self.part.trained

    @property
    def frozen_matrices(self) -> int:
        """Number of parameters in matrix products that have no gradient, even after an adapter's product is added."""
        if self.part is None:
            return 0
        frozen, idle = self.num_parameters - self.trained_parameters, self.idle_parameters
        if not self.has_adapter:
            # The experts of trained layers are trained. Assume that all layers have the same share of idle parameters.
            in_layers = frozen - self.embedding_parameters * ((not self.part.has_embedding) + (not self.part.has_head))
            idle = idle * max(0, in_layers) // (self.num_layers * self.layer_parameters + self.other_parameters)
        experts = self.experts
        summed = self.part.summed if experts is None else self.part.summed * experts.active // experts.count
        is_lookup = not self.part.has_embedding and not self.tied_embeddings
        return frozen - idle - summed - (self.embedding_parameters if is_lookup else 0)

    @property
    def has_adapter(self) -> bool:
        """Whether adapters are added to the model."""
        return self.part is not None and self.part.added > 0

    @property
    def head_is_trained(self) -> bool:
        """Whether the output head has a gradient."""
        return self.part is None or self.part.has_head

    @property
    def embedding_is_trained(self) -> bool:
        """Whether the token embedding has a gradient."""
        return self.part is None or self.part.has_embedding

    def level_sp_sizes(self) -> tuple[int, ...]:
        """Return the values of ``parallel.sp_size`` that divide the heads equally without a ring, ascending."""
        level = (size for size in range(1, self.num_heads + 1) if self.num_heads % size == 0)
        return tuple(size for size in level if not self.mixer_layers or size in self.mixer_sp_sizes)

    @classmethod
    def from_config_dict(cls, config: Mapping[str, Any], *, source: str = "model.config") -> ModelShape:
        """Read the sizes from a Hugging Face configuration.

        Args:
            config: Content of a ``config.json``, or of the setting ``model.config``.
            source: Display name of the configuration in errors.

        Returns:
            The model's shape. Optional sizes default to the values of the family's configuration class in Transformers.

        Raises:
            UserError: A required size is missing, a size is not a positive integer, or two sizes are inconsistent.
        """
        refuse_implausible(config, source)
        config = with_num_layers(config)
        model_type = config.get("model_type")
        parts = [name for name in _PARTS if isinstance(config.get(name), Mapping)]
        if parts:
            raise UserError(
                f"{source}: is a multimodal model (it has {', '.join(parts)}); set model.part: text to train its "
                "text decoder, which is exported back into the complete model"
            )
        missing = [name for name in ("model_type", *_REQUIRED) if config.get(name) is None]
        if missing:
            raise UserError(
                f"{source}: {', '.join(missing)} not found; a decoder's configuration must define "
                f"{', '.join(('model_type', *_REQUIRED))}, as on the Hugging Face hub{_nearest_family(model_type)}"
            )
        if not isinstance(model_type, str):
            raise UserError(f"{source}.model_type={model_type!r}: must be a string such as 'llama'")
        sizes = {name: largest_size(config, name, source) for name in _REQUIRED}
        num_heads, hidden, num_layers = sizes["num_attention_heads"], sizes["hidden_size"], sizes["num_hidden_layers"]
        num_kv_heads = _kv_heads(config, model_type, num_heads, source)
        head_dim = _head_dim(config, model_type, num_heads, hidden, source)
        layers = _layer_heads(config, num_layers, (num_kv_heads, head_dim), num_heads, source)
        query_width, experts = sum(num_heads * dim for _, dim in layers), Experts.from_config_dict(config, source)
        kv_width = sum(count * dim for count, dim in layers)
        shape = cls(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=sizes["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=max(count for count, _ in layers),
            head_dim=max(dim for _, dim in layers),
            value_dim=max(dim for _, dim in layers),
            attention_width=query_width,
            output_width=query_width,
            vocab_size=sizes["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", model_type in TIED_BY_DEFAULT)),
            # If layers differ, estimate the parameters from a layer of the mean width.
            layer_parameters=_layer_parameters(
                config, model_type, hidden, sizes["intermediate_size"], query_width // num_layers,
                kv_width // num_layers, head_dim, experts,
            ),
            is_exact=model_type in EXACT_FAMILIES,
            other_parameters=_dense_layers(experts, hidden, sizes["intermediate_size"]),
            has_head_norms=model_type in HEAD_NORMS or config.get("use_qk_norm") is True,
            experts=experts,
        )  # fmt: skip
        return _with_own_widths(shape, config, source)

    @classmethod
    def from_path(cls, path: Path | str) -> ModelShape:
        """Read the sizes from the ``config.json`` in a local model directory.

        Args:
            path: Model directory.

        Raises:
            UserError: The file does not exist or is not a JSON object, or its sizes are invalid.
        """
        file = Path(path) / "config.json"
        return cls.from_config_dict(read_model_config(path, f"model.path={str(path)!r}"), source=str(file))


def read_model_config(directory: Path | str, setting: str) -> dict[str, Any]:
    """Read the ``config.json`` in a model directory and check that its sizes are plausible.

    Args:
        directory: Model directory.
        setting: Setting and value that specify the directory, for errors.

    Raises:
        UserError: The file does not exist, is not a JSON object, or contains an implausible size.
    """
    file = Path(directory) / "config.json"
    try:
        content = parse_json(read_regular(file))
    except FileNotFoundError:
        raise UserError(
            f"{setting}: {file} does not exist; set the directory of a Hugging Face model, which contains a "
            "config.json, or a hub ID"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{setting}: {file} can't be read as JSON ({error}); restore this file from the model's source"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{setting}: {file} must contain a JSON object, not {type(content).__name__}")
    refuse_implausible(content, str(file))
    return content


def refuse_implausible(fields: object, source: str, levels: int = _MOST_LEVELS) -> None:
    """Raise an error if a configuration has implausibly large sizes or an implausible structure.

    Args:
        fields: Configuration, or a part of one.
        source: Display name of `fields` in errors.
        levels: Maximum nesting depth.

    Raises:
        UserError: A size, the number of values or the nesting depth is too large.
    """
    if isinstance(fields, Mapping | list | tuple):
        if levels == 0 or len(fields) > _MOST_VALUES:
            raise UserError(f"{source}: has more than {_MOST_VALUES:,} values or {_MOST_LEVELS} levels; simplify it")
        if not isinstance(fields, Mapping):
            for value in fields:
                refuse_implausible(value, source, levels - 1)
            return
        for name, value in fields.items():
            _refuse_large(str(name), value, source)
            refuse_implausible(value, f"{source}.{name:.80}" if isinstance(name, str) else source, levels - 1)


def _refuse_large(name: str, value: object, source: str) -> None:
    most = next((most for part, most in _MOST if part in name), None)
    if isinstance(value, list | tuple):
        if most is not None and "layer" in name and len(value) > most:
            raise UserError(f"{source}.{name}: has {len(value):,} layers; use at most {most:,}")
        values: list[object] = list(value)
    else:
        values = [value]
    for one in values:
        # "not <=" instead of ">", because comparisons with NaN are false.
        if isinstance(one, int) and not abs(one) <= (most or _MOST_NUMBER):
            shown = one if abs(one) < 1 << 64 else "a number of more than 64 bits"
            raise UserError(f"{source}.{name}={shown}: must be at most {most or _MOST_NUMBER:,}")
        if isinstance(one, float) and most is not None and not abs(one) <= most:
            raise UserError(f"{source}.{name}={one}: must be at most {most:,}")


def with_num_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add ``num_hidden_layers`` to a Nemotron-H configuration, in which Transformers saves only the layer types."""
    kinds = config.get("layers_block_type")
    if config.get("num_hidden_layers") is not None or not isinstance(kinds, list):
        return config
    return {**config, "num_hidden_layers": len(kinds)}


def positive_int(config: Mapping[str, Any], name: str, source: str) -> int:
    """Return the size `name` from a configuration.

    Raises:
        UserError: The size is not an integer of at least 1.
    """
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{source}.{name}={value!r}: must be a whole number of at least 1")
    return value


def largest_size(config: Mapping[str, Any], name: str, source: str) -> int:
    """Return the size `name`, or its maximum if it is a list with one value per layer, as in Gemma 3n's MLP widths."""
    is_list = isinstance(config[name], list | tuple) and config[name]
    return positive_int({name: _largest(config, name, source)} if is_list else config, name, source)


def _largest(config: Mapping[str, Any], name: str, source: str) -> int:
    """Return an integer, or the maximum of a list with one integer per layer, such as Hunyuan's ``moe_topk``."""
    value = config[name]
    values: list[int] = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in values):
        raise UserError(f"{source}.{name}={value!r}: must be a whole number, or a list with one number per layer")
    return max(values)


def _nearest_family(model_type: object) -> str:
    """Suggest a family for a misspelled model type. A family name followed by a version is not a misspelling."""
    near = difflib.get_close_matches(str(model_type).lower(), EXACT_FAMILIES, n=1, cutoff=0.75)
    is_misspelled = near and not str(model_type).startswith(near[0])
    return f" (did you mean model_type '{near[0]}'?)" if is_misspelled else ""


def _kv_heads(config: Mapping[str, Any], model_type: str, num_heads: int, source: str) -> int:
    if config.get("num_key_value_heads") is not None:
        kv_heads = positive_int(config, "num_key_value_heads", source)
    elif "num_key_value_heads" in config:
        kv_heads = num_heads
    else:
        kv_heads = _DEFAULT_KV_HEADS.get(model_type, num_heads)
    if num_heads % kv_heads:
        raise UserError(
            f"{source}.num_key_value_heads={kv_heads}: must divide num_attention_heads={num_heads}; "
            "each key-value head serves the same number of query heads"
        )
    return kv_heads


def _head_dim(config: Mapping[str, Any], model_type: str, num_heads: int, hidden: int, source: str) -> int:
    if config.get("head_dim") is not None:
        return positive_int(config, "head_dim", source)
    if model_type in _DEFAULT_HEAD_DIM:
        return _DEFAULT_HEAD_DIM[model_type]
    if hidden % num_heads:
        raise UserError(
            f"{source}.hidden_size={hidden}: is not a multiple of num_attention_heads={num_heads}; "
            "set head_dim, or use divisible sizes"
        )
    return hidden // num_heads


def _with_own_widths(shape: ModelShape, config: Mapping[str, Any], source: str) -> ModelShape:
    """Adjust the shape for families with other value widths, several residual streams, or two attentions per layer."""
    calls = 2 if shape.model_type == "diffllama" else 1
    query = value = shape.head_dim
    is_latent = config.get("qk_nope_head_dim") is not None
    if is_latent:
        parts = [name for name in ("qk_nope_head_dim", "qk_rope_head_dim") if config.get(name)]
        query = value = sum(positive_int(config, name, source) for name in parts)
    if config.get("v_head_dim") is not None:
        value = positive_int(config, "v_head_dim", source)
    else:
        value = _DEFAULT_VALUE_DIM.get(shape.model_type, value)
    if "altup_num_inputs" in config:
        shape = replace(shape, streams=positive_int(config, "altup_num_inputs", source))
    if calls == 1 and query == value == shape.head_dim:
        return shape
    heads = calls * shape.num_layers * shape.num_heads
    return replace(
        shape,
        num_kv_heads=shape.num_heads if is_latent else shape.num_kv_heads,
        head_dim=query,
        value_dim=value,
        attention_width=heads * (query + value) // 2,
        output_width=heads * value,
        attentions=calls,
    )


def _layer_heads(
    config: Mapping[str, Any], num_layers: int, usual: tuple[int, int], num_heads: int, source: str
) -> list[tuple[int, int]]:
    """Return the number and width of the key-value heads in each layer.

    If layers differ, Transformers 5.23 stores the differences in ``per_layer_config``, by layer index (a string or an
    integer). Original Gemma 4 files instead have extra fields for the full-attention layers.
    """
    given = config.get("per_layer_config")
    if isinstance(given, Mapping):
        changes = {_layer_number(number, num_layers, source): change for number, change in given.items() if change}
        for number, change in changes.items():
            if not isinstance(change, Mapping):
                raise UserError(f"{source}.per_layer_config.{number}={change!r}: must be a mapping of names to sizes")
    else:
        names = {"num_global_key_value_heads": "num_key_value_heads", "global_head_dim": "head_dim"}
        full = {own: config[name] for name, own in names.items() if config.get(name) is not None}
        kinds = config.get("layer_types") or ()
        if not isinstance(kinds, list | tuple):
            raise UserError(f"{source}.layer_types={kinds!r}: must be a list with one type per layer")
        changes = {number: full for number, kind in enumerate(kinds[:num_layers]) if full and kind == "full_attention"}
    layers = [usual] * num_layers
    for number, change in changes.items():
        layer = {"num_attention_heads": num_heads, **change}
        kv_heads = _kv_heads(layer, "", num_heads, source) if "num_key_value_heads" in change else usual[0]
        layers[number] = (kv_heads, positive_int(layer, "head_dim", source) if "head_dim" in change else usual[1])
    return layers


def _layer_number(number: Any, num_layers: int, source: str) -> int:
    if not str(number).isdecimal() or int(number) >= num_layers:
        raise UserError(f"{source}.per_layer_config has layer {number}, but there are {num_layers} layers")
    return int(number)


def _dense_layers(experts: Experts | None, hidden: int, intermediate: int) -> int:
    """Return the parameter count of the layers with a dense MLP, minus the count for as many expert layers."""
    if experts is None:
        return 0
    return experts.dense_layers * (3 * hidden * intermediate - _expert_parameters(experts, hidden))


def _expert_parameters(experts: Experts, hidden: int) -> int:
    """Return the number of parameters in a layer's experts (gated MLPs) and router."""
    return 3 * hidden * (experts.count * experts.width + experts.shared) + experts.count * hidden


def _layer_parameters(
    config: Mapping[str, Any],
    model_type: str,
    hidden: int,
    intermediate: int,
    query_width: int,
    kv_width: int,
    head_dim: int,
    experts: Experts | None,
) -> int:
    """Return the number of parameters in a layer: q, k, v and o projections, gated MLP, and norms.

    The biases follow Transformers 5.23. Qwen2 always has biases in q, k and v. With ``attention_bias``, Llama and Qwen3
    have biases in all four projections. With ``mlp_bias``, Llama has biases in the MLP. Qwen3 normalizes queries and
    keys per head.
    """
    # An estimate for families with experts.
    mlp = 3 * hidden * intermediate if experts is None else _expert_parameters(experts, hidden)
    weights = 2 * hidden * query_width + 2 * hidden * kv_width + mlp
    norms = 2 * hidden + (2 * head_dim if model_type == "qwen3" else 0)
    qkv_bias = model_type == "qwen2" or (model_type != "mistral" and bool(config.get("attention_bias")))
    output_bias = model_type not in ("qwen2", "mistral") and bool(config.get("attention_bias"))
    mlp_bias = model_type not in ("qwen2", "qwen3", "mistral") and bool(config.get("mlp_bias"))
    biases = (query_width + 2 * kv_width if qkv_bias else 0) + (hidden if output_bias else 0)
    return weights + norms + biases + (2 * intermediate + hidden if mlp_bias else 0)
