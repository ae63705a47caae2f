"""Multi-head latent attention (DeepSeek V2): the cache holds one latent per token for all heads.

Letters besides those of model.py: Q compressed query, L latent; in a head N key and query without rotation,
R key and query with it, U value.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from model import Chunk, Norm, Rotation, SoftmaxAttention, rotate
from ops.kv_cache import SlotLayout
from sharding.arrays import declared, declared_bias, declared_norm, infos_of, pytree, sizes_of
from sharding.collective_matmul import einsum, products
from sharding.slots import gather_shared_head


@pytree
class LatentAttentionWeights:
    q_a: Array = declared("QD", "D", "q_a_proj.weight", "QD")
    q_a_norm: Array = declared_norm("Q", "q_a_layernorm.weight")
    q_b: Array = declared("kgNQ", "Q", "q_b_proj.weight", "(KG[N+R])Q", 0)
    q_rope: Array = declared("kgRQ", "Q", "q_b_proj.weight", "(KG[N+R])Q", 1)
    kv_a: Array = declared("lD", "D", "kv_a_proj_with_mqa.weight", "[L+R]D", 0)
    k_rope: Array = declared("rD", "D", "kv_a_proj_with_mqa.weight", "[L+R]D", 1)
    kv_a_norm: Array = declared_norm("L", "kv_a_layernorm.weight")
    k_b: Array = declared("kgLN", "N", "kv_b_proj.weight", "(KG[N+U])L", 0, min_bits=8)
    v_b: Array = declared("kgUL", "L", "kv_b_proj.weight", "(KG[N+U])L", 1, min_bits=8)
    o: Array = declared("DkgU", "kgU", "o_proj.weight", "D(KGU)")
    o_bias: Array | None = declared_bias("D", "o_proj.bias", "D")


@dataclasses.dataclass(frozen=True)
class LatentAttention(SoftmaxAttention):
    """Multi-head latent attention, as G queries of one key/value head. Source: arXiv 2405.04434.

    A token's keys and values of all heads come from one latent of width L and a rotated key of width R that
    all heads share. A query of width N is multiplied by its head's part of the key matrix, and so compared
    with the latent itself; the sum of latents is multiplied by the value matrix. So the cache holds latents.
    norm: of the compressed query and of the latent. scale: the factor of q·k; None for (N+R)**-0.5.
    """

    G: int
    Q: int
    L: int
    N: int
    R: int
    U: int
    norm: Norm
    scale: float | None = None
    K = 1

    @property
    def slot_layout(self) -> SlotLayout:
        scale = (self.N + self.R) ** -0.5 if self.scale is None else self.scale
        return SlotLayout(self.L + self.R, (0, self.L), scale)

    @property
    def sharded_widths(self) -> tuple[int, ...]:
        """The widths that the devices divide among them, which all share the one key/value head."""
        return self.L, self.R

    def declare(self, prefix: str, D: int) -> LatentAttentionWeights:
        """The declared weights. prefix: of their names in a checkpoint."""
        sizes = dict(D=D, K=self.K) | sizes_of(self)
        return infos_of(LatentAttentionWeights, prefix, sizes, dict(o_bias=True))

    def project(
        self, x: Array, w: LatentAttentionWeights, chunk: Chunk, rotation: Rotation | None
    ) -> tuple[Array, Array]:
        """x: [b,T,D] -> queries [b,T,k,G,L+R], and each latent beside its rotated key [b,T,k,L+R]; k is 1.

        Every device holds all of q_a, which is small: so one all-gather is enough where there would be two.
        """
        matrices = ("bTD,QD->bTQ", w.q_a), ("bTD,lD->bTl", w.kv_a), ("bTD,rD->bTr", w.k_rope)
        compressed, latent, k_rope = products(x, *matrices)
        assert rotation is not None  # such a layer has RoPE
        compressed = self.norm(compressed, w.q_a_norm)
        q = einsum("bTkgN,kgLN->bTkgL", einsum("bTQ,kgNQ->bTkgN", compressed, w.q_b), w.k_b)
        q_rope = rotate(einsum("bTQ,kgRQ->bTkgR", compressed, w.q_rope), rotation)
        q = jnp.concatenate([q, q_rope], -1)
        *bTk, g, width = q.shape
        parts = q.reshape(*bTk, g * width), latent[:, :, None], k_rope[:, :, None]
        q, latent, k_rope = gather_shared_head(*parts)
        latent, k_rope = self.norm(latent, w.kv_a_norm), rotate(k_rope, rotation)
        return q.reshape(*bTk, -1, width), jnp.concatenate([latent, k_rope], -1)

    def head_outputs(self, o: Array, lse: Array, x: Array, w: LatentAttentionWeights) -> Array:
        """o: [b,T,k,g,L], each query's weighted sum of latents -> [b,T,k,g,U]. lse, x: as of `Attention`."""
        return einsum("bTkgL,kgUL->bTkgU", o, w.v_b)
