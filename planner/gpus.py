"""GPUs as XLA's compiler has to know them, so that it compiles for GPUs that need not be here."""

import dataclasses

from deployment.chips import BANDWIDTH, Chip, Gpu

# What a kernel takes beside its bytes, the pause before it included, and the share of the data sheet's
# bandwidth that a copy reaches. From the H100 of docs/gpu.md, "Measured". With both, the estimates of three
# of its four decode steps are within 3% of what they took.
KERNEL_SECONDS, COPY_SHARE = 3.3e-6, 0.9


def with_losses(chip: Chip) -> tuple[Chip, float]:
    """A GPU as programs have found it: its bandwidth, and what each kernel takes beside its bytes."""
    return dataclasses.replace(chip, bandwidth=COPY_SHARE * chip.bandwidth), KERNEL_SECONDS


def target_config(gpu: Gpu) -> str:
    """XLA's description of the GPU, the text of a GpuTargetConfigProto.

    The limits that are equal here for all GPUs are those of CUDA. Since capability 9.0 some instructions are
    of one architecture alone (sm_90a); the compiler uses them only if it is told that it may.
    """
    (major, minor), features = gpu.capability, "ACCELERATED_FEATURES" if gpu.capability >= (9, 0) else "NONE"
    return f"""
platform_name: "CUDA"
device_description_str: "{gpu.name}"
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {BANDWIDTH[gpu.name]:.0f}
  l2_cache_size: {gpu.l2}
  core_count: {gpu.processors}
  fpus_per_core: {gpu.lanes}
  clock_rate_ghz: {gpu.clock}
  shared_memory_per_core: {gpu.shared_memory}
  shared_memory_per_block_optin: {gpu.shared_memory - 1024}
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
"""
