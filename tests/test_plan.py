"""planner/traffic.py against programs counted by hand, and plan.py against the TPU compiler.

The compiler (libtpu) needs no TPU. Its figures are exact and do not vary, so the bounds below are tight.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

from conftest import invoke, llama3_config, llama4_config, mesh_of

import model
from deployment.chips import CHIPS, Topology
from deployment.estimates import collective_seconds, expected_collectives
from deployment.floor import layers_per_cache, needed, share_needed
from deployment.job import Job
from deployment.placement import Choice
from deployment.step_bytes import active_experts, is_state, named_leaves, part_of
from feedback.errors import UserError
from planner import command
from planner.bundles import loop_bundles
from planner.compiled_step import Step
from planner.hlo import Array, device_groups
from planner.planning import Plan, make_plan
from planner.published_models import read_model
from planner.topologies import find_topology
from planner.traffic import Loop, read_program
from ragged_attention import DECODE_BLOCKS

TINY = str(ROOT / "tests" / "checkpoints" / "tiny-llama4")
deep = functools.partial(pytest.param, marks=pytest.mark.deep)
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the TPU compiler, is not installed"
)


def moved(text: str, **keywords) -> dict[str, float]:
    """HBM bytes by instruction."""
    total = {}
    for x in read_program(text, **keywords).traffic:
        total[x.instruction] = total.get(x.instruction, 0) + x.bytes * x.count
    return total


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((256, 128), "1,0:T(8,128)(2,1)", 256 * 128 * 2),
        ((1, 64), "1,0:T(1,128)", 128 * 2),  # 64 columns fill half a tile
        ((100, 64), "0,1:T(8,128)(2,1)", 128 * 64 * 2),  # the first dimension is the minor one
        ((3, 5, 200), "2,1,0:T(8,128)(2,1)S(1)", 3 * 8 * 256 * 2),
        ((1000,), "0:T(1024)(128)(2,1)", 1024 * 2),
        ((3, 5), "", 3 * 5 * 2),
    ],
)
def test_bytes_include_padding(shape, layout, expected):
    assert Array("bf16", shape, layout).bytes == expected


MATMUL = """
HloModule jit_step, num_partitions=4

%fused (p.0: s8[256,128], p.1: bf16[8,256]) -> bf16[8,128] {
  %p.0 = s8[256,128]{1,0:T(32,128)(4,1)} parameter(0)
  %p.1 = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %dot = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} convolution(%p.1, %p.0), dim_labels=bf_io->bf
}

