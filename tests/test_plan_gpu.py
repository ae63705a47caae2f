"""Plans for GPUs: a program for a GPU, counted by hand, and what is said without a compiler.

The compiler (jax's CUDA plugin) needs no GPU. It is not in the tests' environment; the last test uses it.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import invoke
from jax.experimental import topologies

from deployment.chips import CHIPS, Topology
from deployment.estimates import START_SECONDS, STEP_SECONDS, collective_seconds
from deployment.job import Job
from deployment.placement import rank_meshes
from planner import command
from planner.published_models import read_model
from planner.schedule import Schedule, read_schedule
from planner.traffic import Reader, read_program

ROOT = pathlib.Path(__file__).resolve().parent.parent
H100 = CHIPS["h100"]

# One layer of a decode step for H100, from the compiler, with small sizes and without what is not read here.
STEP = """
HloModule jit_DecodeStep, is_scheduled=true, num_partitions=8

%dot_computation (p.0: bf16[8,128], p.1: s8[128,512]) -> f32[2,8,512] {
  %p.1 = s8[128,512]{1,0} parameter(1)
  %convert = bf16[128,512]{1,0} convert(%p.1)
  %p.0 = bf16[8,128]{1,0} parameter(0)
  %dot.1 = f32[512,8]{0,1} dot(%convert, %p.0), lhs_contracting_dims={0}, rhs_contracting_dims={1}
  ROOT %parts = f32[2,8,512]{2,1,0} bitcast(%dot.1)
}

%sum_computation (q.0: f32[2,8,512]) -> bf16[8,512] {
  %q.0 = f32[2,8,512]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %reduce.1 = f32[8,512]{1,0} reduce(%q.0, %zero), dimensions={0}, to_apply=%add
  ROOT %convert.1 = bf16[8,512]{1,0} convert(%reduce.1)
}

%write_computation (r.0: s8[8,1024,256], r.1: s32[8], r.2: bf16[8,256]) -> s8[8,1024,256] {
  %r.0 = s8[8,1024,256]{2,1,0} parameter(0)
  %r.1 = s32[8]{0} parameter(1)
  %r.2 = bf16[8,256]{1,0} parameter(2)
  %rounded = s8[8,1,256]{2,1,0} convert(%r.2)
  ROOT %scatter.1 = s8[8,1024,256]{2,1,0} scatter(%r.0, %r.1, %rounded), to_apply=%assign
}

ENTRY %main (x: bf16[8,128], w: s8[128,512], kv: s8[8,1024,256], at: s32[8]) -> bf16[8,512] {
  %x = bf16[8,128]{1,0} parameter(0), metadata={op_name="x"}
  %w = s8[128,512]{1,0} parameter(1), metadata={op_name="weights.w"}
  %kv = s8[8,1024,256]{2,1,0} parameter(2), metadata={op_name="batch.cache.layers[0].values"}
  %at = s32[8]{0} parameter(3), metadata={op_name="at"}
  %gemm_fusion_dot.1 = f32[2,8,512]{2,1,0} fusion(%x, %w), kind=kCustom, calls=%dot_computation, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %loop_reduce_fusion = bf16[8,512]{1,0} fusion(%gemm_fusion_dot.1), kind=kLoop, calls=%sum_computation
  %new = bf16[8,256]{1,0} slice(%loop_reduce_fusion), slice={[0:8], [0:256]}
  %input_scatter_fusion = s8[8,1024,256]{2,1,0} fusion(%kv, %at, %new), kind=kInput, calls=%write_computation
  %pallas_call.6 = (f32[4,8,16,128]{3,2,1,0}, f32[4,8,16]{2,1,0}) custom-call(%loop_reduce_fusion, %input_scatter_fusion, %at), custom_call_target="__gpu$xla.gpu.triton", api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(DecodeStep)/attention/flash/pallas_call"}, backend_config={debug = false, grid_x = 1 : i32, ir = "ML\\EFR\\01name\\00", name = "flash", num_stages = 2 : i32, num_warps = 4 : i32}
  %all-reduce-start = bf16[8,512]{1,0} all-reduce-start(%loop_reduce_fusion), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true,"kernel_strategy":"KERNEL_STRATEGY_TRITON_ONE_SHOT"}}
  ROOT %all-reduce-done = bf16[8,512]{1,0} all-reduce-done(%all-reduce-start), backend_config={"collective_backend_config":{"is_sync":false}}
}
"""  # noqa: E501
X, W, PARTS, Y, NEW, KV = 2 * 8 * 128, 128 * 512, 4 * 2 * 8 * 512, 2 * 8 * 512, 2 * 8 * 256, 8 * 1024 * 256
FLASH = 4 * 4 * 8 * 16 * (128 + 1)  # what it writes


def test_kernels_of_a_gpu():
    """A product in parts, their sum, a write in place, attention by our kernel: each array counts once."""
    program = read_program(STEP, kernel_share=lambda kernel, argument: {"flash": 0.25}[kernel])
    moved = {}
    for x in program.traffic:
        moved[x.instruction] = moved.get(x.instruction, 0) + x.bytes
    assert moved == {
        "gemm_fusion_dot.1": X + W + PARTS,
        "loop_reduce_fusion": PARTS + Y,
        "new": 2 * NEW,
        "input_scatter_fusion": 4 * 8 + NEW + 8 * 256,
        "pallas_call.6": (Y + 4 * 8 + KV) / 4 + FLASH,
        "all-reduce-start": 2 * Y,
    }
    assert sum(x.bytes for x in program.traffic if "cache" in x.argument) == KV / 4 + 8 * 256
    assert not program.copies
    (collective,) = program.collectives
    assert (collective.kind, collective.bytes, collective.group) == ("all-reduce", Y, 8)
    assert not collective.asynchronous  # it is started and done in one place


def test_operations_of_a_product_of_integers():
    """A function of two products has one result; both are counted, 8-bit integers by half."""
    text = """
