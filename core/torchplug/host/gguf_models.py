"""What a GGUF file's architecture means in Hugging Face terms: config keys, tensor names, the order of rows.

llama.cpp names architectures, metadata and tensors in its own way (its gguf-py/gguf/constants.py) and its converter
stores the query and key rows of llama models in another order. One `Family` per architecture says how to go back;
`FAMILIES` is the list of what can be loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchplug.errors import CheckpointError, Problem
from torchplug.host.gguf_file import GgufFile, GgufTensor
from torchplug.host.untrusted import first_of, shown

if TYPE_CHECKING:
    from torch import Tensor

_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """One `general.architecture`.

    Attributes:
        config: Makes the config.json of the Hugging Face model from the file.
        outer: Tensor names outside the layers, without `.weight` or `.bias`: GGUF -> Hugging Face.
        inner: Tensor names inside layer N, after `blk.N.`: GGUF -> the name after `model.layers.N.`.
        heads: For tensors whose rows the converter reordered (rotary halves interleaved), the config key with their
            number of heads.
        skipped: Tensors whose content is in the config already.
    """

    config: Callable[[GgufFile], dict[str, Any]]
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    heads: Mapping[str, str]
    skipped: frozenset[str]


def family_of(file: GgufFile) -> Family:
    """The Family of `file`, or CheckpointError with what is supported."""
    architecture = file.text("general.architecture")
    family = FAMILIES.get(architecture or "")
    if family is None:
        says = "has no general.architecture" if architecture is None else f"is of architecture {shown(architecture)}"
        fix = f"supported from GGUF: {', '.join(sorted(FAMILIES))}; use the model's safetensors checkpoint for others"
        raise CheckpointError(f"GGUF file {str(file.path)!r}", Problem("", says, fix))
    if (file.integer("split.count") or 1) > 1:
        says = f"is one of {file.integer('split.count')} parts of a split model"
        fix = "join them with llama.cpp: `llama-gguf-split --merge FIRST_PART OUT.gguf`"
        raise CheckpointError(f"GGUF file {str(file.path)!r}", Problem("", says, fix))
    return family


def hugging_face_names(file: GgufFile, family: Family) -> dict[str, GgufTensor]:
    """The file's tensors under their Hugging Face names, in the file's order; one error lists all that have none."""
    found: dict[str, GgufTensor] = {}
    problems: list[Problem] = []
    for name, tensor in file.tensors.items():
        if name in family.skipped:
            continue
        translated = _translated(name, family)
        if translated is None:
            says = f"is not a tensor of architecture {file.text('general.architecture')}"
            problems.append(Problem(f"tensor {shown(name)}", says, "the file holds a variant that is not supported"))
        else:
            found[translated] = tensor
    if problems:
        raise CheckpointError(f"GGUF file {str(file.path)!r}", first_of(problems))
    return found


def restore_rows(name: str, tensor: Tensor, family: Family, config: Mapping[str, Any]) -> Tensor:
    """Undo the converter's row order of the GGUF tensor called `name`: [rows, ...] -> [rows, ...].

    Per head the converter interleaves the two rotary halves (0, d/2, 1, d/2 + 1, ...) for ggml's rotation of
    neighbouring pairs; Hugging Face models rotate halves (convert_hf_to_gguf.py, LlamaModel.permute).
    """
    leaf = name.rpartition(".")[0].rpartition(".")[2]
    key = family.heads.get(leaf)
    if key is None:
        return tensor
    rows, *rest = tensor.shape
    pairs = tensor.reshape(config[key], rows // config[key] // 2, 2, *rest)
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _translated(name: str, family: Family) -> str | None:
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if stem in family.outer:
        return f"{family.outer[stem]}.{kind}"
    layer = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)", stem)
    if layer and layer[2] in family.inner:
        return f"model.layers.{layer[1]}.{family.inner[layer[2]]}.{kind}"
    return None


class _Keys:
    """The metadata of one architecture (`llama.*`); collects every key that is missing or unusable into one error."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = file.text("general.architecture") or ""
        self.problems: list[Problem] = []

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0 under `prefix.key`."""
        name = f"{self.prefix}.{key}"
        try:
            value = self.file.integer(name)
        except CheckpointError as error:
            self.problems += [Problem(name, problem.says, problem.fix) for problem in error.problems]
            return 1
        if value is None:
            value = default
        if value is None or value < 1 or value >= 2**31:
            says = "is missing" if value is None else f"is {value}; expected a whole number from 1 to 2**31 - 1"
            self.problems.append(Problem(name, says, "convert the model to GGUF again with a current tool"))
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        name = f"{self.prefix}.{key}"
        value = self.file.number(name)
        if value is None:
            value = default
        if value is None or not 0 < value < float("inf"):
            says = "is missing" if value is None else f"is {value}; expected a number above 0"
            self.problems.append(Problem(name, says, "convert the model to GGUF again with a current tool"))
            return 1.0
        return value

    def refuse(self, key: str, says: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.prefix}.{key}", says, fix))

    def done(self) -> None:
        if self.problems:
            raise CheckpointError(f"GGUF file {str(self.file.path)!r}", first_of(self.problems))


def _llama_config(file: GgufFile) -> dict[str, Any]:
    """Llama's config. llama.cpp's converter files Mistral as a llama too, without its window, and so it is run here."""
    return _decoder_config(file, "LlamaForCausalLM", "llama") | {
        "attention_bias": _any_bias(file, "attn_(q|k|v|output)"),
        "mlp_bias": _any_bias(file, "ffn_(gate|up|down)"),
    }


def _qwen2_config(file: GgufFile) -> dict[str, Any]:
    return _decoder_config(file, "Qwen2ForCausalLM", "qwen2")


def _qwen3_config(file: GgufFile) -> dict[str, Any]:
    bias = _any_bias(file, "attn_(q|k|v|output)")
    return _decoder_config(file, "Qwen3ForCausalLM", "qwen3") | {"attention_bias": bias}


def _any_bias(file: GgufFile, stems: str) -> bool:
    return any(re.fullmatch(rf"blk\.\d+\.{stems}\.bias", name) for name in file.tensors)


def _decoder_config(file: GgufFile, architecture: str, model_type: str) -> dict[str, Any]:
    """The keys of a rotary, pre-norm decoder with grouped queries and a gated MLP; CheckpointError lists what is
    missing or not supported."""
    keys = _Keys(file)
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads or 1)
    if f"{keys.prefix}.attention.key_length" not in file and hidden % heads:
        keys.refuse("attention.head_count", f"is {heads}, which does not divide embedding_length {hidden}", _DAMAGED)
    if head_dim % 2:
        keys.refuse("attention.key_length", f"is {head_dim}; rotary embeddings need an even size of heads", _DAMAGED)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.count(key, head_dim) != head_dim:
            keys.refuse(key, f"is {keys.count(key)} where attention heads have {head_dim}", _VARIANT)
    if (file.integer(f"{keys.prefix}.expert_count") or 0) > 0:
        keys.refuse("expert_count", "says that this is a mixture of experts", _VARIANT)
    window, context = file.integer(f"{keys.prefix}.attention.sliding_window") or 0, keys.count("context_length")
    if 0 < window < context:
        says = f"says that layers see only {window} of up to {context} tokens"
        keys.refuse("attention.sliding_window", says, _VARIANT)
    if file.flag(f"{keys.prefix}.attention.causal") is False:
        keys.refuse("attention.causal", "says that attention looks ahead, as in an embedding model", _VARIANT)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        keys.refuse("vocab_size", "cannot be found: there is no two-dimensional tensor token_embd.weight", _DAMAGED)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        # ggml keeps the padded table, metadata sometimes the unpadded count: the table is what has to be filled.
        "vocab_size": embedding.shape[0] if embedding else 0,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    scaling = _rope_scaling(keys, config)
    if scaling:
        config["rope_scaling"] = scaling
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = file.integer(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token_id"] = token
    keys.done()
    for key in ("num_attention_heads", "num_key_value_heads"):
        stem = "attn_q" if key == "num_attention_heads" else "attn_k"
        for name, tensor in file.tensors.items():
            if re.fullmatch(rf"blk\.\d+\.{stem}\.(weight|bias)", name) and tensor.shape[:1] != (
                config[key] * head_dim,
            ):
                says = f"has shape {list(tensor.shape)}; expected {config[key]} heads x {head_dim} rows"
                keys.problems.append(Problem(f"tensor {shown(name)}", says, _DAMAGED))
    keys.done()
    return config


_DAMAGED = "the file is damaged, or was made by a faulty tool: convert the model to GGUF again"
_VARIANT = "this variant is not supported from GGUF: use the model's safetensors checkpoint"


def _rope_scaling(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json's rope_scaling, or None: linear and yarn come from the metadata, llama3 from the factors tensor."""
    file, prefix = keys.file, f"{keys.prefix}.rope.scaling"
    factor = "rope.scaling.factor" if f"{prefix}.factor" in file else "rope.scale_linear"
    # As llama.cpp has it: a factor without a type is linear scaling.
    kind = file.text(f"{prefix}.type") or ("linear" if f"{keys.prefix}.{factor}" in file else "none")
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            keys.refuse("rope.scaling.type", f"is {kind}, and the file has {_ROPE_FACTORS} as well", _VARIANT)
            return None
        return _llama3_scaling(keys, config)
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number(factor)}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        }
        for key, name in (
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
            ("attn_factor", "attention_factor"),
        ):
            if f"{prefix}.{key}" in file:
                scaling[name] = keys.number(f"rope.scaling.{key}")
        return scaling
    if kind != "none":
        keys.refuse("rope.scaling.type", f"is {shown(kind)}; known are none, linear, yarn", _VARIANT)
    return None


