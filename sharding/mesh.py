"""Which devices hold what: the axes of a mesh, and the letters that they split.

Attention and experts divide the same devices in two ways, so a model mesh is a 2x2 table of axes:

                               other key/value heads    other slots of the same heads' cache
  other experts                expert_heads             expert_slots
  other slices of the same      tensor_heads             tensor_slots

The slot axes exceed 1 only where the devices do not divide the key/value heads. There n devices share one:
each stores 1/n of its queries (g), its key and value columns (h) and its cache slots (s), nothing twice.
With 2 heads, for example, 2 x 4 devices (expert x tensor) are expert_heads 2 x tensor_slots 4.
"""

import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

HEADS = ("expert_heads", "tensor_heads")
SLOTS = ("expert_slots", "tensor_slots")
EXPERT = ("expert_heads", "expert_slots")
TENSOR = ("tensor_heads", "tensor_slots")
MODEL = ("expert_heads", "expert_slots", "tensor_heads", "tensor_slots")
SHARDED_BY = dict(b="data", k=HEADS, g=SLOTS, s=SLOTS, e=EXPERT, m=TENSOR, f=MODEL, v=MODEL)
SHARDED_BY |= dict(h=SLOTS, l=SLOTS, r=SLOTS)


def mesh_shape(cfg, data: int = 1, expert: int = 1, tensor: int = 1) -> dict[str, int]:
    """The size of each mesh axis for these degrees of parallelism. Raises ValueError if cfg forbids them."""
    heads = math.gcd(cfg.heads.K, expert * tensor)
    slots = expert * tensor // heads
    experts = cfg.experts.E if cfg.experts else 0
    if expert > 1 and (not experts or experts % expert):
        raise ValueError(f"expert parallelism {expert} does not divide the model's {experts} experts")
    if any(width % slots for width in cfg.heads.divided):
        width = next(width for width in cfg.heads.divided if width % slots)
        raise ValueError(
            f"{slots} devices would share a key/value head, which does not divide its width {width}"
        )
    expert_heads = math.gcd(expert, heads)
    tensor_heads = heads // expert_heads
    sizes = (expert_heads, expert // expert_heads, tensor_heads, tensor // tensor_heads)
    return {"data": data, **dict(zip(MODEL, sizes, strict=True))}


def make_mesh(cfg, data: int = 1, expert: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """The mesh of data x expert x tensor devices, by default the first there are."""
    shape = mesh_shape(cfg, data, expert, tensor)
    devices = devices or jax.devices()[: data * expert * tensor]
    # Neighbours on the interconnect where they can be; several axes may have to divide one of its dimensions.
    grid = mesh_utils.create_device_mesh(tuple(shape.values()), devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def mesh_size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    """The number of devices along the given axes."""
    return math.prod(mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes))
