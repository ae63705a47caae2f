"""What a layer computes on its way, for research."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from model import Chunk, LayerKind, LayerWeights, MoE, SoftmaxAttention, layer_infos, normalize
from sharding.arrays import specs
from sharding.mesh import HEADS, ROWS


def inside_layer(x: Array, w: LayerWeights, chunk: Chunk, *, kind: LayerKind, mesh: Mesh) -> dict[str, Array]:
    """The steps of a layer from its input x [B,T,D], without a cache. Raises ValueError if it shares_kv.

    q: [B,T,K,G,H] and k: [B,T,K,H] as they are compared, v: [B,T,K,H]. scores: [B,K,G,T,T] float32, before
    the softmax, -inf where the mask hides a key; a layer with a state has none of these. Of a mixture of
    experts also experts: [B,T,A] int32, and expert_scores: [B,T,A] float32, by which their inputs or outputs
    are multiplied.
    """
    if kind.shares_kv:
        raise ValueError("the layer attends to keys and values of another one, and has none to show")

    def on_device(x: Array, w: LayerWeights, chunk: Chunk) -> tuple[dict, dict, dict]:
        of_heads, scores, of_tokens = {}, {}, {}
        rotation = kind.rope.rotation(chunk.positions) if kind.rope else None
        y = normalize(x, kind.norm, w.attention_norm)
        if isinstance(attention := kind.attention, SoftmaxAttention):
            layout = attention.slot_layout
            q, kv = attention.project(y, w.attention, chunk, rotation)
            q, k, v = q[:, :, :, : attention.G], kv[..., : layout.key], kv[..., slice(*layout.value)]
            dots = jnp.einsum("bTkGH,bSkH->bkGTS", q, k, preferred_element_type=jnp.float32)
            key, query = chunk.positions[:, None], chunk.positions[..., None]
            visible = (kind.mask.first_visible(query) <= key) & (key <= query)
            scores["scores"] = jnp.where(visible[:, None, None], layout.scale * dots, -jnp.inf)
            of_heads = dict(q=q, k=k, v=v)
        if isinstance(moe := kind.feed_forward, MoE):
            y, *_ = kind.attention(y, w.attention, None, chunk, rotation, kind.mask)
            x = kind.residual(x, y, w.attention_post_norm, chunk)
            y = normalize(x, kind.feed_forward_norm or kind.norm, w.feed_forward_norm)
            experts, factors = moe.router(y, w.feed_forward, moe.A)
            of_tokens = dict(experts=experts, expert_scores=factors)
        return of_heads, scores, of_tokens

    in_specs = P(ROWS), specs(layer_infos(kind, x.shape[2]), w), P(ROWS)
    out_specs = P(ROWS, None, HEADS), P(ROWS, HEADS), P(ROWS)
    # Devices that share a head all gather it, which shard_map cannot know.
    on_devices = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    of_heads, scores, of_tokens = on_devices(x, w, chunk)
    return of_heads | scores | of_tokens
