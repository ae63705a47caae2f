"""The kinds of models that can be read: a record of each. What is told apart by name, is told apart here."""

import dataclasses
import re
from collections.abc import Callable

from checkpoints.errors import UserError
from checkpoints.fields import NUMBER, Fields
from model import Chunked, Experts, Full, Gated, Heads, LayerKind, Norm, QueryScale, Rope, Router


@dataclasses.dataclass(frozen=True)
class Family:
    """Models whose config.json has the same fields and whose tensors have the same names.

    model_type: what config.json calls them; around: the same of those that have one as text_config beside
                other parts.
    read:       makes the layers, of config.json's fields, their number, and the heads and norm that all
                families name alike, see config_json.read_config.
    fixed:      the only value that a field may have, but for null, false and empty.
    renames:    from the names of published tensors to those that model.py declares: in turn, wherever found.
    ignored:    tensors that the language model does not use.
    """

    model_type: str
    read: Callable[[Fields, int, Heads, Norm], tuple[LayerKind, ...]]
    around: str | None = None
    fixed: dict = dataclasses.field(default_factory=lambda: dict(hidden_act="silu"))
    renames: tuple[tuple[re.Pattern, str], ...] = ()
    ignored: re.Pattern = re.compile(r"\.rotary_emb\.inv_freq$")


def _read_llama3(fields: Fields, depth: int, heads: Heads, norm: Norm) -> tuple[LayerKind, ...]:
    kind = LayerKind(heads, Gated(fields.take("intermediate_size", int)), rope=_read_rope(fields, 10000.0))
    return (kind,) * depth


def _read_llama4(fields: Fields, depth: int, heads: Heads, norm: Norm) -> tuple[LayerKind, ...]:
    take = fields.take
    every = take("no_rope_layer_interval", int, 4)
    # A 1 in no_rope_layers means that the layer does have RoPE.
    rotary = take("no_rope_layers", list, []) or [(i + 1) % every != 0 for i in range(depth)]
    masks = ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary]
    masks = take("layer_types", list, masks)
    moe_every = take("interleave_moe_layer_step", int, 1)
    moe = take("moe_layers", list, list(range(moe_every - 1, depth, moe_every)))
    known = all(mask in ("chunked_attention", "full_attention") for mask in masks)
    if not len(rotary) == len(masks) == depth or not known:
        raise UserError(f"config.json: no_rope_layers or layer_types do not describe {depth} layers")
    chunk, rope = take("attention_chunk_size", int, None), _read_rope(fields, 500000.0, interleaved=True)
    scale = QueryScale(take("attn_scale", NUMBER, 0.1), take("floor_scale", NUMBER, 8192))
    scale = scale if take("attn_temperature_tuning", (bool, int), True) else None
    qk_norm = dataclasses.replace(norm, weight=False) if take("use_qk_norm", bool, True) else None
    E, A, M = (take(x, int) for x in ("num_local_experts", "num_experts_per_tok", "intermediate_size"))
    if A > E:
        raise UserError(f"config.json: num_experts_per_tok = {A} of {E} experts")
    experts, dense = Experts(E, A, M, Router(), shared=Gated(M)), Gated(take("intermediate_size_mlp", int))
    with_rope = dataclasses.replace(heads, qk_norm=qk_norm)
    without = dataclasses.replace(heads, query_scale=scale)
    return tuple(
        LayerKind(
            with_rope if rotary[i] else without,
            experts if i in moe else dense,
            Chunked(chunk) if chunk and masks[i] == "chunked_attention" else Full(),
            rope if rotary[i] else None,
        )
        for i in range(depth)
    )


def _read_qwen3(fields: Fields, depth: int, heads: Heads, norm: Norm) -> tuple[LayerKind, ...]:
    fields.take("max_window_layers", int, None)  # of a sliding window, which another field would ask for
    if any(mask != "full_attention" for mask in fields.take("layer_types", list, [])):
        raise UserError("config.json: layer_types other than full_attention are not supported")
    heads = dataclasses.replace(heads, qk_norm=norm)
    mlp = Gated(fields.take("intermediate_size", int))
    return (LayerKind(heads, mlp, rope=_read_rope(fields, 10000.0)),) * depth


def _read_rope(fields: Fields, theta: float, interleaved: bool = False) -> Rope:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    theta: where neither says it.
    """
    theta = fields.take("rope_theta", NUMBER, theta)
    scaling = fields.take("rope_scaling", dict, {})
    rope = Fields(fields.take("rope_parameters", dict, scaling))
    theta = rope.take("rope_theta", NUMBER, theta)
    kind = rope.take("type", str, "default")  # the name before it was rope_type
    kind = rope.take("rope_type", str, kind)
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: rope_type {kind!r} is not supported (default, llama3)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = tuple(float(rope.take(name, NUMBER)) for name in names) if kind == "llama3" else None
    rope.finish({})
    return Rope(float(theta), numbers, interleaved)


FAMILIES = (
    Family("llama", _read_llama3),
    Family(
        "llama4_text",
        _read_llama4,
        around="llama4",
        renames=(
            (re.compile(r"^(model\.)?language_model\.(model\.)?(?!lm_head)"), "model."),
            (re.compile(r"^language_model\.(?=lm_head)"), ""),
            (re.compile(r"\.feed_forward\."), ".mlp."),
        ),
        ignored=re.compile(r"^(model\.)?(vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$"),
    ),
    Family("qwen3", _read_qwen3),
)


def family_of(config: dict) -> tuple[Family, dict]:
    """The family of a config.json, and the part of it that is about the language model. Raises UserError."""
    if config.get("model_type") in [family.around for family in FAMILIES if family.around]:
        if not isinstance(config.get("text_config"), dict):
            raise UserError("config.json: field 'text_config' is missing")
        around = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
        config = around | config["text_config"]
    name = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == name:
            return family, config
    known = sorted(x for family in FAMILIES for x in (family.model_type, family.around) if x)
    raise UserError(f"config.json: model_type {name!r} is not supported ({', '.join(known)})")
