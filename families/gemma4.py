"""Gemma 4: heads of two widths, normalized values, scores without a scale, and a factor after each layer.

In E2B and E4B the last layers attend to the keys and values of earlier ones, and each layer has an embedding
of the tokens of its own. Letters besides those of model.py: L layers, P columns of a layer's embedding.

Source: transformers, models/gemma4 and models/gemma4_unified.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from families import read
from families.family import LANGUAGE_MODEL_NAMES, Family
from families.fields import NUMBER, ConfigFields
from families.gemma import GeGLU
from families.gemma3 import NAMES, SUPPORTED
from families.stored_layouts import SINGLE_OR_JOINED_EXPERTS
from feedback.errors import UserError
from model import (
    MLP,
    Attention,
    AttentionWeights,
    Chunk,
    Config,
    FeedForward,
    LayerKind,
    MoE,
    MoEWeights,
    Norm,
    Residual,
    Rope,
    Rotation,
    Router,
    look_up,
    rotate,
)
from sharding.arrays import ArrayInfo, Stored, declared, declared_norm, infos_of, pytree, sizes_of
from sharding.collective_matmul import column_mean, einsum, own_columns, products
from sharding.mesh import MODEL
from sharding.slots import whole_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueNormAttention(Attention):
    """Attention with a norm of each query, key and value, of which the values' has no weight.

    keys_are_values: a value is what the key is before its norm and RoPE, and has no matrix of its own.
    """

    qk_norm: Norm
    keys_are_values: bool

    def declare(self, prefix: str, D: int, weights: type | None = None) -> Any:
        infos = super().declare(prefix, D, weights)
        return dataclasses.replace(infos, v=None) if self.keys_are_values else infos

    def projections(self, x: Array, w: AttentionWeights) -> tuple[Array, Array, Array]:
        """x, and the result: see `Attention.projections`."""
        if not self.keys_are_values:
            return super().projections(x, w)
        q, k = products(x, ("bTD,kgHD->bTkgH", w.q), ("bTD,khD->bTkh", w.k))
        return q, k, k

    def project(
        self, x: Array, w: AttentionWeights, chunk: Chunk, rotation: Rotation | None
    ) -> tuple[Array, Array]:
        """x: [b,T,D] -> queries [b,T,k,G,H], and each key beside its value [b,T,k,2H]."""
        q, keys_values = super().project(x, w, chunk, rotation)
        k, v = jnp.split(keys_values, 2, -1)
        return q, jnp.concatenate([k, dataclasses.replace(self.qk_norm, weight=False)(v, None)], -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryAttention(ValueNormAttention):
    """The attention of a layer that has queries alone. Keys and values are those of an earlier layer."""

    def declare(self, prefix: str, D: int, weights: type | None = None) -> Any:
        return dataclasses.replace(super().declare(prefix, D, weights), k=None, v=None, k_norm=None)

    def project(
        self, x: Array, w: AttentionWeights, chunk: Chunk, rotation: Rotation | None
    ) -> tuple[Array, Any]:
        """x: [b,T,D] -> queries [b,T,k,G,H], and None."""
        assert rotation
        (q,) = whole_heads(*products(x, ("bTD,kgHD->bTkgH", w.q)))
        return rotate(self.qk_norm(q, w.q_norm), rotation), None


@pytree
class ScaledResidualWeights:
    norm: Any = declared_norm("D", "post_mlp_layernorm.weight")
    factor: Array = declared_norm("I", "layer_scalar")  # I = 1


@dataclasses.dataclass(frozen=True)
class ScaledResidual(Residual):
    """A residual after which the whole stream is multiplied by a learned factor."""

    weights: ClassVar[type] = ScaledResidualWeights

    def __call__(self, x: Array, y: Array, w: ScaledResidualWeights, chunk: Chunk) -> Array:
        """x, y: [b,T,D] -> [b,T,D]."""
        return super().__call__(x, y, w.norm, chunk) * w.factor

    def declare(self, info: ArrayInfo) -> ScaledResidualWeights:
        """The declared weights: those of the norm, the factor, and a subclass's own."""
        assert info.stored is not None and info.stored.name.endswith("post_mlp_layernorm.weight")
        prefix = info.stored.name.removesuffix("post_mlp_layernorm.weight")
        return infos_of(self.weights, prefix, dict(D=info.shape[0], I=1) | sizes_of(self))