ENTRY %main (w: s8[256,128], v: s8[256,128], x: bf16[8,256]) -> bf16[8,128] {
  %w = s8[256,128]{1,0:T(32,128)(4,1)} parameter(0), metadata={op_name="weights.w"}
  %v = s8[256,128]{1,0:T(32,128)(4,1)} parameter(1), metadata={op_name="weights.v"}
  %x = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(2), metadata={op_name="x"}
  %copy-start = (bf16[8,256]{1,0:T(8,128)(2,1)S(1)}, bf16[8,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%w, %copy-done), kind=kOutput, calls=%fused
  %slice-start = ((s8[256,128]{1,0:T(32,128)(4,1)}), s8[64,128]{1,0:T(32,128)(4,1)S(1)}, s32[]{:S(2)}) slice-start(%v), slice={[0:64], [0:128]}
  %slice-done = s8[64,128]{1,0:T(32,128)(4,1)S(1)} slice-done(%slice-start)
  %turned = s8[256,128]{0,1:T(32,128)(4,1)} copy(%v), metadata={op_name="jit(step)/attention/transpose"}
  %psum = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.1), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(step)/attention/psum"}
  ROOT %copy.2 = bf16[8,128]{1,0:T(8,128)(2,1)} copy(%psum)
}
"""  # noqa: E501


def test_traffic_and_copies_of_each_argument():
    """VMEM is free; a weight that a matmul streams, a prefetch, a slice, a copy from HBM to HBM are not."""
    assert [(x.instruction, x.argument, x.bytes) for x in read_program(MATMUL).traffic] == [
        ("copy-start", "x", 8 * 256 * 2),
        ("fusion.1", "weights.w", 256 * 128),
        ("slice-start", "weights.v", 64 * 128),
        ("turned", "weights.v", 256 * 128),  # read
        ("turned", "weights.v", 256 * 128),  # written
        ("copy.2", "", 8 * 128 * 2),
    ]
    copies = {x.argument: x for x in read_program(MATMUL).copies}
    v = copies["weights.v"]
    assert copies["x"].prefetch and not v.prefetch
    assert (v.bytes, v.scope) == (256 * 128, "jit(step)/attention/transpose")


def test_what_the_next_run_begins_with_counts_once():
    """XLA may fetch an array at the end of a run for the next run, which then does not fetch it."""
    again = """
  %copy-start.9 = (bf16[8,256]{1,0:T(8,128)(2,1)S(1)}, bf16[8,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done.9 = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.9)
  ROOT %copy.2"""  # noqa: E501
    assert moved(MATMUL.replace("\n  ROOT %copy.2", again)) == moved(MATMUL)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("{{0,1,2},{3,4,5}}", [0, 1, 2]),
        ("[4,2]<=[8]", [0, 1]),
        ("[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("mesh['x'=2,'y'=4] {'y'}", [0, 1, 2, 3]),
        ("mesh['x'=2,'y'=4] {'x'}", [0, 4]),
        ("mesh['x'=2,'y'=4] {'x','y'}", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", [0, 2]),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", [0, 1]),
        ("mesh['x'=8]", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_replica_groups_of_every_version_of_jax(text, group):
    assert device_groups(f"replica_groups={text}")[0].tolist() == group
    (found,) = read_program(MATMUL.replace("{{0,1},{2,3}}", text), stages=2).collectives
    assert found.between_stages == (max(group) >= 4)
    expected = "all-reduce", "bf16[8,128]", 8 * 128 * 2, len(group)
    assert (found.kind, found.shape, found.bytes, found.group) == expected
    assert not found.asynchronous and found.scope == "jit(step)/attention/psum"


def test_what_is_sent_to_another_slice():
    """Hosts transfer between slices of TPUs: a permutation, or a sum over the slices."""
    text = """
ENTRY %main (x: bf16[4,1,256]) -> bf16[4,1,256] {
  %x = bf16[4,1,256]{2,1,0} parameter(0), metadata={op_name="x"}
  %start = token[] after-all()
  %send = (bf16[4,1,256]{2,1,0}, u32[], token[]) send(%x, %start), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_target={{100000->200000}}}
  %sum = (bf16[4,1,256]{2,1,0}, u32[], token[]) send(%x, %start), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %within = bf16[4,1,256]{2,1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %result = (bf16[4,1,256]{2,1,0}) tuple(%within)
}
"""  # noqa: E501
    found = [(x.kind, x.bytes, x.between_stages) for x in read_program(text).collectives]
    kinds = ("collective-permute", True), ("all-reduce", True), ("all-reduce", False)
    assert found == [(kind, 4 * 256 * 2, between) for kind, between in kinds]


def test_asynchronous_collectives():
    """One is started and done later, and returns its operand too; another is fused with other work."""
    text = """
%fused (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %inner = f32[8,128]{1,0:T(8,128)S(1)} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (x: f32[8,128]) -> f32[16,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %start = (f32[8,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)}) all-gather-start(%x), replica_groups=[1,2]<=[2], dimensions={0}
  %done = f32[16,128]{1,0:T(8,128)} all-gather-done(%start)
  %fusion = f32[8,128]{1,0:T(8,128)S(1)} fusion(%x), kind=kCustom, calls=%fused
  ROOT %result = (f32[16,128]{1,0:T(8,128)}) tuple(%done)
}
"""  # noqa: E501
    gather, reduce = read_program(text).collectives
    assert (gather.kind, gather.shape, gather.bytes) == ("all-gather", "f32[16,128]", 16 * 128 * 4)
    assert gather.asynchronous and reduce.asynchronous and reduce.kind == "all-reduce"
    assert moved(text) == {"start": (8 + 16) * 128 * 4, "fusion": 8 * 128 * 4}


def test_a_collective_that_several_fusions_continue():
    """XLA starts it in one fusion, repeats it in those of the work that it overlaps, and in a last one."""
    gather = "all-gather(%p), channel_id=2, replica_groups=[1,2]<=[2], dimensions={0}"
    text = f"""
%first (p: f32[8,128]) -> (f32[8,128], f32[16,128]) {{
  %p = f32[8,128]{{1,0:T(8,128)S(1)}} parameter(0)
  %inner = f32[16,128]{{1,0:T(8,128)S(1)}} {gather}
  ROOT %begun = (f32[8,128]{{1,0:T(8,128)S(1)}}, f32[16,128]{{1,0:T(8,128)S(1)}}) custom-call(%inner), custom_call_target="AsyncCollectiveStart"
}}

%next (p: f32[8,128]) -> f32[16,128] {{
  %p = f32[8,128]{{1,0:T(8,128)S(1)}} parameter(0)
  ROOT %inner = f32[16,128]{{1,0:T(8,128)S(1)}} {gather}
}}

ENTRY %main (x: f32[8,128]) -> f32[16,128] {{
  %x = f32[8,128]{{1,0:T(8,128)S(1)}} parameter(0), metadata={{op_name="x"}}
  %start = (f32[8,128]{{1,0:T(8,128)S(1)}}, f32[16,128]{{1,0:T(8,128)S(1)}}) fusion(%x), kind=kCustom, calls=%first
  %part = f32[8,128]{{1,0:T(8,128)S(1)}} get-tuple-element(%start), index=0
  %fusion = f32[16,128]{{1,0:T(8,128)S(1)}} fusion(%part), kind=kCustom, calls=%next
  ROOT %done = f32[16,128]{{1,0:T(8,128)S(1)}} fusion(%part), kind=kCustom, calls=%next
}}
"""  # noqa: E501
    (found,) = read_program(text).collectives
    assert found.kind == "all-gather" and found.asynchronous and found.bytes == 16 * 128 * 4


IN_PLACE = """
%update (p.0: s8[1024,128], p.1: s32[2,1], p.2: s8[2,128]) -> s8[1024,128] {
  %p.0 = s8[1024,128]{1,0:T(8,128)(4,1)} parameter(0)
  %p.1 = s32[2,1]{0,1:T(1,128)S(1)} parameter(1)
  %p.2 = s8[2,128]{1,0:T(2,128)(4,1)S(1)} parameter(2)
  %whole = s8[1024,128]{1,0:T(8,128)(4,1)} bitcast(%p.0)
  %scatter = s8[1024,128]{1,0:T(8,128)(4,1)} scatter(%whole, %p.1, %p.2), to_apply=%assign
  ROOT %again = s8[1024,128]{1,0:T(8,128)(4,1)} bitcast(%scatter)
}

%read (p.0: s8[1024,128], p.1: s32[]) -> bf16[256,128] {
  %p.0 = s8[1024,128]{1,0:T(8,128)(4,1)} parameter(0)
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  %block = s8[256,128]{1,0:T(8,128)(4,1)} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={256,128}
  ROOT %converted = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} convert(%block)
}

%body (state: (s32[], s8[1024,128])) -> (s32[], s8[1024,128]) {
  %state = (s32[]{:T(128)S(6)}, s8[1024,128]{1,0:T(8,128)(4,1)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %kv = s8[1024,128]{1,0:T(8,128)(4,1)} get-tuple-element(%state), index=1
  %block.1 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} fusion(%kv, %i), kind=kLoop, calls=%read
  ROOT %next = (s32[]{:T(128)S(6)}, s8[1024,128]{1,0:T(8,128)(4,1)}) tuple(%i, %kv)
}

%condition (state.1: (s32[], s8[1024,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)S(6)}, s8[1024,128]{1,0:T(8,128)(4,1)}) parameter(0)
  %j = s32[]{:T(128)S(6)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)S(6)} compare(%j, %j), direction=LT
}

ENTRY %main (kv: s8[1024,128], at: s32[2,1], new: s8[2,128]) -> s8[1024,128] {
  %kv.0 = s8[1024,128]{1,0:T(8,128)(4,1)} parameter(0), metadata={op_name="cache.layers[0].values"}
  %at = s32[2,1]{0,1:T(1,128)S(1)} parameter(1), metadata={op_name="at"}
  %new = s8[2,128]{1,0:T(2,128)(4,1)S(1)} parameter(2), metadata={op_name="new"}
  %zero = s32[]{:T(128)S(6)} constant(0)
  %written = s8[1024,128]{1,0:T(8,128)(4,1)} fusion(%kv.0, %at, %new), kind=kCustom, calls=%update
  %init = (s32[]{:T(128)S(6)}, s8[1024,128]{1,0:T(8,128)(4,1)}) tuple(%zero, %written)
  %while.1 = (s32[]{:T(128)S(6)}, s8[1024,128]{1,0:T(8,128)(4,1)}) while(%init), condition=%condition, body=%body
  ROOT %result = s8[1024,128]{1,0:T(8,128)(4,1)} get-tuple-element(%while.1), index=1
}
"""  # noqa: E501


def test_an_update_in_place_writes_its_rows_and_a_loop_reads_its_slices():
    """Two rows are written. Each trip reads 256 slots; how many there are is computed, known, or bounded."""
    assert moved(IN_PLACE, computed_trips=4) == {"written": 2 * 128, "block.1": 1024 * 128}
    read = read_program(IN_PLACE, computed_trips=4)
    assert {x.argument for x in read.traffic} == {"cache.layers[0].values"}
    assert read.loops == [Loop("while.1", 4, known=False)]
    known = IN_PLACE.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert moved(known)["block.1"] == 7 * 256 * 128
    bound = IN_PLACE.replace("%j = ", "%n = s32[]{:T(128)} constant(9)\n  %j = ")
    assert moved(bound)["block.1"] == 9 * 256 * 128


ONE_ROW = """
%retiled (a: s8[8,64,256]) -> s8[8,64,256] {
  %a = s8[8,64,256]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[8,64,256]{2,1,0:T(8,128)(4,1)} copy(%a)
}

