"""When a device computes and when it waits: schedules of a few instructions, whose times are known."""

import dataclasses

import numpy as np
import pytest

from deployment.chips import CHIPS
from ops.grouped_matmul import FEW_ROWS
from planner.published_models import read_model
from planner.schedule import LEAST_ROWS, Schedule, expert_rows, read_schedule, rows_in_tiles
from planner.traffic import Reader

# A byte from HBM takes a second, and so does an operation of a product, or any other on a whole array.
CHIP = dataclasses.replace(CHIPS["v5e"], bandwidth=1.0, flops=1.0, vector=1.0)
HBM, VMEM = "{1,0:T(8,128)}", "{1,0:T(8,128)S(1)}"
SIZE = 4 * 8 * 128  # bytes of an array
ELEMENTS = 8 * 128


def schedule(text: str, collective: float = 100.0, expert_rows: float = 0.0) -> Schedule:
    return read_schedule(Reader(with_places(text)), CHIP, lambda x: collective * (x.bytes > 0), expert_rows)


def with_places(text: str) -> str:
    text = text.replace("HBM", "f32[8,128]" + HBM).replace("VMEM", "f32[8,128]" + VMEM)
    return text.replace("CONTEXT", "u32[]{:S(2)}")


SUM = "all-reduce(%y), replica_groups={{0,1}}, to_apply=%add"


def test_a_collective_beside_a_transfer():
    """The device waits for the collective, and HBM does not: what is left of the transfer comes after it."""
    text = f"""
ENTRY %main (x: f32[8,128], y: f32[8,128]) -> f32[8,128] {{
  %x = HBM parameter(0)
  %y = VMEM parameter(1)
  %start = (VMEM, HBM, CONTEXT) copy-start(%x)
  %sum = VMEM {SUM}
  %done = VMEM copy-done(%start)
  ROOT %z = VMEM add(%sum, %done)
}}
"""
    assert schedule(text) == Schedule(computing=ELEMENTS, memory=SIZE - 100, collectives=100)
    assert schedule(text, 0) == Schedule(computing=ELEMENTS, memory=SIZE)
    assert schedule(text, 2 * SIZE) == Schedule(computing=ELEMENTS, collectives=2 * SIZE)


def test_transfers_go_one_after_the_other():
    """Also those that an instruction makes itself, which begin when it begins."""
    text = """
ENTRY %main (x: f32[8,128], y: f32[8,128]) -> f32[8,128] {
  %x = HBM parameter(0)
  %y = HBM parameter(1)
  %start = (VMEM, HBM, CONTEXT) copy-start(%x)
  %own = VMEM negate(%y)
  ROOT %done = VMEM copy-done(%start)
}
"""
    assert schedule(text) == Schedule(computing=ELEMENTS, memory=2 * SIZE - ELEMENTS)


def test_permutations_beside_products():
    """Two directions at the same time, two in one direction one after the other, beside other work."""
    text = """
%product (a: f32[8,128], b: f32[128,128]) -> f32[8,128] {
  %a = VMEM parameter(0)
  %b = f32[128,128]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %c = VMEM convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (x: f32[8,128], w: f32[128,128]) -> f32[8,128] {
  %x = VMEM parameter(0)
  %w = f32[128,128]{1,0:T(8,128)S(1)} parameter(1)
  %up = (VMEM, VMEM) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %down = (VMEM, VMEM) collective-permute-start(%x), channel_id=2, source_target_pairs={{1,0},{0,1}}
  %again = (VMEM, VMEM) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1},{1,0}}
  %y = VMEM fusion(%x, %w), kind=kOutput, calls=%product
  %a = VMEM collective-permute-done(%up)
  %b = VMEM collective-permute-done(%down)
  ROOT %c = VMEM collective-permute-done(%again)
}
"""
    product = 2 * LEAST_ROWS * 128 * 128  # 8 rows take as long as LEAST_ROWS
    assert schedule(text) == Schedule(computing=product)
    assert schedule(text, product) == Schedule(computing=product, collectives=product)
    # Half of its time is latency, for which the second one of the same direction does not wait.
    found = read_schedule(Reader(with_places(text)), CHIP, lambda x: product if x.bytes else product / 2)
    assert found == Schedule(computing=product, collectives=product / 2)


