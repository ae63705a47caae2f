"""Muse Spark: experts of half the model's width, and gates in the residual stream; else as Muse Glimmer.

Letter besides those of model.py: W width of the experts' inputs and outputs.

Source: transformers, models/muse_spark.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from families import read
from families.fields import NUMBER, ConfigFields
from families.gated_attention import GatedAttention
from families.muse_glimmer import MUSE_GLIMMER, config_of
from families.stored_layouts import ROUTER_NAME
from model import (
    AttentionWeights,
    Chunk,
    Config,
    MoE,
    MoEWeights,
    Norm,
    Normalization,
    Residual,
    Router,
    normalize,
)
from ops.grouped_matmul import expert_mlp
from sharding.arrays import ArrayInfo, declared, declared_norm, pytree
from sharding.collective_matmul import column_mean, einsum, own_columns, psum
from sharding.mesh import EXPERT, MODEL, TENSOR


@dataclasses.dataclass(frozen=True)
class NormedAttention(GatedAttention):
    """Gated attention whose heads' outputs are normalized, each by itself, before they meet the gate."""

    def head_outputs(self, o: Array, lse: Array, x: Array, w: AttentionWeights) -> Array:
        """o, lse, x, and the result: see `Attention.head_outputs`."""
        assert self.qk_norm is not None  # the same norm, without a weight
        return super().head_outputs(self.qk_norm(o, None), lse, x, w)


@dataclasses.dataclass(frozen=True)
class ScaledThenNormed:
    """A norm whose input is multiplied by 1 + weight, instead of its output."""

    eps: float

    def declare(self, info: ArrayInfo) -> ArrayInfo:
        """The declaration of the weight: info, one factor per column."""
        return info

    def __call__(self, x: Array, w: Array, mean: Callable[[Array], Array] = column_mean) -> Array:
        """x: [...,D] -> [...,D] in x's dtype. mean: over all D, also if a device has some of the columns."""
        scaled = (x.astype(jnp.float32) * (1 + w.astype(jnp.float32))).astype(x.dtype)
        return Norm(self.eps, weight=False)(scaled, None, mean)


@dataclasses.dataclass(frozen=True)
class GatedResidual(Residual):
    """alpha * x + beta * y, where each column has its own alpha and beta: both follow from one parameter.

    temperature: the parameter is divided by it.
    """

    temperature: float = 1

    def declare(self, info: ArrayInfo) -> dict[str, Any]:
        """The declared weights: the norm's, and the gate."""
        assert info.stored is not None  # as all weights are
        stored = dataclasses.replace(info.stored, name=info.stored.name.replace("layernorm.weight", "gate"))
        gate = dataclasses.replace(info, stored=stored, dtype=jnp.float32, initial=0.0)
        return dict(norm=super().declare(info), gate=gate)

    def __call__(self, x: Array, y: Array, w: dict[str, Any], chunk: Chunk) -> Array:
        """x, y: [b,T,D] -> [b,T,D]."""
        beta = jax.nn.sigmoid(w["gate"] / self.temperature)
        alpha = jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-w["gate"] / self.temperature) * (1 + beta), 1e-3))
        return (alpha * x + beta * normalize(y, self.norm, w["norm"])).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class DividedRouter(Router):
    """A router that the devices divide among them by rows d, and whose logits are multiplied by a number."""

    multiplier: float = 1

    def logits(self, x: Array, w: MoEWeights) -> Array:
        """x: [b,T,D] -> [b,T,E] float32."""
        product = jnp.einsum("bTd,dE->bTE", own_columns(x.astype(jnp.float32)), w.router, precision="highest")
        return self.multiplier * psum(product, MODEL)  # d


@pytree
class PooledMoEWeights(MoEWeights):
    router: Array = declared("dE", "", "router.weight", "ED", dtype=jnp.float32)
    gate: Array = declared("eWm", "W", "experts.gate_up_proj", "E[M+M]W", 0)
    up: Array = declared("eWm", "W", "experts.gate_up_proj", "E[M+M]W", 1)
    down: Array = declared("emW", "m", "experts.down_proj", "EWM")
    pool: Array = declared("wD", "D", "pre_expert_proj.weight", "WD")
    # At least int8, because 64 devices would divide the groups of int4.
    unpool: Array = declared("Dw", "w", "post_expert_proj.weight", "DW", min_bits=8)
    input_norm: Array = declared_norm("W", "pre_expert_norm.weight")
    output_norm: Array = declared_norm("W", "experts.post_expert_norm.weight")