%take (p.0: s8[8,64,256], p.1: s32[]) -> s8[1,64,256] {
  %p.0 = s8[8,64,256]{2,1,0:T(32,128)(4,1)} parameter(0)
  %view = s8[8,64,256]{2,1,0:T(8,128)(4,1)} fusion(%p.0), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retiled
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %row.1 = s8[1,64,256]{2,1,0:T(8,128)(4,1)} dynamic-slice(%view, %p.1, %zero, %zero), dynamic_slice_sizes={1,64,256}
  ROOT %copy.2 = s8[1,64,256]{2,1,0:T(32,128)(4,1)S(1)} copy(%row.1)
}

%put (p.2: s8[8,64,256], p.3: s8[1,64,256], p.4: s32[]) -> s8[8,64,256] {
  %p.2 = s8[8,64,256]{2,1,0:T(32,128)(4,1)} parameter(0)
  %view.1 = s8[8,64,256]{2,1,0:T(8,128)(4,1)} fusion(%p.2), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%retiled
  %p.3 = s8[1,64,256]{2,1,0:T(8,128)(4,1)S(1)} parameter(1)
  %p.4 = s32[]{:T(128)S(6)} parameter(2)
  %zero.1 = s32[]{:T(128)} constant(0)
  ROOT %update = s8[8,64,256]{2,1,0:T(32,128)(4,1)} dynamic-update-slice(%view.1, %p.3, %p.4, %zero.1, %zero.1)
}

ENTRY %main (kv: s8[8,64,256], from: s32[], to: s32[]) -> s8[8,64,256] {
  %kv = s8[8,64,256]{2,1,0:T(32,128)(4,1)} parameter(0), metadata={op_name="cache.layers[0].values"}
  %from = s32[]{:T(128)S(6)} parameter(1), metadata={op_name="from"}
  %to = s32[]{:T(128)S(6)} parameter(2), metadata={op_name="to"}
  %taken = s8[1,64,256]{2,1,0:T(32,128)(4,1)S(1)} fusion(%kv, %from), kind=kLoop, calls=%take
  ROOT %written = s8[8,64,256]{2,1,0:T(32,128)(4,1)} fusion(%kv, %taken, %to), kind=kLoop, calls=%put
}
"""  # noqa: E501


def test_a_row_that_is_seen_in_another_tiling_is_moved_alone():
    """Fusions inside fusions that alias their operand copy nothing."""
    assert moved(ONE_ROW) == {"taken": 64 * 256, "written": 64 * 256}
    assert {x.argument for x in read_program(ONE_ROW).traffic} == {"cache.layers[0].values"}
    in_truth = ONE_ROW.replace("output_to_operand_aliasing={{}: (0, {})}, ", "")
    assert moved(in_truth)["written"] == 8 * 64 * 256


BY_BLOCK = """
%body (state: (s32[], s8[8,2,1024,128], bf16[2,1,2,1024])) -> (s32[], s8[8,2,1024,128], bf16[2,1,2,1024]) {
  %state = (s32[]{:T(128)S(6)}, s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)}, bf16[8,2,2,1024]{3,2,1,0:T(2,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %kv = s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)} get-tuple-element(%state), index=1
  %scale = bf16[8,2,2,1024]{3,2,1,0:T(2,128)(2,1)} get-tuple-element(%state), index=2
  %take_slots.1 = s8[1,2,256,128]{3,2,1,0:T(32,128)(4,1)S(1)} custom-call(%i, %i, %kv), custom_call_target="tpu_custom_call"
  %take_slots.2 = bf16[1,2,2,256]{3,2,1,0:T(2,128)(2,1)S(1)} custom-call(%i, %i, %scale), custom_call_target="tpu_custom_call"
  ROOT %next = (s32[]{:T(128)S(6)}, s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)}, bf16[8,2,2,1024]{3,2,1,0:T(2,128)(2,1)}) tuple(%i, %kv, %scale)
}

%condition (state.1: (s32[], s8[8,2,1024,128], bf16[2,1,2,1024])) -> pred[] {
  %state.1 = (s32[]{:T(128)S(6)}, s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)}, bf16[8,2,2,1024]{3,2,1,0:T(2,128)(2,1)}) parameter(0)
  %j = s32[]{:T(128)S(6)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)S(6)} compare(%j, %j), direction=LT
}

ENTRY %main (kv: s8[8,2,1024,128], scale: bf16[8,2,2,1024]) -> s8[8,2,1024,128] {
  %kv.0 = s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)} parameter(0), metadata={op_name="cache.layers[0].values"}
  %scale.0 = bf16[8,2,2,1024]{3,2,1,0:T(2,128)(2,1)} parameter(1), metadata={op_name="cache.layers[0].scale"}
  %zero = s32[]{:T(128)S(6)} constant(0)
  %init = (s32[]{:T(128)S(6)}, s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)}, bf16[8,2,2,1024]{3,2,1,0:T(2,128)(2,1)}) tuple(%zero, %kv.0, %scale.0)
  %while.1 = (s32[]{:T(128)S(6)}, s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)}, bf16[8,2,2,1024]{3,2,1,0:T(2,128)(2,1)}) while(%init), condition=%condition, body=%body
  ROOT %result = s8[8,2,1024,128]{3,2,1,0:T(32,128)(4,1)} get-tuple-element(%while.1), index=1
}
"""  # noqa: E501


def test_a_loop_that_copies_blocks_of_a_row_walks_over_that_cache():
    """A ring has fewer slots than a cache of the whole context, and fewer blocks. Rows are no blocks."""
    read = read_program(BY_BLOCK, computed_trips=64, block_kernel="take_slots")
    assert read.loops == [Loop("while.1", 4, known=False)]


KERNEL = """
ENTRY %main (q: bf16[8,128], kv: s8[8,1024,128], w: s8[16,256,128]) -> bf16[8,128] {
  %q = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0), metadata={op_name="q"}
  %kv = s8[8,1024,128]{2,1,0:T(32,128)(4,1)} parameter(1), metadata={op_name="cache.layers[0].values"}
  %w = s8[16,256,128]{2,1,0:T(32,128)(4,1)} parameter(2), metadata={op_name="weights.experts"}
  %ragged_decode.3 = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, s8[8,1024,128]{2,1,0:T(32,128)(4,1)}) custom-call(%q, %kv), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (1, {})}, frontend_attributes={kernel_metadata={
"note":"{\\"block\\": 128}"
}}, metadata={op_name="jit(step)/attention/ragged_decode/pallas_call"}
  %o = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%ragged_decode.3), index=0
  ROOT %experts.1 = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%o, %w), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