def test_a_collective_in_several_fusions():
    """It begins in the first of them, and the last one waits for its end."""
    gather = "all-gather(%p), channel_id=2, replica_groups=[1,2]<=[2], dimensions={0}"
    text = f"""
%first (p: f32[8,128]) -> f32[16,128] {{
  %p = VMEM parameter(0)
  %inner = f32[16,128]{VMEM} {gather}
  ROOT %begun = f32[16,128]{VMEM} custom-call(%inner), custom_call_target="AsyncCollectiveStart"
}}

%next (p: f32[8,128]) -> f32[8,128] {{
  %p = VMEM parameter(0)
  %inner = f32[16,128]{VMEM} {gather}
  ROOT %work = VMEM negate(%p)
}}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {{
  %x = VMEM parameter(0)
  %start = f32[16,128]{VMEM} fusion(%x), kind=kCustom, calls=%first
  %fusion = VMEM fusion(%x), kind=kCustom, calls=%next
  %done = VMEM fusion(%x), kind=kCustom, calls=%next
  ROOT %y = VMEM add(%fusion, %done)
}}
""".replace("f32[16,128]VMEM", "f32[16,128]" + VMEM)
    assert schedule(text) == Schedule(computing=3 * ELEMENTS)
    assert schedule(text, 5000) == Schedule(computing=3 * ELEMENTS, collectives=5000 - 2 * ELEMENTS)


def test_trips_of_a_loop():
    text = f"""
%body (state: (f32[8,128], f32[8,128])) -> (f32[8,128], f32[8,128]) {{
  %state = (HBM, VMEM) parameter(0)
  %x = HBM get-tuple-element(%state), index=0
  %y = VMEM get-tuple-element(%state), index=1
  %start = (VMEM, HBM, CONTEXT) copy-start(%x)
  %sum = VMEM {SUM}
  %done = VMEM copy-done(%start)
  ROOT %next = (HBM, VMEM) tuple(%x, %done)
}}

%condition (state.1: (f32[8,128], f32[8,128])) -> pred[] {{
  %state.1 = (HBM, VMEM) parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (x: f32[8,128], y: f32[8,128]) -> (f32[8,128], f32[8,128]) {{
  %x = HBM parameter(0)
  %y = VMEM parameter(1)
  %init = (HBM, VMEM) tuple(%x, %y)
  ROOT %loop = (HBM, VMEM) while(%init), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""  # noqa: E501
    assert schedule(text) == Schedule(memory=3 * (SIZE - 100), collectives=300)


@pytest.mark.parametrize(
    ("shapes", "operation", "expected"),
    [
        (("f32[64,512]", "f32[512,256]", "f32[64,256]"), "dim_labels=bf_io->bf", 2 * 64 * 512 * 256),
        (
            ("bf16[64,4,128]", "bf16[256,4,128]", "f32[64,256,1]"),
            "window={size=4}, dim_labels=b0f_o0i->bf0",
            2 * 64 * 512 * 256,
        ),
        (("s8[64,512]", "s8[512,256]", "s32[64,256]"), "dim_labels=bf_io->bf", 64 * 512 * 256),
        (
            ("f32[3,64,512]", "f32[3,512,256]", "f32[3,64,256]"),
            "window={size=3 pad=2_2 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
            2 * 3 * 64 * 512 * 256,
        ),
    ],
)
def test_operations_of_a_product(shapes, operation, expected):
    left, right, out = (
        f"{shape}{{{','.join(map(str, range(shape.count(','), -1, -1)))}:S(1)}}" for shape in shapes
    )
    text = f"""
ENTRY %main (x: f32[], w: f32[]) -> f32[] {{
  %x = {left} parameter(0)
  %w = {right} parameter(1)
  ROOT %y = {out} convolution(%x, %w), {operation}
}}
"""
    assert schedule(text) == Schedule(computing=expected)


def test_operations_of_a_ragged_dot():
    """512 rows in 16 groups: 4 tiles of 128 rows and 15 more, whose 512 columns are two blocks of 384."""
    text = """
ENTRY %main (x: f32[]) -> f32[] {
  %start = s32[1]{0:S(1)} parameter(0)
  %ends = s32[17]{0:S(1)} parameter(1)
  %groups = s32[19]{0:S(1)} parameter(2)
  %x = bf16[512,5120]{1,0:S(1)} parameter(3)
  %w = s8[16,5120,512]{2,1,0:S(1)} parameter(4)
  ROOT %ragged-dot-none.1 = f32[512,512]{1,0:S(1)} custom-call(%start, %ends, %groups, %x, %w), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,5120,384"}
}
"""  # noqa: E501
    assert schedule(text) == Schedule(computing=2 * 19 * 128 * 5120 * 2 * 384)


def test_operations_of_experts():
    """Three products with 256 x 128 weights for each row, however many rows the chunk has."""
    text = """