@pytree
class InputResidualWeights(ScaledResidualWeights):
    gate: Array = declared("PD", "D", "per_layer_input_gate.weight", "PD")
    projection: Array = declared("DP", "P", "per_layer_projection.weight", "DP")
    input_norm: Any = declared_norm("D", "post_per_layer_input_norm.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputResidual(ScaledResidual):
    """A residual, and after it a second one: of the layer's own embedding of the tokens, gated by the stream.

    Its output, too, is normalized before it is added. Every device has both matrices whole, because another
    sum over devices in each layer would take longer than to read them.
    """

    weights: ClassVar[type] = InputResidualWeights
    P: int

    def __call__(self, x: Array, y: Array, w: ScaledResidualWeights, chunk: Chunk) -> Array:
        """x, y: [b,T,D] -> [b,T,D]."""
        assert isinstance(w, InputResidualWeights) and self.norm
        x = x + self.norm(y, w.norm)
        gated = GeGLU()(einsum("bTD,PD->bTP", x, w.gate), chunk.inputs)
        return (x + self.norm(einsum("bTP,DP->bTD", gated, w.projection), w.input_norm)) * w.factor


@pytree
class TokenInputsWeights:
    table: Array = declared("vN", "N", "model.embed_tokens_per_layer.weight", "VN", min_bits=8)
    projection: Array = declared("Nd", "d", "model.per_layer_model_projection.weight", "ND", min_bits=8)
    norm: Any = declared_norm("P", "model.per_layer_projection_norm.weight")


@dataclasses.dataclass(frozen=True)
class TokenInputs:
    """The embeddings of the tokens for L layers: rows of a table, to which a projection of x is added.

    N = L·P: all layers' columns. Each device multiplies its columns d of x, so that one sum over devices
    makes both addends whole.
    """

    L: int
    P: int
    norm: Norm

    def __call__(self, x: Array, tokens: Array, w: TokenInputsWeights) -> list[Array]:
        """x: [b,T,D], the model's embedding of the tokens [b,T] int32 -> [b,T,P] for each layer."""
        parts = look_up(w.table, tokens), einsum("bTd,Nd->bTN", own_columns(x), w.projection)
        of_layers = (*tokens.shape, self.L, self.P)
        own, projected = (y.astype(x.dtype).reshape(of_layers) for y in lax.psum(parts, MODEL))  # v, d
        projected = self.norm(projected * x.shape[-1] ** -0.5, w.norm)
        inputs = (projected + own * jnp.asarray(self.P**0.5, x.dtype)) * 2**-0.5
        return [inputs[:, :, i] for i in range(self.L)]

    def declare(self, D: int, V: int) -> TokenInputsWeights:
        return infos_of(TokenInputsWeights, "", dict(D=D, V=V, N=self.L * self.P, P=self.P))


@dataclasses.dataclass(frozen=True)
class Unnormed:
    """In the place of a norm: the feed-forward network of a mixture normalizes its input itself."""

    def declare(self, info: ArrayInfo) -> None:
        return None

    def __call__(self, x: Array, w: None, mean: Callable[[Array], Array] = column_mean) -> Array:
        """x: [...,D] -> x."""
        return x


@dataclasses.dataclass(frozen=True)
class NormedRouter(Router):
    """A router of the normalized stream, times a factor per column. Each expert's score has a factor, too."""

    norm: Norm = Norm(1e-6, weight=False)

    def __call__(self, x: Array, w: MoEWeights, A: int) -> tuple[Array, Array]:
        """x, and the result: see `Router`."""
        assert isinstance(w, MixtureWeights)
        chosen, score = super().__call__(self.norm(x, None) * w.router_scale * x.shape[-1] ** -0.5, w, A)
        return chosen, score * w.expert_scale.astype(jnp.float32)[chosen]


@pytree
class MixtureWeights(MoEWeights):
    router_scale: Array = declared_norm("D", "router.scale")
    expert_scale: Array = declared_norm("E", "router.per_expert_scale")
    shared_norm: Any = declared_norm("D", "pre_feedforward_layernorm.weight")
    shared_post_norm: Any = declared_norm("D", "post_feedforward_layernorm_1.weight")
    routed_norm: Any = declared_norm("D", "pre_feedforward_layernorm_2.weight")
    routed_post_norm: Any = declared_norm("D", "post_feedforward_layernorm_2.weight")


@dataclasses.dataclass(frozen=True)
class Mixture(MoE):
    """Experts beside an MLP for all tokens, each with norms of its own before and after; the two are added.

    norm: all four. The router sees the stream before any of them.
    """

    norm: Norm = Norm(1e-6, offset=0.0)

    def declare(self, prefix: str, D: int, weights: type | None = MixtureWeights) -> Any:
        """The declared weights. prefix: precedes their names in a checkpoint."""
        return super().declare(prefix, D, weights)

    def __call__(self, x: Array, w: MoEWeights, chunk: Chunk) -> Array:
        """x: [b,T,D], the stream -> [b,T,D]. One sum over devices for both."""
        assert isinstance(w, MixtureWeights) and self.shared
        shared = self.shared.partial_sum(self.norm(x, w.shared_norm), w.shared)
        chosen = self.router(x, w, self.A)
        routed = self.chosen_experts(self.norm(x, w.routed_norm), *chosen, w, chunk)
        shared, routed = lax.psum((shared, routed), MODEL)  # f of the one, e and m of the other
        return self.norm(shared, w.shared_post_norm) + self.norm(routed, w.routed_post_norm)


def config(fields: ConfigFields) -> Config:
    depth, norm, masks = read.depth(fields), read.norm(fields, offset=0.0), read.masks(fields)
    types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(depth)]
    types = read.layer_types(fields, "layer_types", types, *masks)
    types = [*types[:-1], "full_attention"]  # whatever the file says of the last layer
    heads = attention_of(fields, types, norm)
    ropes, positions = ConfigFields(fields.take("rope_parameters", dict, ROPES)), "max_position_embeddings"
    mlp = read.mlp(fields, activation=GeGLU())
    network, inputs = network_of(fields, mlp, norm), inputs_of(fields, depth, norm)
    before = Unnormed() if isinstance(network, Mixture) else norm
    after = InputResidual(norm, P=inputs.P) if inputs else ScaledResidual(norm)
    kinds = {}
    for x in dict.fromkeys(types):
        rope = rope_of(ropes.take(x, dict), heads[x].H, fields.take(positions, int))
        kinds[x] = LayerKind(heads[x], network, norm, masks[x], rope, Residual(norm), before, after)
    for x in masks:  # a type that no layer has
        ropes.get(x)
    ropes.finish({})
    scale, cap = fields.take("hidden_size", int) ** 0.5, fields.take("final_logit_softcapping", NUMBER, None)
    wide = dataclasses.replace(mlp, F=mlp.F * (2 if fields.take("use_double_wide_mlp", bool, False) else 1))
    layers = with_shared_kv(fields, [kinds[x] for x in types], network_of(fields, wide, norm))
    others = dict(embedding_scale=scale, layer_inputs=inputs, logit_softcap=cap)
    return read.config(fields, layers, norm, tied=True, **others)