def test_the_caller_says_what_a_pallas_kernel_reads():
    """A kernel reads the whole cache, and writes nothing to its alias; another reads 3 of 16 experts.

    Attributes may hold line breaks and braces.
    """
    output = 8 * 128 * 2
    whole = {"ragged_decode.3": 8 * 1024 * 128, "experts.1": 16 * 256 * 128 + output}
    assert moved(KERNEL) == whole
    active = moved(KERNEL, kernel_share=lambda kernel, argument: 3 / 16 if kernel == "experts" else 1)
    assert active == whole | {"experts.1": 3 * 256 * 128 + output}
    assert {x.kernel for x in read_program(KERNEL).traffic} == {"ragged_decode", "experts"}


def test_one_branch_of_a_conditional_runs():
    text = """
%small (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %a = f32[8,128]{1,0:T(8,128)S(1)} negate(%p)
}

%large (p.1: f32[64,128]) -> f32[8,128] {
  %p.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %b = f32[8,128]{1,0:T(8,128)S(1)} slice(%p.1), slice={[0:16], [0:128]}
}

ENTRY %main (i: s32[], x: f32[8,128], y: f32[64,128]) -> f32[8,128] {
  %i = s32[]{:T(128)S(6)} parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} parameter(1)
  %y = f32[64,128]{1,0:T(8,128)} parameter(2)
  ROOT %c = f32[8,128]{1,0:T(8,128)S(1)} conditional(%i, %x, %y), branch_computations={%small, %large}
}
"""
    assert sum(moved(text).values()) == 8 * 128 * 4


def test_parts_of_the_model():
    cfg = llama4_config()  # layers with experts, without, with
    names = {
        "weights.layers[0].attention.q.values": "attention",
        "weights.layers[0].feed_forward.gate.scale": "experts",
        "weights.layers[0].feed_forward.router": "mlp",
        "weights.layers[0].feed_forward.shared.down.values": "mlp",
        "weights.layers[1].feed_forward.up.values": "mlp",
        "weights.layers[2].attention_norm": "other",
        "weights.embed": "embedding",
        "weights.unembed.values": "embedding",
        "batch.cache.layers[2].values": "kv_cache",
        "batch.tokens": "other",
        "batch.cache.length": "other",
        "": "other",
    }
    assert {name: part_of(name, cfg) for name in names} == names


@pytest.mark.parametrize("name", ["muse-spark-816b", "gemma4-26b-a4b", "gpt-oss-20b", "deepseek-v3"])
def test_which_weights_of_a_mixture_are_experts(name):
    """Those of which each expert has its own. A step reads the others whole, however few are active."""
    cfg = read_model(name)
    layer = next(i for i, kind in enumerate(cfg.layers) if kind.feed_forward == cfg.moe)
    infos = model.weight_infos(cfg).layers[layer].feed_forward
    for field, info in named_leaves(**{f"weights.layers[{layer}].feed_forward": infos}):
        assert (part_of(field, cfg) == "experts") == ("e" in info.letters), field


def test_what_is_needed_of_a_shared_cache():
    """In Gemma 4 E2B, 20 of 35 layers read the caches of two others. Of its table few rows are looked up."""
    cfg = read_model("gemma4-e2b")
    mesh, sliding, full, shared = mesh_of(cfg), cfg.layers[0], cfg.layers[4], cfg.layers[-1]
    assert layers_per_cache(cfg.layers) == {sliding: (12 + 16) / 12, full: (3 + 4) / 3}

    def job(*kinds) -> Job:
        return Job(dataclasses.replace(cfg, layers=kinds), 2, 128, None, "bfloat16")

    weights = sum(2 * math.prod(x.shape) for x in jax.tree.leaves(model.layer_infos(shared, cfg.D)))
    cache = 2 * 2 * 128 * 2 * 512  # bytes of a bfloat16, rows, slots, columns of a key beside its value
    more = needed(job(full, shared), mesh)[0] - needed(job(full), mesh)[0]
    assert more == weights + cache
    assert share_needed("weights.inputs.table", job(full), mesh) == 0
    chunks = [needed(job(*kinds).prefill(16, mesh), mesh) for kinds in ((full,), (full, shared))]
    assert chunks[0] == chunks[1]  # which need the caches alone


def test_what_is_needed_of_a_state():
    """A step reads and writes it once, however long the text is; a token does 6 operations per number."""
    cfg = read_model("qwen3.5-0.8b")
    mesh, kind = mesh_of(cfg), cfg.layers[0]

    def job(layers: int, context: int = 128) -> Job:
        return Job(dataclasses.replace(cfg, layers=layers * (kind,)), 2, context, None, "bfloat16")

    def more(change) -> np.ndarray:
        return np.subtract(*(needed(change(job(n)), mesh) for n in (2, 1)))

    infos = jax.tree.leaves(model.layer_infos(kind, cfg.D))
    sizes = np.array([math.prod(x.shape) for x in infos])
    weights = sizes @ [jnp.dtype(x.dtype or jnp.bfloat16).itemsize for x in infos]
    numbers = 16 * 128 * 128
    state = 4 * numbers + 2 * 3 * 3 * 2048 + 4  # of a row: S, the last 3 inputs of q, k and v, the row's end
    assert more(lambda job: job).tolist() == [weights + 2 * 2 * state, 2 * 2 * (sizes.sum() + 3 * numbers)]
    chunk = more(lambda job: job.prefill(16, mesh))
    assert chunk.tolist() == [weights + 2 * state, 16 * 2 * (sizes.sum() + 3 * numbers)]
    assert needed(job(1), mesh)[1] == needed(job(1, 4096), mesh)[1]
    assert expected_collectives(job(1), mesh, Topology("v5e:1x1", CHIPS["v5e"], (1, 1), ())) == 0


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_needed(tied):
    """Decode looks up tokens and reads all else; prefill needs no logits, and one of two rows' caches."""
    cfg = llama3_config(tied_embeddings=tied)
    mesh = mesh_of(cfg)
    decode = Job(cfg, 2, 128, None, "float32")

    def unneeded(job: Job) -> set[str]:
        names = [name for name, _ in named_leaves(**job.arguments(mesh))]
        return {name for name in names if not share_needed(name, job, mesh)}

    tables = {"batch.tokens", "weights.embed"}
    assert unneeded(decode) == (tables - {"weights.embed"} if tied else tables)
    logits = {"weights.norm"} if tied else {"weights.norm", "weights.unembed"}
    prefill = decode.prefill(16, mesh)
    assert unneeded(prefill) == tables | logits
    cache = "batch.cache.layers[1].values"
    assert (share_needed(cache, decode, mesh), share_needed(cache, prefill, mesh)) == (1, 0.5)


