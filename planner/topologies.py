"""Topologies of TPUs and GPUs that need not be here, as their compilers know them."""

import importlib.util
import os
import re

from jax.experimental import topologies

from deployment.chips import CHIPS, GPUS, Topology
from feedback.errors import UserError
from planner.gpus import target_config

WITHOUT_TPUS = {  # for libtpu, which reads it once, when the process loads it
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks a cloud host's metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else two processes cannot compile at once
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def find_topology(name: str, slices: int = 1) -> Topology:
    """The topology with a name like v5e:4x4 or h100:8. Raises UserError if there is none, or no compiler."""
    kind, _, shape = name.partition(":")
    return find_gpus(name, kind, shape, slices) if kind in GPUS else find_tpus(name, kind, shape, slices)


def find_tpus(name: str, kind: str, shape: str, slices: int) -> Topology:
    dimensions = 2 if kind in ("v5e", "v6e") else 3
    if kind not in CHIPS or not re.fullmatch("x".join([r"[1-9]\d{0,2}"] * dimensions), shape):
        forms = "v5e:4x4, v6e:4x4, v5p:2x2x1, tpu7x:2x2x1 or h100:8"
        raise UserError(f"--topology {name}: not of the form {forms}")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu, the TPU compiler, is not installed: pip install -e '.[tpu]' (Linux on x86)")
    sizes = tuple(int(n) for n in shape.split("x"))
    if dimensions == 2 and max(sizes) > 16:
        raise UserError(f"--topology {name}: a {kind} slice has at most 16 chips along an axis")
    host = [2 if n % 2 == 0 else 1 for n in sizes[:2]] + [1]  # the most chips that a host may have
    options = dict(chips_per_host_bounds=host) | (dict(num_slices=slices) if slices > 1 else {})
    os.environ |= WITHOUT_TPUS
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except (RuntimeError, ValueError) as e:
        raise UserError(f"--topology {name}: the TPU compiler refuses it ({e})") from None
    title = f"{slices} slices of {name}" if slices > 1 else name
    return Topology(title, CHIPS[kind], sizes, tuple(found.devices), slices)


def find_gpus(name: str, kind: str, count: str, slices: int) -> Topology:
    """The GPUs of one node, described to the compiler, since none of them need be here."""
    if not re.fullmatch("[1-8]", count) or slices > 1:
        raise UserError(f"--topology {name}: only one node of 1 to 8 GPUs can be planned, {kind}:8")
    try:
        shape = f"1x1x{count}"  # nodes that NVLink joins, hosts, GPUs
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(GPUS[kind]), topology=shape
        )
    except NotImplementedError:
        plugin = "jax's CUDA plugin, the GPU compiler, is not installed"
        raise UserError(f"{plugin}: pip install -e '.[cuda-compiler]' (Linux)") from None
    except (RuntimeError, ValueError) as e:
        raise UserError(f"--topology {name}: the GPU compiler refuses it ({e})") from None
    return Topology(name, CHIPS[kind], (), tuple(found.devices))