ENTRY %main (x: bf16[8,1,128], r: s8[32,2,128], a: s8[512,128], s: bf16[512]) -> bf16[1,8,512] {
  %x = bf16[8,1,128]{2,1,0} parameter(0)
  %r = s8[32,2,128]{2,1,0} parameter(1)
  %a = s8[512,128]{1,0} parameter(2)
  %s = bf16[512]{0} parameter(3)
  %pallas_call.1 = f32[1,32,512]{2,1,0} custom-call(%r, %a, %a, %s, %s), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "joined_dot"}
  ROOT %pallas_call.2 = bf16[1,8,512]{2,1,0} custom-call(%x, %a, %a, %s, %s), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "joined_dot"}
}
"""  # noqa: E501
    chip = dataclasses.replace(H100, bandwidth=1e15, flops=1.0, vector=1e15)
    found = read_schedule(Reader(text), chip, lambda x: 0.0)
    assert found.seconds == pytest.approx(2 * (8 + 32) * 2 * 512 * 128)


def test_joined_and_padded_weights_are_copies():
    """As XLA makes of GLM-4-9B's MLP on eight GPUs, of which each has 1712 columns: no multiple of 64."""
    text = """
%join (p.0: s8[1712,4096], p.1: s8[1712,4096]) -> s8[3424,4096] {
  %p.0 = s8[1712,4096]{1,0} parameter(0)
  %p.1 = s8[1712,4096]{1,0} parameter(1)
  ROOT %both = s8[3424,4096]{1,0} concatenate(%p.0, %p.1), dimensions={0}
}

%fused_pad (q: s8[4096,1712]) -> bf16[4096,1728] {
  %q = s8[4096,1712]{1,0} parameter(0)
  %convert = bf16[4096,1712]{1,0} convert(%q)
  %zero = bf16[] constant(0)
  ROOT %pad = bf16[4096,1728]{1,0} pad(%convert, %zero), padding=0_0x0_16
}

ENTRY %main (gate: s8[1712,4096], up: s8[1712,4096], down: s8[4096,1712]) -> s8[3424,4096] {
  %gate = s8[1712,4096]{1,0} parameter(0), metadata={op_name="gate"}
  %up = s8[1712,4096]{1,0} parameter(1), metadata={op_name="up"}
  %down = s8[4096,1712]{1,0} parameter(2), metadata={op_name="down"}
  %wrapped_concatenate = s8[3424,4096]{1,0} fusion(%gate, %up), kind=kLoop, calls=%join
  %loop_pad_fusion = bf16[4096,1728]{1,0} fusion(%down), kind=kLoop, calls=%fused_pad
  ROOT %result = (s8[3424,4096]{1,0}, bf16[4096,1728]{1,0}) tuple(%wrapped_concatenate, %loop_pad_fusion)
}
"""
    copied = [(x.argument, x.bytes) for x in read_program(text).copies]
    assert copied == [(name, 1712 * 4096) for name in ("gate", "up", "down")]


