"""The axes of a mesh, and which axes shard which letter.

Attention and experts divide the same devices in two ways, so the model is sharded over a 2x3 table of axes:

                               other heads     copies of a head   other slots of a head's cache
  other experts                expert_heads    expert_copies      expert_slots
  other slices of the same     tensor_heads    tensor_copies      tensor_slots

Heads are those of keys and values. The axes of copies and slots exceed 1 only if the number of devices does
not divide the heads. Then n devices share a head. By default each of them stores 1/n of its queries (g), its
key and value columns (h) and its cache slots (s), and nothing is stored twice. With 2 heads, for example, 2 x
4 devices (expert x tensor) become expert_heads 2 x tensor_slots 4.

All queries of a head must reach all slots of its cache, and partial results come back. With few heads and
many devices that takes longer than anything else. So a mesh may have c copies of each head. The n devices are
then c groups, and each group has all keys and values of the head and 1/c of its queries. Within a group of
n/c devices the columns and slots are divided as above.

The `data` axis replicates this table for other rows of the batch, the `stage` axis for other layers (see
stages.py).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

STAGE = "stage"
ROWS = ("stage", "data")
HEADS = ("expert_heads", "tensor_heads")
COPIES = ("expert_copies", "tensor_copies")
SLOTS = ("expert_slots", "tensor_slots")
EXPERT = ("expert_heads", "expert_copies", "expert_slots")
TENSOR = ("tensor_heads", "tensor_copies", "tensor_slots")
MODEL = EXPERT + TENSOR
SHARDED_BY: dict[str, str | tuple[str, ...]] = dict(b=ROWS, p=STAGE, k=HEADS, g=COPIES + SLOTS, s=SLOTS)
SHARDED_BY |= dict(h=SLOTS, z=HEADS + COPIES)
SHARDED_BY |= dict(l=SLOTS, r=SLOTS, e=EXPERT, m=TENSOR, f=MODEL, v=MODEL, d=MODEL, w=TENSOR + EXPERT)
SHARDED_BY |= dict(n=MODEL, q=MODEL)


def mesh_shape(
    cfg, data: int = 1, expert: int = 1, tensor: int = 1, stage: int = 1, copies: int = 1
) -> dict[str, int]:
    """The size of each mesh axis for these degrees of parallelism. ValueError if they do not suit cfg.

    copies: of each key/value head, see above.
    """
    depth = len(cfg.layers)
    if stage > 1 and cfg.layers != cfg.layers[: depth // stage] * stage:
        possible = (str(n) for n in range(1, depth + 1) if cfg.layers == cfg.layers[: depth // n] * n)
        alike = f"{stage} stages that are alike; possible: {', '.join(possible)}"
        raise ValueError(f"the model's {depth} layers do not make {alike}")
    if stage > 1 and cfg.layer_inputs:
        raise ValueError("the layers get inputs of the tokens, which only the first stage has: use one stage")
    if stage > 1 and cfg.D % (expert * tensor):
        raise ValueError(f"the {expert * tensor} devices of a stage do not divide the model's width {cfg.D}")
    heads = math.gcd(expert * tensor, *(kind.attention.K for kind in cfg.layers))
    sharing = expert * tensor // heads
    if sharing % copies or (copies > 1 and heads < max(kind.attention.K for kind in cfg.layers)):
        raise ValueError(f"{sharing} devices share a key/value head, and cannot have {copies} copies of it")
    slots = sharing // copies
    experts = cfg.moe.E if cfg.moe else 0
    if expert > 1 and (not experts or experts % expert):
        what = f"does not divide the model's {experts} experts" if experts else "is for models with experts"
        raise ValueError(f"expert parallelism {expert} {what}")
    widths = {width for kind in cfg.layers for width in kind.attention.sharded_widths if width % slots}
    if widths:
        raise ValueError(
            f"{slots} devices would share a key/value head, which does not divide its width {min(widths)}"
        )
    expert_heads = math.gcd(expert, heads)
    expert_copies = math.gcd(expert // expert_heads, copies)
    tensor_heads, tensor_copies = heads // expert_heads, copies // expert_copies
    of_experts = expert_heads, expert_copies, expert // (expert_heads * expert_copies)
    sizes = *of_experts, tensor_heads, tensor_copies, tensor // (tensor_heads * tensor_copies)
    return {"stage": stage, "data": data, **dict(zip(MODEL, sizes, strict=True))}


def make_mesh(
    cfg, data: int = 1, expert: int = 1, tensor: int = 1, devices=None, stage: int = 1, copies: int = 1
) -> Mesh:
    """A mesh of stage x data x expert x tensor devices, by default the first ones of jax.devices()."""
    shape = mesh_shape(cfg, data, expert, tensor, stage, copies)
    devices = devices or jax.devices()[: math.prod(shape.values())]
    sizes, slices = list(shape.values()), len({getattr(device, "slice_index", 0) for device in devices})
    # Neighbors in the mesh are neighbors on the interconnect, one dimension of which several axes may share.
    arrange = mesh_utils.create_device_mesh
    if slices > 1:  # their slow network joins stages, else data shards, and only else parts of the model
        between = []
        for i, size in enumerate(sizes):
            between.append(math.gcd(slices, size))
            slices, sizes[i] = slices // between[i], size // between[i]
        arrange = partial(mesh_utils.create_hybrid_device_mesh, dcn_mesh_shape=between)
    grid = arrange(sizes, devices=devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def mesh_size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    """The number of devices along the given axes."""
    return math.prod(mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes))


def degrees(mesh: Mesh) -> dict[str, int]:
    """The degrees of parallelism of a mesh, by name; `stage` and `copies` only if there are several."""
    axes: dict[str, str | tuple[str, ...]] = dict(data="data", expert=EXPERT, tensor=TENSOR)
    optional = dict(stage=mesh_size(mesh, STAGE), copies=mesh_size(mesh, COPIES))
    sizes = {name: mesh_size(mesh, axis) for name, axis in axes.items()}
    return sizes | {name: n for name, n in optional.items() if n > 1}


def vocabulary_shard(logits: Array) -> Array:
    """The token ids of this device's shard of the vocabulary: [v] int32."""
    return lax.axis_index(MODEL) * logits.shape[-1] + jnp.arange(logits.shape[-1])