def _llama3_scaling(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The llama3 parameters behind a tensor of rotary factors [head_dim / 2].

    The converter stores, per frequency f with wavelength w = 2 pi / f, the divisor 1 / ((1 - s) / factor + s), where s
    = clamp((original / w - low) / (high - low), 0, 1). So factor is the largest divisor, and in between s is a line in
    1 / w, whose slope original / (high - low) and intercept -low / (high - low) give the rest: the rotation depends on
    the three only up to a common scale, which is fixed by low = 1 as in every published model. What comes out is
    checked against the tensor.
    """
    import math

    import torch

    tensor = keys.file.tensors[_ROPE_FACTORS]
    head_dim, theta = config["head_dim"], config["rope_theta"]
    if tensor.kind.plain != "float32" or tensor.shape != (head_dim // 2,):
        keys.problems.append(
            Problem(_ROPE_FACTORS, f"is {tensor.kind.name} {list(tensor.shape)}, not F32 [{head_dim // 2}]", _DAMAGED)
        )
        return None
    divisors = keys.file.raw(tensor).view(torch.float32).double()
    if bool((divisors == 1).all()):
        return None
    per_turn = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / (
        2 * math.pi
    )  # 1 / wavelength
    factor = float(divisors.max())
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (smooth > 1e-4) & (smooth < 1 - 1e-4)
    if int(between.sum()) >= 2 and factor > 1:
        x, y = per_turn[between], smooth[between]
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        intercept = float(y.mean()) - slope * float(x.mean())
        if intercept < 0 < slope:
            high = round(1 - 1 / intercept, 3)
            original = round(slope * (high - 1))
            again = ((original * per_turn - 1) / (high - 1)).clamp(0, 1)
            if torch.allclose(1 / ((1 - again) / factor + again), divisors, rtol=2e-3, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    says = "are rotary factors that the llama3 formula does not explain (longrope or another scheme)"
    keys.problems.append(Problem(_ROPE_FACTORS, says, _VARIANT))
    return None


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# The rotary factors become rope_scaling.
_SKIPPED = frozenset({_ROPE_FACTORS})

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        config=_llama_config,
        outer=_OUTER,
        inner=_INNER,
        heads={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        skipped=_SKIPPED,
    ),
    # ggml rotates halves for these, as Hugging Face models do, so the converter leaves their rows alone.
    "qwen2": Family(config=_qwen2_config, outer=_OUTER, inner=_INNER, heads={}, skipped=_SKIPPED),
    "qwen3": Family(config=_qwen3_config, outer=_OUTER, inner=_INNER | _QK_NORM, heads={}, skipped=_SKIPPED),
}