def test_kernels_run_one_after_another():
    """Each as long as its bytes, or its operations. Nothing is read ahead, or beside a collective."""
    chip = dataclasses.replace(H100, bandwidth=1.0, flops=1e12, vector=1e12)
    found = read_schedule(Reader(STEP), chip, lambda x: 1000.0)
    bytes_moved = read_program(STEP).hbm_bytes
    assert found.seconds == pytest.approx(bytes_moved + 1000) and found.collectives == 1000
    chip = dataclasses.replace(H100, bandwidth=1e15, flops=1.0, vector=1e15)
    product, attention = 2 * 32 * 128 * 512, 2 * 8 * 16 * 1024 * 256
    assert read_schedule(Reader(STEP), chip, lambda x: 0.0).seconds == pytest.approx(product + attention)
    plain = read_schedule(Reader(STEP), H100, lambda x: 0.0)
    slower = read_schedule(Reader(STEP), H100, lambda x: 0.0, kernel_seconds=1e-3)
    kernels = len({x.instruction for x in read_program(STEP).traffic})
    assert plain != Schedule() and slower.seconds == pytest.approx(plain.seconds + 1e-3 * kernels)


def test_collectives_over_a_switch():
    h100 = Topology("h100:8", H100, (), ())
    reduce, gather, permute = (
        collective_seconds(kind, 45e6, 8, h100) for kind in ("all-reduce", "all-gather", "collective-permute")
    )
    assert reduce == pytest.approx(START_SECONDS + 14 * STEP_SECONDS + 100e-6 * 2 * 7 / 8)
    assert gather == pytest.approx(START_SECONDS + 7 * STEP_SECONDS + 100e-6 * 7 / 8)
    assert permute == pytest.approx(START_SECONDS + STEP_SECONDS + 100e-6)


def test_meshes_of_gpus():
    """An 8B model fits on each GPU, a 70B model only on several. Then all share its weights."""
    eight = Topology("h100:8", H100, (), tuple(np.repeat(jax.devices()[:1], 8)))
    one = dataclasses.replace(eight, devices=eight.devices[:1])
    jobs = [Job(read_model(f"llama3.1-{size}"), 8, 8192) for size in ("8b", "70b")]
    assert [rank_meshes(job, one)[0].fits for job in jobs] == [True, False]
    best, *others = rank_meshes(jobs[1], eight)
    assert (best.dp, best.tp, best.fits) == (1, 8, True) and not others[-1].fits


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("h100:9", "--topology h100:9: only one node of 1 to 8 GPUs can be planned, h100:8"),
        ("h100:2x4", "--topology h100:2x4: only one node of 1 to 8 GPUs can be planned, h100:8"),
        ("h100:8 --slices 2", "only one node of 1 to 8 GPUs can be planned, h100:8"),
        ("h300:8", "--topology h300:8: not of the form v5e:4x4"),
        ("h100:8", "the GPU compiler, is not installed: pip install -e '.[cuda-compiler]'"),
    ],
)
def test_what_cannot_be_planned(topology, message, monkeypatch, capsys):
    """The last one as jax says it when the plugin is missing."""

    def missing(*arguments, **options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    arguments = ["--model", "llama3.1-8b", "--topology", *topology.split()]
    code, out, err = invoke(monkeypatch, capsys, command, *arguments)
    assert (code, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.deep
@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="the GPU compiler is no part of the tests' environment: pip install -e '.[cuda-compiler]'",
)
@pytest.mark.parametrize("formats", ["", "--quantize none --kv-cache-dtype bfloat16", "--quantize int4"])
def test_nothing_is_copied(formats):
    """Two layers of 70B on eight H100: weights and cache are read once, and no temporary is of their size."""
    arguments = "--model llama3.1-70b --layers 2 --topology h100:8 --batch 8 --context 8192 --json"
    plan = [sys.executable, str(ROOT / "plan.py"), *arguments.split(), *formats.split()]
    done = subprocess.run(plan, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = found["hbm_bytes_by_part"]
    assert found["fits"] and found["mesh"]["tensor"] == 8
    assert found["collectives_per_layer"] == {"all-reduce": 2}
    assert sum(parts.values()) - parts["other"] < 1.01 * found["floor_bytes_per_step"]
    assert not [x for x in found["copies"] if x["bytes"] > 1e5] and found["temp_bytes"] < 8 * 2**20