def network_of(fields: ConfigFields, mlp: MLP, norm: Norm) -> FeedForward:
    """The MLP, beside experts if config.json says so."""
    if not fields.take("enable_moe_block", bool, False):
        return mlp
    router = NormedRouter("softmax", normalized=True, scales="output", norm=Norm(norm.eps, weight=False))
    experts = read.moe(
        fields, router, "moe_intermediate_size", kind=Mixture, activation=GeGLU(), norm=norm
    )  # fmt: skip
    return dataclasses.replace(experts, shared=mlp)


def inputs_of(fields: ConfigFields, depth: int, norm: Norm) -> TokenInputs | None:
    """What the layers get beside the stream. Raises UserError if its table is not of the vocabulary."""
    P, V = fields.take("hidden_size_per_layer_input", int, zero=True), fields.take("vocab_size", int)
    rows = fields.take("vocab_size_per_layer_input", int, V, zero=True)
    if P and rows != V:
        raise UserError(f"config.json: vocab_size_per_layer_input = {rows} is not vocab_size = {V}")
    return TokenInputs(depth, P, norm) if P else None


def with_shared_kv(
    fields: ConfigFields, layers: list[LayerKind], network: FeedForward
) -> tuple[LayerKind, ...]:
    """The layers, of which the last ones attend to keys and values of earlier ones, if config.json says so.

    network: of these last layers. Raises UserError if no earlier layer is of the same type.
    """
    n = fields.take("num_kv_shared_layers", int, 0, zero=True)
    own, shared = layers[: max(len(layers) - n, 0)], []
    for kind in layers[len(own) :]:
        if kind not in own:
            raise UserError(f"config.json: num_kv_shared_layers = {n} leaves a type of layers without keys")
        attention = QueryAttention(**vars(kind.attention))
        shared.append(dataclasses.replace(kind, attention=attention, feed_forward=network, shares_kv=True))
    return *own, *shared