@dataclasses.dataclass(frozen=True)
class PooledMoE(MoE):
    """Experts of W columns: a projection of the stream before them, and another of their sum after them.

    The router sees all D columns. input_norm: of the projected tokens. output_norm: of the output of each
    expert, before it is multiplied by its score. Of both projections each device has its own columns w.
    """

    W: int = 0
    input_norm: Normalization | None = None
    output_norm: Normalization | None = None

    def routed_experts(self, x: Array, w: MoEWeights, chunk: Chunk) -> Array:
        """Each token's A experts. x: [b,T,D] -> [b,T,D], this device's part of the sum over w.

        The outputs of a token's experts are divided by columns as they are summed over m: A times the bytes
        that the sum of them would have, for without all of m no output can be normalized.
        """
        assert isinstance(w, PooledMoEWeights) and self.input_norm and self.output_norm
        chosen, score = self.router(x, w, self.A)
        tokens = lax.all_gather(einsum("bTD,wD->bTw", x, w.pool), TENSOR + EXPERT, axis=2, tiled=True)
        padding = tokens.shape[2] - self.W  # where the devices do not divide W
        tokens = self.input_norm(tokens[..., : self.W], w.input_norm).reshape(-1, self.W)
        experts = self.local_experts(chosen, chunk).reshape(-1, self.A)
        arrays = tokens, experts, jnp.ones(experts.shape), w.gate, w.up, w.down, (None, None, None)
        outputs = expert_mlp(*arrays, self.activation, "output", summed=False)
        outputs = outputs.astype(x.dtype).reshape(self.A, *x.shape[:2], self.W)
        outputs = jnp.pad(outputs, [(0, 0)] * 3 + [(0, padding)])
        outputs = lax.psum_scatter(outputs, TENSOR, scatter_dimension=3, tiled=True)  # m
        weight = own_columns(jnp.pad(w.output_norm, (0, padding)), TENSOR)
        outputs = self.output_norm(outputs, weight, self.mean)
        y = jnp.einsum("AbTw,bTA->bTw", outputs, score).astype(x.dtype)
        y = lax.psum_scatter(y, EXPERT, scatter_dimension=2, tiled=True)  # e
        return einsum("bTw,Dw->bTD", y, w.unpool)

    def mean(self, x: Array) -> Array:
        """The mean over all W, of which this device has some columns: [...,w] -> [...,1]."""
        return lax.psum(jnp.sum(x, -1, keepdims=True), TENSOR) / self.W

    def declare(self, prefix: str, D: int, weights: type | None = PooledMoEWeights) -> Any:
        """The declared weights. prefix: precedes their names in a checkpoint."""
        return super().declare(prefix, D, weights)


def config(fields: ConfigFields) -> Config:
    depth, dense = read.depth(fields), read.mlp(fields)
    types = read.layer_types(fields, "mlp_layer_types", ["sparse"] * depth, "dense", "sparse")
    eps = float(fields.take("post_norm_eps", NUMBER))
    router = DividedRouter(
        "sigmoid", normalized=True, scales="output", bias=True,
        factor=fields.take("routed_scaling_factor", NUMBER),
        multiplier=fields.take("output_multiplier", NUMBER),
    )  # fmt: skip
    experts = read.moe(
        fields, router, "moe_intermediate_size", kind=PooledMoE, W=fields.take("moe_hidden_size", int),
        input_norm=read.norm(fields, offset=1.0), output_norm=ScaledThenNormed(eps),
    )  # fmt: skip
    temperature = float(fields.take("residual_gate_temperature", NUMBER))
    return config_of(
        fields,
        NormedAttention,
        [experts if x == "sparse" else dense for x in types],
        residual=GatedResidual(Norm(eps, weight=False), temperature),
        feed_forward_residual=GatedResidual(ScaledThenNormed(eps), temperature),
    )


DEFAULTS = dict(
    vocab_size=202048, hidden_size=8192, intermediate_size=16384, num_hidden_layers=62,
    num_attention_heads=128, num_key_value_heads=16, head_dim=64, sliding_window=2048,
    max_position_embeddings=1048576, rms_norm_eps=1e-5, post_norm_eps=1e-8, qk_scale_factor=5.4730064863875,
    output_multiplier=0.1767766952966369, final_logit_softcapping=20.0, moe_hidden_size=4096,
    moe_intermediate_size=4096, num_local_experts=256, num_experts_per_tok=8, routed_scaling_factor=1.0,
    residual_gate_temperature=0.3, rope_theta=5e5,
)  # fmt: skip
GATE_NAMES = (
    (r"\.post_attention_residual_gate\.gate$", ".post_self_attn_gate"),
    (r"\.post_feedforward_residual_gate\.gate$", ".post_mlp_gate"),
)
MUSE_SPARK = dataclasses.replace(
    MUSE_GLIMMER,
    model_type="muse_spark_text",
    config=config,
    multimodal_types=("muse_spark",),
    defaults=DEFAULTS,
    supported={"hidden_act": ("silu",)},
    no_effect=MUSE_GLIMMER.no_effect + " audio_config audio_token_id",
    tensor_names=(*GATE_NAMES, *MUSE_GLIMMER.tensor_names, ROUTER_NAME),
    unused_tensors=r"^model\.((vision|audio)_(tower|adapter|projection))\.|\.rotary_emb\.inv_freq$",
)
