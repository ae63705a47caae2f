"""The kinds of models that can be read: a record of each. What is told apart by name, is told apart here."""

import dataclasses
import re
from collections.abc import Callable

from checkpoints.errors import UserError
from checkpoints.fields import NUMBER, Fields
from model import (
    Chunked,
    Config,
    Experts,
    Full,
    Gated,
    Heads,
    Latent,
    LayerKind,
    Norm,
    Plain,
    QueryScale,
    Rope,
    Router,
    Window,
)

Layers = tuple[LayerKind, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """Models whose config.json has the same fields and whose tensors have the same names.

    model_type: what config.json calls them; around: the same of those that have one as text_config beside
                other parts.
    read:       makes the layers, of config.json's fields, their number, and the heads and norm that all
                families name alike, see config_json.read_config.
    norm:       of this eps. changes: of the Config, made of it.
    fixed:      the only values that a field may have, but for null, false and empty.
    fields:     what the family calls otherwise: {its name of a field: ours}.
    tied:       what tie_word_embeddings is where it is not said.
    renames:    from the names of published tensors to those that model.py declares: in turn, wherever found.
    ignored:    tensors that the language model does not use. drafts: nor those of one layer after the last.
    """

    model_type: str
    read: Callable[[Fields, int, Heads, Norm], Layers]
    around: str | None = None
    norm: Callable[[float], Norm] = Norm
    changes: Callable[[Config], dict] = lambda cfg: {}
    fixed: dict[str, tuple] = dataclasses.field(default_factory=lambda: dict(hidden_act=("silu",)))
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    tied: bool = False
    renames: tuple[tuple[re.Pattern, str], ...] = ()
    ignored: re.Pattern = re.compile(r"\.rotary_emb\.inv_freq$")
    drafts: bool = False

    def ignores(self, name: str, depth: int) -> bool:
        """Whether a model of so many layers does not use the tensor of this name."""
        return bool(self.ignored.search(name)) or self.drafts and name.startswith(f"model.layers.{depth}.")


def _read_dense(
    fields: Fields, depth: int, heads: Heads, masks: list | None = None, activation: str = "silu", **rope
) -> Layers:
    """Layers that differ in their masks at most, by default full ones. rope: see _read_rope."""
    mlp, rope = _read_gated(fields, activation=activation), _read_rope(fields, heads, **rope)
    return tuple(LayerKind(heads, mlp, mask, rope) for mask in masks or [Full()] * depth)


def _read_llama3(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    return _read_dense(fields, depth, heads)


def _read_llama4(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    take = fields.take
    every = take("no_rope_layer_interval", int, 4)
    # A 1 in no_rope_layers means that the layer does have RoPE.
    rotary = take("no_rope_layers", list, []) or [(i + 1) % every != 0 for i in range(depth)]
    if len(rotary) != depth:
        raise UserError(f"config.json: no_rope_layers do not describe {depth} layers")
    masks = ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary]
    masks = _read_kinds(fields, "layer_types", masks, "chunked_attention", "full_attention")
    moe_every = take("interleave_moe_layer_step", int, 1)
    moe = take("moe_layers", list, list(range(moe_every - 1, depth, moe_every)))
    chunk = take("attention_chunk_size", int, None)
    rope = _read_rope(fields, heads, 500000.0, interleaved=True)
    scale = QueryScale(take("attn_scale", NUMBER, 0.1), take("floor_scale", NUMBER, 8192))
    scale = scale if take("attn_temperature_tuning", (bool, int), True) else None
    qk_norm = dataclasses.replace(norm, weight=False) if take("use_qk_norm", bool, True) else None
    experts = _read_experts(fields, Router(), shared=1)
    dense = _read_gated(fields, "intermediate_size_mlp")
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


def _read_mistral(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    return _read_dense(fields, depth, heads, [_read_window(fields)] * depth)


def _read_mixtral(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    experts = _read_experts(fields, Router("softmax", normalized=True, scales="output"))
    return (LayerKind(heads, experts, _read_window(fields), _read_rope(fields, heads, 1e6)),) * depth


def _read_qwen2(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    return _read_dense(fields, depth, dataclasses.replace(heads, bias=True), _read_windows(fields, depth))


def _read_qwen3(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    return _read_dense(fields, depth, dataclasses.replace(heads, qk_norm=norm), _read_windows(fields, depth))


def _read_qwen3_moe(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    heads, rope = dataclasses.replace(heads, qk_norm=norm), _read_rope(fields, heads)
    router = Router("softmax", normalized=fields.take("norm_topk_prob", bool, False), scales="output")
    experts = _read_experts(fields, router, "moe_intermediate_size")
    dense, every = _read_gated(fields), fields.take("decoder_sparse_step", int, 1)
    without = fields.take("mlp_only_layers", list, [])
    masks = _read_windows(fields, depth)
    moe = [i not in without and (i + 1) % every == 0 for i in range(depth)]
    return tuple(LayerKind(heads, experts if moe[i] else dense, masks[i], rope) for i in range(depth))


def _read_gemma(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    return _read_dense(fields, depth, heads, activation="gelu_tanh")


def _read_gpt2(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    if not fields.take("scale_attn_weights", bool, True):
        raise UserError("config.json: scale_attn_weights = false is not supported")
    heads = dataclasses.replace(heads, bias=True, output_bias=True)
    mlp = Plain(fields.take("intermediate_size", int, 4 * heads.K * heads.H), "gelu_tanh")
    return (LayerKind(heads, mlp),) * depth


def _read_glm(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    heads = dataclasses.replace(heads, bias=fields.take("attention_bias", bool, False))
    return _read_dense(fields, depth, heads, interleaved=True, part=0.5)


def _read_glm4_moe_lite(fields: Fields, depth: int, heads: Heads, norm: Norm) -> Layers:
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    Q, L, N, R, U = (fields.take(name, int) for name in names)
    fields.take("qk_head_dim", int, None), fields.take("num_nextn_predict_layers", int, None)
    # The norms within attention do not follow rms_norm_eps.
    latent = Latent(heads.K * heads.G, Q, L, N, R, U, Norm(1e-6))
    interleaved = fields.take("rope_interleave", bool, True)
    rope = dataclasses.replace(_read_rope(fields, heads, interleaved=interleaved), width=R)
    factor = float(fields.take("routed_scaling_factor", NUMBER, 1.8))
    normalized = fields.take("norm_topk_prob", bool, True)
    router = Router("sigmoid", normalized, scales="output", bias=True, factor=factor)
    shared = fields.take("n_shared_experts", int, 1)
    experts = _read_experts(fields, router, "moe_intermediate_size", "n_routed_experts", shared)
    dense, first = _read_gated(fields), fields.take("first_k_dense_replace", int, 1)
    kinds = ["dense" if i < first else "sparse" for i in range(depth)]
    kinds = _read_kinds(fields, "mlp_layer_types", kinds, "dense", "sparse")
    return tuple(LayerKind(latent, experts if kind == "sparse" else dense, rope=rope) for kind in kinds)


def _read_gated(fields: Fields, width: str = "intermediate_size", activation: str = "silu") -> Gated:
    return Gated(fields.take(width, int), activation)


def _read_experts(
    fields: Fields, router: Router, width="intermediate_size", E="num_local_experts", shared: int = 0
) -> Experts:
    """shared: how many times as wide as one of them the MLP of all tokens is."""
    E, A, M = (fields.take(x, int) for x in (E, "num_experts_per_tok", width))
    if A > E:
        raise UserError(f"config.json: num_experts_per_tok = {A} of {E} experts")
    return Experts(E, A, M, router, shared=Gated(shared * M) if shared else None)


def _read_kinds(fields: Fields, name: str, default: list[str], *known: str) -> list[str]:
    """A field that says of each layer which of the known kinds it is. default: where it is not there."""
    kinds = fields.take(name, list, default)
    if len(kinds) != len(default) or not all(kind in known for kind in kinds):
        kinds = " or ".join(known)
        raise UserError(f"config.json: {name} do not describe {len(default)} layers, each {kinds}")
    return kinds


def _read_window(fields: Fields) -> Full | Window:
    """The mask of all layers."""
    size = fields.take("sliding_window", int, None)
    return Window(size) if size else Full()


def _read_windows(fields: Fields, depth: int) -> list[Full | Window]:
    """The masks of Qwen's layers: all full, but where use_sliding_window is set."""
    on, size = fields.take("use_sliding_window", bool, False), fields.take("sliding_window", int, None)
    full = fields.take("max_window_layers", int, depth)
    types = ["sliding_attention" if on and size and i >= full else "full_attention" for i in range(depth)]
    known = ("full_attention", "sliding_attention") if size else ("full_attention",)
    types = _read_kinds(fields, "layer_types", types, *known)
    return [Window(size) if kind == "sliding_attention" else Full() for kind in types]


def _read_rope(
    fields: Fields, heads: Heads, theta: float = 10000.0, interleaved: bool = False, part: float = 1
) -> Rope:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    theta, part: where neither says it; how much of a head's width is rotated.
    """
    theta = fields.take("rope_theta", NUMBER, theta)
    part = fields.take("partial_rotary_factor", NUMBER, part)
    scaling = fields.take("rope_scaling", dict, {})
    rope = Fields(fields.take("rope_parameters", dict, scaling))
    theta = rope.take("rope_theta", NUMBER, theta)
    part = rope.take("partial_rotary_factor", NUMBER, part)
    kind = rope.take("type", str, "default")  # the name before it was rope_type
    kind = rope.take("rope_type", str, kind)
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: rope_type {kind!r} is not supported (default, llama3)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = tuple(float(rope.take(name, NUMBER)) for name in names) if kind == "llama3" else None
    rope.finish({})
    return Rope(float(theta), numbers, interleaved, int(heads.H * part) if part != 1 else None)


def _renames(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern, str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


# transformers 5 joins the matrices of all experts; those of Llama 4 were published so, in another order.
EXPERTS = (
    (r"\.mlp\.gate\.weight$", ".mlp.router.weight"),
    (r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj.weight"),
)

FAMILIES = (
    Family("llama", _read_llama3),
    Family(
        "llama4_text",
        _read_llama4,
        around="llama4",
        renames=_renames(
            (r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model."),
            (r"^language_model\.(?=lm_head)", ""),
            (r"\.feed_forward\.", ".mlp."),
        ),
        ignored=re.compile(r"^(model\.)?(vision_model|multi_modal_projector)\.|\.rotary_emb\.inv_freq$"),
    ),
    Family("mistral", _read_mistral),
    Family(
        "mixtral",
        _read_mixtral,
        renames=_renames(
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"\.w1\.weight$", ".gate_proj.weight"),
            (r"\.w2\.weight$", ".down_proj.weight"),
            (r"\.w3\.weight$", ".up_proj.weight"),
            *EXPERTS,
        ),
    ),
    Family("qwen2", _read_qwen2),
    Family("qwen3", _read_qwen3),
    Family(
        "qwen3_moe",
        _read_qwen3_moe,
        fields=dict(num_experts="num_local_experts"),
        renames=_renames(*EXPERTS),
    ),
    Family(
        "gemma",
        _read_gemma,
        norm=lambda eps: Norm(eps, offset=1.0),
        changes=lambda cfg: dict(embedding_scale=cfg.D**0.5),
        # The first configs say "gelu" and mean its tanh form.
        fixed=dict(hidden_act=("gelu", "gelu_pytorch_tanh"), hidden_activation=("gelu_pytorch_tanh",)),
        tied=True,
    ),
    Family(
        "gpt2",
        _read_gpt2,
        norm=lambda eps: Norm(eps, centered=True),
        changes=lambda cfg: dict(P=cfg.max_positions),
        fixed=dict(activation_function=("gelu_new",)),
        fields=dict(
            n_embd="hidden_size",
            n_layer="num_hidden_layers",
            n_head="num_attention_heads",
            n_inner="intermediate_size",
            n_positions="max_position_embeddings",
            layer_norm_epsilon="rms_norm_eps",
        ),
        tied=True,
        renames=_renames(
            (r"^(transformer\.)?h\.(\d+)\.", r"model.layers.\2."),
            (r"^(transformer\.)?wte\.", "model.embed_tokens."),
            (r"^(transformer\.)?wpe\.", "model.embed_positions."),
            (r"^(transformer\.)?ln_f\.", "model.norm."),
            (r"\.ln_1\.", ".input_layernorm."),
            (r"\.ln_2\.", ".post_attention_layernorm."),
            (r"\.attn\.c_attn\.", ".self_attn.qkv."),
            (r"\.attn\.c_proj\.", ".self_attn.out."),
        ),
        ignored=re.compile(r"\.attn\.(masked_)?bias$"),
    ),
    Family("glm", _read_glm),
    Family(
        "glm4_moe_lite",
        _read_glm4_moe_lite,
        fixed=dict(
            hidden_act=("silu",),
            n_group=(1,),
            topk_group=(1,),
            topk_method=("noaux_tc",),
            scoring_func=("sigmoid",),
        ),  # fmt: skip
        renames=_renames(
            (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.router.bias"),
            (r"\.shared_experts\.", ".shared_expert."),
            *EXPERTS,
        ),
        drafts=True,
    ),
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