def attention_of(fields: ConfigFields, types: list[str], norm: Norm) -> dict[str, Attention]:
    """The attention of each type of layers.

    Their sizes are in fields of their own, or as transformers saves them, in `per_layer_config`: {number of a
    layer: {field: value}}. Raises UserError if layers of a type differ there.
    """
    shared = fields.take("attention_k_eq_v", bool, False)
    full = dict(head_dim=fields.take("global_head_dim", int, 512))
    if (K := fields.take("num_global_key_value_heads", int, None)) and shared:
        full |= dict(num_key_value_heads=K)
    saved: dict = fields.take("per_layer_config", dict, None)
    changes = {"sliding_attention": {}, "full_attention": full}
    if saved is not None:
        by_layer = {int(i) if str(i).isdigit() else i: change for i, change in saved.items()}  # "05" is 5
        changes = {x: by_layer.get(types.index(x), {}) if x in types else {} for x in changes}
        expected = {i: changes[x] for i, x in enumerate(types) if changes[x]}
        differ = {i: change for i, change in by_layer.items() if change} != expected
        if differ or not all(isinstance(change, dict) for change in changes.values()):
            raise UserError("config.json: per_layer_config must say the same of all layers of a type")
    every = {}
    for x, change in changes.items():
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        own = ConfigFields({name: fields.get(name) for name in sizes} | change)
        kind = dict(qk_norm=norm, scale=1.0, keys_are_values=shared and x == "full_attention")
        every[x] = read.attention(own, ValueNormAttention, **kind)
        own.finish({})
    return every


def rope_of(parameters: dict, H: int, positions: int) -> Rope:
    """Raises UserError for RoPE of a part of a head that is not `proportional`: transformers rotates all."""
    if "partial_rotary_factor" in parameters and parameters.get("rope_type") != "proportional":
        factor = parameters["partial_rotary_factor"]
        raise UserError(f"config.json: partial_rotary_factor = {factor} needs rope_type 'proportional'")
    return read.rope_of(parameters, H, positions)


ROPES = dict(
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
    full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
)
DEFAULTS = dict(
    vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, sliding_window=512, max_position_embeddings=131072,
    rms_norm_eps=1e-6,
)  # fmt: skip
# Checkpoints have the experts of a mixture, their router and their norms beside the MLP, not in it. The MLP,
# and the norm before it, have the names that they have in layers without experts.
MIXTURE_NAMES = (
    (r"\.router\.proj\.", ".mlp.router."),
    (r"\.router\.(?=scale$|per_expert_scale$)", ".mlp.router."),
    (r"\.experts\.", ".mlp.experts."),
    (r"\.(?=(pre|post)_feedforward_layernorm_[12]\.)", ".mlp."),
)
MIXTURE_LAYOUTS = {
    "feed_forward.shared.gate": (Stored("mlp.gate_proj.weight", "FD"),),
    "feed_forward.shared.up": (Stored("mlp.up_proj.weight", "FD"),),
    "feed_forward.shared.down": (Stored("mlp.down_proj.weight", "DF"),),
    "feed_forward.shared_norm": (Stored("post_attention_layernorm.weight", "D"),),
}
TOWERS = r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\."
GEMMA4 = Family(
    "gemma4_text",
    config,
    ("gemma4",),
    defaults=DEFAULTS | dict(hidden_size_per_layer_input=256),
    supported=SUPPORTED | dict(use_bidirectional_attention=("vision",)),
    no_effect="audio_config audio_token_id boa_token_id eoa_token_id eoa_token_index video_token_id",
    field_names={"num_experts": "num_local_experts", "top_k_experts": "num_experts_per_tok"},
    tensor_names=(*LANGUAGE_MODEL_NAMES, *NAMES, *MIXTURE_NAMES),
    layouts={**SINGLE_OR_JOINED_EXPERTS, **MIXTURE_LAYOUTS},
    unused_tensors=TOWERS + r"|\.rotary_emb\.",
)
GEMMA4_UNIFIED = dataclasses.replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    multimodal_types=("gemma4_unified",),
    defaults=DEFAULTS
    | dict(hidden_size_per_layer_input=0, sliding_window=1024, max_position_embeddings=262144),
)