def test_collectives_take_hops_and_bandwidth():
    """An all-reduce of 16 on 4x4 chips without wraparound: 6 hops; 15/16 of the bytes twice, on 2 links."""
    v5e = Topology("v5e:4x4", CHIPS["v5e"], (4, 4), ())
    expected = 6 * 0.5e-6 + 2 * 131072 * 15 / 16 / (2 * 50e9)
    assert collective_seconds("all-reduce", 131072, 16, v5e) == pytest.approx(expected)
    assert collective_seconds("all-gather", 131072, 2, v5e) == pytest.approx(0.5e-6 + 131072 / 2 / 50e9)
    ring = Topology("v5e:16x16", CHIPS["v5e"], (16, 16), ())
    assert collective_seconds("all-gather", 160, 16, ring) == pytest.approx(8 * 0.5e-6 + 150 / (2 * 50e9))
    more = {"all-reduce": 2 * 6 * 1e-6 - 6 * 0.5e-6, "all-gather": 6 * 0.5e-6, "collective-permute": 0.5e-6}
    for kind, seconds in more.items():
        times = [collective_seconds(kind, 131072, 16, v5e, cautious) for cautious in (False, True)]
        assert times[1] - times[0] == pytest.approx(seconds)


def report(capsys, **changes) -> str:
    """What plan.py prints of the first plan of the table in docs/tpu.md, with these fields of the step."""
    found = json.loads((ROOT / "images" / "decode_bytes.jsonl").read_text().splitlines()[0])

    def made(cls, **more):
        return cls(**{field.name: found.get(field.name) for field in dataclasses.fields(cls)} | more)

    ranking = [Choice(**choice) for choice in found["ranking"]]
    result = made(Plan, decode=made(Step, **changes), prefill=None, ranking=ranking)
    command.show(result, found["model"], found["quantize"], found["kv_cache_dtype"])
    return capsys.readouterr().out


def test_the_docs_show_the_first_plan_of_their_table(capsys):
    assert report(capsys) in (ROOT / "docs" / "tpu.md").read_text()


def test_a_report_says_how_a_step_runs(capsys):
    """By columns or not, and a cautious time only where it is another one."""
    cautious, columns = " if a hop takes 1 us", "Decode step, by columns: fits"
    text = report(capsys)
    assert cautious in text and columns not in text
    text = report(capsys, by_columns=True, scheduled_seconds=1e-3, cautious_seconds=1.001e-3)
    assert columns in text and cautious not in text


# ------------------------------------------------------------------------------------------- the TPU compiler