ENTRY %main (x: f32[]) -> f32[] {
  %active = s32[4]{0:S(1)} parameter(0)
  %x = f32[512,256]{1,0:S(1)} parameter(1)
  %gate = s8[4,256,128]{2,1,0:S(1)} parameter(2)
  %up = s8[4,256,128]{2,1,0:S(1)} parameter(3)
  %down = s8[4,128,256]{2,1,0:S(1)} parameter(4)
  ROOT %active_experts.1 = f32[512,256]{1,0:S(1)} custom-call(%active, %x, %gate, %up, %down), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501
    assert schedule(text, expert_rows=700) == Schedule(computing=700 * 2 * 3 * 256 * 128)


def test_operations_of_a_state():
    """7 for each number and each of 3 tokens, which are 15 of 16 lines, on vector units of speed 1."""
    text = """
ENTRY %main (x: f32[]) -> f32[] {
  %keep = s32[8]{0:S(1)} parameter(0)
  %lines = f32[8,2,16,128]{3,2,1,0:S(1)} parameter(1)
  %state = f32[16,128,128]{2,1,0:S(1)} parameter(2)
  ROOT %delta_steps.1 = f32[16,128,128]{2,1,0:S(1)} custom-call(%keep, %lines, %state), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501
    assert schedule(text) == Schedule(computing=7 * 3 * 16 * 128 * 128)


def test_operations_of_chunks():
    """Of 2 key heads with 2 value heads each, 128 tokens; each product is done three times."""
    text = """
ENTRY %main (x: f32[]) -> f32[] {
  %q = f32[1,2,128,128]{3,2,1,0:S(1)} parameter(0)
  %k = f32[1,2,128,128]{3,2,1,0:S(1)} parameter(1)
  %v = bf16[1,4,128,256]{3,2,1,0:S(1)} parameter(2)
  %gates = f32[1,1,8,128]{3,2,1,0:S(1)} parameter(3)
  %state = f32[8,4,128,256]{3,2,1,0:S(1)} parameter(4)
  ROOT %delta_chunks.1 = f32[8,4,128,256]{3,2,1,0:S(1)} custom-call(%q, %k, %v, %gates, %state), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501
    triangles = 2 * 2 * 128 * 128 * 128  # of 2 key heads, both keys and queries, with 128 keys of width 128
    inverses = 4 * 10 * 64 * 128 * 128  # the matrices of both chunks are 64 rows of 128
    others = 4 * (2 * 128 * 128 * 256 + 3 * 128 * 128 * 256)  # with 128 columns, with the state
    assert schedule(text) == Schedule(computing=3 * 2 * (triangles + inverses + others))


def test_rows_of_experts():
    """That the kernel multiplies: all of few, tiles of an expert's own rows of many; on average of draws."""
    scout = read_model("llama4-scout")
    assert expert_rows(scout, 1) == pytest.approx(LEAST_ROWS)  # by one expert
    active = 4 * (1 - (15 / 16) ** FEW_ROWS)  # of the 4 experts of a shard
    assert expert_rows(scout, FEW_ROWS, shards=4) == pytest.approx(active * FEW_ROWS)
    draws = np.random.default_rng(0).multinomial(512, [1 / 16] * 16, 2000)
    tiles = np.select([draws > 64, draws > 32, draws > 0], [96, 64, 32])  # none has more than 96
    assert draws.max() <= 96 and expert_rows(scout, 512) == pytest.approx(tiles.sum(1).mean(), rel=0.01)
    assert rows_in_tiles(300) == 4 * 64 + 64 and rows_in_tiles(0) == 0
    # How many rows are multiplied for each row that has work.
    assert expert_rows(scout, 512) / 512 < 1.5 and expert_rows(scout, 2048) / 2048 < 1.2


def test_operations_of_attention():
    """Queries of 8 heads with one head of keys and one of values, which may have other columns."""
    text = """
ENTRY %main (x: f32[]) -> f32[] {
  %mask = s8[1,1]{1,0:S(1)} parameter(0)
  %q = bf16[8,512,128]{2,1,0:S(1)} parameter(1)
  %k = bf16[1024,128]{1,0:S(1)} parameter(2)
  %v = bf16[1024,256]{1,0:S(1)} parameter(3)
  ROOT %splash_mqa.1 = bf16[8,512,256]{2,1,0:S(1)} custom-call(%mask, %q, %k, %v), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501
    assert schedule(text) == Schedule(computing=2 * 8 * 512 * 1024 * (128 + 256))