def stdout_of(*arguments: str) -> str:
    """What Python prints in a process of its own, without the tests' XLA_FLAGS."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def planned(arguments: str) -> dict:
    return json.loads(stdout_of("plan.py", *arguments.split(), "--json"))


def compiled(
    name: str, layers: int, batch: int, context: int, topology: str = "v5e:4x4", weights: str = "int8"
) -> dict:
    arguments = f"--topology {topology} --layers {layers} --batch {batch} --context {context}"
    return planned(f"--model {name} {arguments} --quantize {weights}")


@needs_compiler
def test_decode_on_16_chips():
    """The step fits; a layer has two all-reduces and at most two small collectives; no cache is copied."""
    found = compiled("llama3.1-70b", 2, 8, 8192)
    assert found["fits"] and found["peak_bytes"] >= found["weights_bytes"] + found["cache_bytes"]
    per_layer = dict(found["collectives_per_layer"])
    assert per_layer.pop("all-reduce") == 2 and sum(per_layer.values()) <= 2
    assert not found["by_columns"] and found["scheduled_seconds"] < found["cautious_seconds"]
    cache_of_a_layer = found["cache_bytes"] / 2
    too_large = [x for x in found["copies"] if x["bytes"] >= cache_of_a_layer / 2]
    assert not too_large  # half of a cache: keys and values may be copied apart


@needs_compiler
@pytest.mark.parametrize(
    ("name", "batch", "context", "weights", "megabytes"),
    [
        ("llama3.1-70b", 8, 8192, "int8", 63),
        deep("llama4-scout", 16, 4096, "int8", 104),
        deep("llama3.1-70b", 8, 8192, "int4", 37),
        deep("llama4-scout", 1, 4096, "int4", 12),
    ],
)
def test_hbm_bytes_per_layer(name, batch, context, weights, megabytes):
    """Per chip of v5e:4x4, by the slope over layers. Floors of the first three: 62.0, 101.4; 36.1.

    A copy of 4-bit weights in another form would be as large as they are, or larger.
    """
    layers = (4, 8) if name == "llama4-scout" else (1, 2)  # of Scout, every fourth is of another kind
    few, more = (compiled(name, n, batch, context, weights=weights)["hbm_bytes_per_step"] for n in layers)
    assert (more - few) / (layers[1] - layers[0]) <= megabytes * 1e6


def bytes_over_floor(
    name: str, batch: int, context: int, topology: str, layers=(2, 4), weights="int8"
) -> float:
    """HBM bytes of a layer as multiples of its floor, both by the slope over layers."""
    few, more = (compiled(name, n, batch, context, topology, weights) for n in layers)
    return np.divide(*(more[key] - few[key] for key in ("hbm_bytes_per_step", "floor_bytes_per_step")))


@needs_compiler
@pytest.mark.deep
def test_latent_attention():
    """GLM-4.7-Flash: four collectives per layer, no copy of the cache, and bytes little above the floor.

    Each device has the queries' first matrix. The floor counts slots of 640 columns, of which 576 are used.
    """
    name, topology = "glm-4.7-flash", "v6e:2x2"
    found = compiled(name, 3, 1, 8192, topology)
    assert sum(dict(found["collectives_per_layer"]).values()) <= 4
    assert not [x for x in found["copies"] if x["bytes"] >= found["cache_bytes"] / 6]
    assert bytes_over_floor(name, 1, 8192, topology, (2, 3)) * 1.01 < 1.1


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize(("name", "topology"), [("mixtral-8x7b", "v5e:2x4"), ("qwen3-30b-a3b", "v5p:1x1x1")])
def test_bytes_of_other_families(name, topology):
    assert bytes_over_floor(name, 8, 8192, topology, (1, 2)) < 1.05


@needs_compiler
@pytest.mark.deep
def test_two_heads_on_many_chips():
    """Muse Glimmer: 8 chips share a key/value head. Layer 2 has a window, layer 3 has none."""
    topology = "v5e:4x4"
    found = compiled("muse-glimmer-30b", 4, 8, 8192, topology)
    per_layer = dict(found["collectives_per_layer"])
    assert per_layer == {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}
    assert not [x for x in found["copies"] if x["bytes"] >= found["cache_bytes"] / 8]
    assert bytes_over_floor("muse-glimmer-30b", 8, 8192, topology) < 1.05


@needs_compiler
@pytest.mark.deep
def test_experts_in_mxfp4():
    """gpt-oss: no weight of an expert and no exponent is copied, although D is no multiple of 128.

    A copy of `down`, or of one matrix's exponents, would be of 2 MB and more. Of a layer's 31.1 MB, 7% are
    the padding of an expert's 360 columns on a chip to 384.
    """
    few, more = (compiled("gpt-oss-120b", n, 8, 8192, weights="mxfp4") for n in (2, 4))
    assert not [x for x in few["copies"] if x["bytes"] > 1e6]
    assert few["fits"] and dict(few["collectives_per_layer"])["all-reduce"] == 2
    experts = [found["hbm_bytes_by_part"]["experts"] / found["layers"] for found in (few, more)]
    assert experts[0] == pytest.approx(experts[1], rel=0.01) and experts[0] < 32e6


@needs_compiler
@pytest.mark.deep
def test_narrow_experts():
    """A chip has 96 columns of an expert, padded to 128: the kernel runs, and nothing is copied."""
    found = compiled("qwen3-30b-a3b", 2, 8, 8192, "v5e:2x4 --ep 1 --tp 8")
    assert not [x for x in found["copies"] if x["bytes"] > 1e6]
    assert bytes_over_floor("qwen3-30b-a3b", 8, 8192, "v5e:2x4 --ep 1 --tp 8", (1, 2)) < 1.4


@needs_compiler
@pytest.mark.deep
def test_many_experts():
    """DeepSeek R1 in int4 on 32 chips: the kernel reads the active ones of 128 experts per chip.

    A step waits for the chip that has most of them, and every chip has the routers and the queries' first
    matrices. Of the shared expert's 64 columns per chip, int4's groups make 128.
    """
    topology, batch, context = "v6e:4x8 --dp 1 --ep 2 --tp 16", 64, 8192
    few, more = (compiled("deepseek-r1", n, batch, context, topology, "int4") for n in (5, 7))
    assert dict(more["collectives_per_layer"]) == {"all-reduce": 2, "all-gather": 1, "all-to-all": 1}
    moved = {x["argument"] for x in more["copies"] if x["opcode"] == "copy"}
    # A chip has one group of each expert's `down`: scales [128,1,7168].
    assert not [name for name in moved if re.search(r"batch\.cache|feed_forward\.(gate|up|down)", name)]
    experts = [x["hbm_bytes_by_part"]["experts"] for x in (few, more)]
    stored = 3 * 7168 * 2048 * (0.5 + 2 / 128) * 256 / 32  # per layer and chip
    active = active_experts(read_model("deepseek-r1"), batch, 2)
    assert experts[1] - experts[0] < 1.02 * 2 * active * stored
    assert more["mesh"]["copies"] == 2  # of each cache; the floor has one of them
    caches = more["hbm_bytes_by_part"]["kv_cache"] - few["hbm_bytes_by_part"]["kv_cache"]
    floor = more["floor_bytes_per_step"] - few["floor_bytes_per_step"]
    over = bytes_over_floor("deepseek-r1", batch, context, topology, (5, 7), "int4")
    assert over - caches / 2 / floor < 1.11


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize(("name", "topology"), [("qwen3.5-9b", "v5e:1x1"), ("qwen3-next-80b-a3b", "v5e:4x4")])
def test_states_are_read_and_written_once(name, topology):
    """Three layers with a state, and a fourth with a cache: both move their floor, and no state is copied."""
    found = compiled(name, 4, 8, 8192, topology)
    cfg = read_model(name)
    job = Job(dataclasses.replace(cfg, layers=cfg.layers[:4]), 8, 8192)
    mesh = mesh_of(job.cfg)
    memories = {x: n for x, _, n in job.shards(mesh) if part_of(x, job.cfg) == "kv_cache"}
    floor = sum(n * (2 if is_state(x, job.cfg) else 1) for x, n in memories.items()) / found["devices"]
    assert found["hbm_bytes_by_part"]["kv_cache"] == pytest.approx(floor, rel=0.01)
    states = [n / found["devices"] / 3 for x, n in memories.items() if x.endswith(".matrix")]
    # libtpu 0.0.50 copies the step's tokens into the kernel's order: of 9B and 8 rows 1 MiB.
    assert not [x for x in found["copies"] if x["bytes"] > min(2**20, min(states) / 2)]


@needs_compiler
@pytest.mark.deep
def test_a_small_embedding_stays_where_it_is():
    """XLA would copy all of it into VMEM, where it fits, to look up a few rows."""
    parts = compiled("mistral-7b", 2, 8, 8192, "v5e:2x2")["hbm_bytes_by_part"]
    assert parts["embedding"] < 1.1 * 32000 * 4096 / 4  # the unembedding


# What programs of the tests begin with, which compile some layers of a model in a process of their own.
LAYERS = """
import dataclasses, jax, jax.numpy as jnp, json
from jax.sharding import NamedSharding, PartitionSpec as P
from deployment.job import Job
from deployment.placement import Choice
from planner.published_models import read_model
from planner.topologies import find_topology
from planner.traffic import read_program
from serving.executors import one_program
from sharding.mesh import make_mesh

def layers_of(name, which, topology=find_topology("v5e:4x4")):
    cfg, devices = read_model(name), topology.devices
    cfg = dataclasses.replace(cfg, layers=cfg.layers[which])
    return cfg, make_mesh(cfg, tensor=len(devices), devices=devices)
"""


@needs_compiler
@pytest.mark.deep
def test_one_row_of_a_cache_is_moved_alone():
    """Copying a row of int8 caches, and prefilling one row, move no array of half the size of a cache."""
    code = """
from serving.steps import PrefillChunk, assign_rows
cfg, mesh = layers_of("llama3.1-70b", slice(2))
_, weights, batch = Job(cfg, 32, 8192).arguments(mesh).values()
sharding = NamedSharding(mesh, P("data"))
row, text = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in [(1,), (1, 8192)])
found = []
for lowered in (
    assign_rows.lower(row, text, row, row, batch, cfg=cfg, mesh=mesh),
    one_program.lower(PrefillChunk(rows=row, count=row, width=512), weights, batch, cfg=cfg, mesh=mesh),
):
    compiled = lowered.compile()
    moved = read_program(compiled.as_text()).traffic
    found += [x.bytes for x in moved if x.kernel not in ("take_slots", "put_slots")]  # which move blocks
    found.append(compiled.memory_analysis().temp_size_in_bytes)
print(json.dumps(found))
"""
    found = json.loads(stdout_of("-c", LAYERS + code))
    assert max(found) < 32 * 4096 * 256 / 2  # slots of one of 16 chips


@needs_compiler
@pytest.mark.deep
def test_prefill_in_groups_of_layers():
    """Twice as many layers run the same program twice: no more code, and twice the bytes of the layers."""
    code = """
from planner.compiled_step import compile_step
topology = find_topology("v5e:1x1")
for layers in (8, 16):
    cfg, mesh = layers_of("llama3.2-1b", slice(layers), topology)
    job = Job(cfg, 8, 2048).prefill(32, mesh)
    print(json.dumps(dataclasses.asdict(compile_step(job, mesh, topology))))
"""
    few, more = map(json.loads, stdout_of("-c", LAYERS + code).splitlines())
    assert few["programs"] == dict(start=1, layers=1, finish=1)
    assert more["programs"] == dict(start=1, layers=2, finish=1)
    assert all(more[name] == few[name] for name in ("code_bytes", "temp_bytes"))
    for part in ("attention", "mlp", "kv_cache"):
        assert more["hbm_bytes_by_part"][part] == 2 * few["hbm_bytes_by_part"][part] > 0
    assert more["hbm_bytes_by_part"]["embedding"] == few["hbm_bytes_by_part"]["embedding"]
    added = sum(np.multiply(3 * [8], [2048 * 2048, 2 * 2048 * 512, 3 * 2048 * 8192]))  # q, k and v, the MLP
    added += 8 * (2048 * 2048 + 8 * 2048 * 8 * (128 + 4))  # o; rows x slots x heads x (values and scales)
    assert more["argument_bytes"] - few["argument_bytes"] == pytest.approx(added, rel=0.01)
    assert more["peak_bytes"] > more["argument_bytes"] + more["temp_bytes"] + more["code_bytes"]


# planner.engine_memory, which compiles only the last of the programs: the decode step with all options.
LAST_PROGRAM = """
import runpy
from serving import needed
every = needed.needed_programs
needed.needed_programs = lambda *arguments, **options: every(*arguments, **options)[-1:]
runpy.run_module("planner.engine_memory", run_name="__main__")
"""


@needs_compiler
@pytest.mark.parametrize(
    ("program", "layers"),
    [
        (("-c", LAST_PROGRAM), 1),
        deep(("-m", "planner.engine_memory"), 1),
        deep(("-m", "planner.engine_memory"), 2),
    ],
    ids=["1-of-one", "1", "2"],
)
def test_estimated_memory_of_programs(program, layers):
    """The engine counts on at least what the compiler says of all programs, and on few hundred MB more.

    With one layer, the estimate for layers has little left over that could hide an error in the estimate for
    the rest of a program. Large models, whose programs take minutes to compile, are in docs/tpu.md.
    """
    found = json.loads(stdout_of(*program, TINY, "v5e:2x2", "4", "256", str(layers)))
    assert found["temp_bytes"] > 0
    assert found["code_bytes"] <= found["estimated_code_bytes"] <= found["code_bytes"] + 300e6
    assert found["temp_bytes"] <= found["estimated_temp_bytes"] <= found["temp_bytes"] + 300e6


@needs_compiler
@pytest.mark.deep
def test_draft_tokens_go_through_the_decode_kernel():
    """One kernel each reads the caches of a chunked layer and of a full layer, and nothing copies them."""
    code = """
cfg, mesh = layers_of("llama4-scout", slice(2, 4))
arguments = Job(cfg, 8, 16384).arguments(mesh) | dict(cfg=cfg, mesh=mesh)
guesses = jax.ShapeDtypeStruct((8, 4), jnp.int32, sharding=NamedSharding(mesh, P("data")))
arguments["step"] = dataclasses.replace(arguments["step"], drafts=guesses)
compiled = one_program.lower(**arguments).compile()
program = read_program(compiled.as_text())
kernels = sorted({(x.kernel, x.instruction) for x in program.traffic if x.kernel})
copied = [x.bytes for x in program.copies if not x.prefetch and "cache.layers" in x.argument]
temporaries = compiled.memory_analysis().temp_size_in_bytes
print(json.dumps([[kernel for kernel, _ in kernels], copied, temporaries, len(program.loops)]))
"""
    kernels, copied, temporaries, loops = json.loads(stdout_of("-c", LAYERS + code))
    assert kernels.count("ragged_attention") == 2 and "ragged_decode" not in kernels
    # A copied cache would be the slots of one of 16 chips. Seen: 0 with libtpu 0.0.42, 4.6 MB with 0.0.50.
    assert (copied, loops) == ([], 0) and temporaries < 8 * 4096 * 256


@pytest.mark.deep
@needs_compiler
def test_decode_kernel_compiles_for_any_batch_and_length():
    """For v5e and v6e, all columns and types of the table, and float32 products as exact as main.py asks for.

    For one token per row, and for as many as the kernel supports; one key/value head, on one device.
    """
    code = """
import itertools, jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from ops.kv_cache import KV, SlotLayout, key_beside_value
from planner.topologies import find_topology
from ragged_attention import DECODE_BLOCKS, FEW_QUERIES, ragged_attention_tpu
jax.config.update("jax_default_matmul_precision", "highest")
DTYPES, QUERIES = {1: jnp.int8, 2: jnp.bfloat16, 4: jnp.float32}, 8  # per token
LATENT = SlotLayout(key=576, value=(0, 512), scale=1 / 16)  # GLM-4.7-Flash's

def compile_kernel(kind, columns, itemsize, B, S, T=1):
    mesh = Mesh(np.array(find_topology(f"{kind}:1x1").devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    layout = LATENT if columns == LATENT.width else key_beside_value(columns // 2)

    def make(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def kv(slots):
        scale = make(jnp.bfloat16, B, 1, 2, slots) if itemsize == 1 else None
        return KV(make(DTYPES[itemsize], B, 1, slots, columns), scale, layout)

    def on_device(q, new, kv, length, place):
        blocks = DECODE_BLOCKS[columns, itemsize]
        return ragged_attention_tpu(q, kv, length, new=new, place=place, blocks=blocks)

    # The kernel writes a single new token to the cache; several tokens are written before it runs.
    new, place = (kv(1), make(jnp.int32, B)) if T == 1 else (None, None)
    kernel = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=P(), out_specs=P()), donate_argnums=2)
    q = make(jnp.bfloat16, B, T, 1, QUERIES, layout.key)
    kernel.lower(q, new, kv(S), make(jnp.int32, B), place).compile()

for kind, size in itertools.product(("v5e", "v6e"), DECODE_BLOCKS):
    for B, S in itertools.product((1, 128), (2048, 131072)) if size == (256, 1) else [(32, 8192)]:
        compile_kernel(kind, *size, B, S)
    if kind == "v5e":
        compile_kernel(kind, *size, 32, 8192, FEW_QUERIES // QUERIES)
"""
    stdout_of("-c", code)


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize(("topology", "cycles"), [("v5e:2x4", 11_700), ("v6e:2x4", 9_400)])
def test_bundles_of_the_decode_kernel(topology, cycles, monkeypatch):
    """8 rows of 8192 int8 slots, head width 128: no more than docs/tpu.md says, rounded up to hundreds."""
    arguments = f"--model llama3.1-70b --layers 1 --topology {topology} --tp 8 --batch 8 --context 8192"
    with tempfile.TemporaryDirectory() as folder:  # of which hundreds of MB are not kept
        monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true")
        stdout_of("plan.py", *arguments.split())  # a chip has one key/value head
        per_row, per_large, per_small = loop_bundles(pathlib.Path(folder), "ragged_decode")
    large, small = DECODE_BLOCKS[256, 1]
    assert per_row < per_small < per_large < per_small * large / small
    assert 8 * (per_row + 8192 // large * per_large) <= cycles


@needs_compiler
def test_what_does_not_fit_is_no_error(tmp_path):
    """A cache larger than the chip gives a verdict with the compiler's figure, and exit code 0."""
    dump = tmp_path / "step.hlo"
    arguments = "--model llama3.2-1b --topology v5e:1x1 --layers 1 --batch 512 --context 65536"
    found = planned(f"{arguments} --dump-hlo {dump}")
    assert not found["fits"] and found["peak_bytes"] > found["hbm_capacity_bytes"]
    assert not dump.exists()


@needs_compiler
def test_a_config_on_a_chosen_mesh_with_prefill(tmp_path):
    """A folder's config.json, --dp, --prefill and --dump-hlo, with the output as text."""
    dump = tmp_path / "step.hlo"
    arguments = f"--model {TINY} --topology v5e:2x2 --batch 4 --context 128 --dp 2 --tp 2 --prefill 16"
    arguments += f" --quantize none --kv-cache-dtype bfloat16 --dump-hlo {dump}"
    out = stdout_of("plan.py", *arguments.split())
    assert "dp 2 x ep 1 x tp 2" in out
    assert "Prefill, a chunk of 32 tokens of one row of each data shard: fits" in out
    assert "programs: 1 start, 1 layers, 1 finish" in out
    assert read_program(dump.read_text()).hbm_bytes > 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--model llama3.1-8b", 2, "--topology"),
        ("--model llama3.1-8b --topology v5e:2x2 --batch 0", 2, "--batch 0 is not at least 1"),
        ("--model llama3.1-8b --topology v5e:2x2 --context 8 --prefill 9", 2, "--prefill 9 is more than"),
        ("--model llama9 --topology v5e:2x2", 1, "--model llama9: no such model or config.json"),
        ("--model pyproject.toml --topology v5e:2x2", 1, "pyproject.toml: not valid JSON"),
        ("--model llama3.1-8b --topology v5e:2", 1, "--topology v5e:2: not of the form"),
        ("--model llama3.1-8b --topology v5e:2x2 --layers 33", 1, "--layers 33: the model has 32"),
        ("--model llama3.1-8b --topology v5e:2x2 --context 131073", 1, "limit is 131072 positions"),
    ],
)
def test_bad_input_is_one_line(arguments, code, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    found, out, err = invoke(monkeypatch, capsys, command, *arguments.split())
    assert (found, out) == (code, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"libtpu.* is not installed: pip install"):
        find_topology("v5e:4x4")


@needs_compiler
@pytest.mark.deep
def test_stages():
    """A device has half of the layers and all of the embedding; a turn exchanges hidden states once."""
    arguments = "--model llama3.1-8b --topology v5e:2x2 --slices 2 --batch 8 --context 1024 --tp 4"
    staged = planned(f"{arguments} --pp 2 --layers 4")
    layers_of_one = planned(f"{arguments} --dp 2 --layers 2")
    assert staged["mesh"] == dict(data=1, expert=1, tensor=4, stage=2)
    assert staged["between_stages"] == {"all-reduce": 2, "collective-permute": 1}
    assert staged["weights_bytes"] == layers_of_one["weights_bytes"]
    assert staged["cache_bytes"] == pytest.approx(2 * layers_of_one["cache_bytes"], rel=0.01)  # of two turns
    assert layers_of_one["between_stages"] == {}
    # The rest is the hidden states that are passed on, and the tokens.
    assert staged["hbm_bytes_per_step"] < 1.01 * layers_of_one["hbm_bytes_per_step"]


@pytest.mark.parametrize(
    ("degrees", "stages", "message"),
    [
        (
            (None, None, None),
            3,
            "--pp 3 on 4 devices: --dp x --ep x --tp x --pp must be the number of devices",
        ),
        ((None, None, 3), 1, "--tp 3 on 4 devices: --dp x --ep x --tp x --pp must be the number of devices"),
        ((None, 2, None), 1, "--ep 2 on 4 devices: expert parallelism 2 is for models with experts"),
        ((2, None, None), 1, "--batch 1: 2 data shards do not divide it"),
    ],
)
def test_a_mesh_that_cannot_be(degrees, stages, message):
    topology = Topology("v5e:2x2", CHIPS["v5e"], (2, 2), tuple(np.repeat(jax.devices()[:1], 4)))
    with pytest.raises(UserError, match=message):
        make_plan(Job(read_model("llama3.1-8b"), 1, 8192), topology, None, degrees, stages=stages)
