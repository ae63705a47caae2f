"""Which form of each product, and of attention, is the fastest on this GPU?

    python3 benchmarks/gpu_forms.py

Each line is a piece of work of a published model, and the forms that can do it: our kernels, and XLA, which
may call NVIDIA's libraries. The forms take turns in one run, and read arrays that together do not fit into
the GPU's caches. The form that the program uses comes first; the fastest one is named at the end. Beside its
microseconds a form has the share of a copy's bandwidth at which it has read weights or a cache, or, of many
rows, the share of a large product's operations. The exit code is 1 if a form's result is not that of the
first one, which is then WRONG, or if the first one fails.
"""

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import results
import speed
from kernel_checks import one_line

from feedback.errors import UserError
from model import SwiGLU
from ops import gpu, gpu_attention, gpu_products, matmul
from ops.kv_cache import KV, key_beside_value
from quantize import CHUNK, INT4, INT8, MXFP4, PAIR, TILE, QuantizedArray, values_and_scale
from terminal import launch
from terminal.command_line import OneLineParser, run

# Bytes that a program should read, twenty times an H100's L2 cache, and the most pieces of work in it.
READ, MOST_COPIES = 1 << 30, 64
CALLS = 4  # of a program, one behind the other, so that the GPU does not wait for Python
GROUP = INT4.group_size


@dataclasses.dataclass(frozen=True)
class Case:
    """A piece of work.

    forms: functions of the same inputs, by name; the one that the program uses is the first.
    make: the inputs from a key, at random. read: bytes of weights, or of a cache. operations: of products;
    0 if reading takes longer.
    """

    name: str
    forms: dict[str, Callable]
    make: Callable[[jax.Array], tuple]
    read: int
    operations: float = 0


def normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


# ------------------------------------------------------------------------------------- products with matrices

LLAMA_8B = {  # Llama 3.1 8B: the matrices by which one x is multiplied: (inputs, outputs of each)
    "q, k and v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate and up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
ACTIVATION = SwiGLU()
BITS = dict(bfloat16=16, int8=8, int4=4, mxfp4=4)


def random_matrix(key: jax.Array, format_name: str, D: int, M: int) -> jax.Array | QuantizedArray:
    """A matrix as a GPU holds it: [M,D], or of int4 [groups,I,M]."""
    if format_name == "bfloat16":
        return normal(key, M, D) * D**-0.5
    if format_name == "int8":
        values = jax.random.randint(key, (M, D), -127, 128, jnp.int8)
        return QuantizedArray(values, jnp.full(M, D**-0.5 / 64), INT8)
    values = jax.random.randint(key, (D // GROUP, GROUP, M), -8, 8, jnp.int8).astype(jnp.int4)
    return QuantizedArray(values, jnp.full((D // GROUP, M), D**-0.5 / 4, jnp.bfloat16), INT4)


def random_product(n: int, format_name: str, D: int, outputs: Sequence[int], key: jax.Array) -> tuple:
    keys = jax.random.split(key, 1 + len(outputs))
    matrices = (random_matrix(k, format_name, D, M) for k, M in zip(keys[1:], outputs, strict=True))
    return normal(keys[0], n, D), *matrices


def by_xla(x: jax.Array, *weights, dtype=jnp.bfloat16) -> list[jax.Array]:
    return [matmul.einsum_on_gpu("nD,MD->nM", x, w, dtype).astype(x.dtype) for w in weights]


def by_one_kernel(x: jax.Array, *weights, then: Callable | None = None) -> list[jax.Array]:
    """Floats by the kernel that multiplies by several matrices. then: a function that it computes of them."""
    dtype = x.dtype if then else None
    found = gpu_products.joined_dot(x, weights, then=then, dtype=dtype)
    return [jnp.sum(y, 0).astype(x.dtype) for y in found]


def by_integers(x: jax.Array, *weights, then: Callable | None = None) -> list[jax.Array]:
    """int8 by the same kernel."""
    pairs = [("nD,MD->nM", w) for w in weights]
    return [y.astype(x.dtype) for y in matmul.int8_products_on_gpu(x, pairs, x.dtype, then)]


def activated(form: Callable) -> Callable:
    """The form, and then the activation by XLA."""
    return lambda x, *weights: [ACTIVATION(*form(x, *weights))]


def by_experts_kernel(x: jax.Array, *weights, dot: Callable) -> list[jax.Array]:
    """int4, each matrix as a single expert, in one kernel."""
    every = [QuantizedArray(w.values[None], w.scale[None], w.format) for w in weights]
    return [y.astype(x.dtype) for y in dot(x, every, jnp.array([len(x)]))]


def one_by_one(x: jax.Array, *weights) -> list[jax.Array]:
    """int4, a kernel for each matrix."""
    return [y for w in weights for y in by_experts_kernel(x, w, dot=gpu_products.ragged_dot)]


def by_groups(x: jax.Array, *weights) -> list[jax.Array]:
    """int4 as any platform multiplies it."""
    return [w.format.einsum("nD,MD->nM", x, w, x.dtype).astype(x.dtype) for w in weights]


def after_conversion(x: jax.Array, *weights) -> list[jax.Array]:
    """A kernel of its own makes weights floats; a library's product follows."""
    products = []
    for w in weights:
        values, scale = values_and_scale(w)
        whole = values.astype(x.dtype)
        if values.ndim == 3:
            whole = (whole * scale[:, None].astype(x.dtype)).reshape(-1, values.shape[-1]).T
        y = jnp.einsum("nD,MD->nM", x, jax.lax.optimization_barrier(whole))
        products.append(y if values.ndim == 3 else (y * scale).astype(x.dtype))
    return products


OF_FEW_ROWS = {
    "bfloat16": {"XLA": by_xla, "one kernel": by_one_kernel},
    "int8": {"integers": by_integers, "XLA": by_xla},
    "int4": {
        "integers": partial(by_experts_kernel, dot=gpu_products.ragged_dot),
        "integers, one by one": one_by_one,
        "floats": partial(by_experts_kernel, dot=gpu_products.grouped_dot),
    },
}
ACTIVATED = {  # the products of gate and up, and the activation of both
    "bfloat16": {
        "XLA": activated(by_xla),
        "one kernel": activated(by_one_kernel),
        "the activation, too": partial(by_one_kernel, then=ACTIVATION),
    },
    "int8": {
        "the activation, too": partial(by_integers, then=ACTIVATION),
        "integers": activated(by_integers),
    },
}
OF_MANY_ROWS = {
    "bfloat16": {"XLA": by_xla, "XLA, to float32 first": partial(by_xla, dtype=jnp.float32)},
    "int8": {"XLA": by_xla, "after conversion": after_conversion},
    "int4": {"XLA": by_groups, "after conversion": after_conversion, "floats": OF_FEW_ROWS["int4"]["floats"]},
}


def products(
    rows: Sequence[int], forms: dict[str, dict], counted: bool, matrices: dict | None = None
) -> Iterator[Case]:
    """Products with the matrices of a layer. counted: it is their operations that take time."""
    for format_name, by_name in forms.items():
        for n in rows:
            for what, (D, outputs) in (matrices or LLAMA_8B).items():
                weights = D * sum(outputs)
                yield Case(
                    f"{what}, {format_name}, {n} rows", by_name,
                    partial(random_product, n, format_name, D, outputs), weights * BITS[format_name] // 8,
                    2.0 * n * weights * counted,
                )  # fmt: skip


def products_of_few(rows: Sequence[int]) -> Iterator[Case]:
    yield from products(rows, OF_FEW_ROWS, counted=False)
    gate_and_up = {"gate and up, activated": LLAMA_8B["gate and up"]}
    yield from products(rows, ACTIVATED, counted=False, matrices=gate_and_up)


# -------------------------------------------------------------------------------------- products with experts

EXPERTS = {  # one of an expert's matrices: (experts, chosen by each row, inputs, outputs)
    "Qwen3 30B": (128, 8, 2048, 768),
    "gpt-oss 20B": (32, 4, 2880, 2880),
    "Llama 4 Scout": (16, 1, 5120, 8192),
}


def random_mxfp4(key: jax.Array, E: int, D: int, M: int) -> QuantizedArray:
    """Random codes, and exponents of which products are near 1."""
    values = jax.random.randint(key, (E, D // PAIR, PAIR // 2, M), 0, 256, jnp.int32).astype(jnp.uint8)
    exponent = 127 - round(math.log2(3 * math.sqrt(D)))
    return QuantizedArray(values, jnp.full((E, -(-D // CHUNK), TILE, M), exponent, jnp.uint8), MXFP4)


def random_experts(n: int, format_name: str, E: int, A: int, D: int, M: int, key: jax.Array) -> tuple:
    """Rows in the order of their experts, a matrix for each expert, its number of rows, each row's expert."""
    of_x, of_w, of_choice = jax.random.split(key, 3)
    w: jax.Array | QuantizedArray
    if format_name == "mxfp4":
        w = random_mxfp4(of_w, E, D, M)
    elif format_name == "int4":
        w = random_matrix(of_w, format_name, D, E * M)
        groups = w.values.shape[0]
        values, scale = (y.reshape(*y.shape[:-1], E, M) for y in (w.values, w.scale))
        w = QuantizedArray(jnp.moveaxis(values, -2, 0), jnp.moveaxis(scale, -2, 0), INT4)
        assert w.scale.shape == (E, groups, M)
    else:
        w = values_and_scale(random_matrix(of_w, format_name, D, E * M))[0].reshape(E, M, D).swapaxes(1, 2)
    chosen = jax.vmap(lambda k: jax.random.permutation(k, E)[:A])(jax.random.split(of_choice, n))
    sizes = jnp.bincount(chosen.reshape(-1), length=E).astype(jnp.int32)
    return normal(of_x, n * A, D), w, sizes, jnp.sort(chosen.reshape(-1))


def experts(rows: Sequence[int]) -> Iterator[Case]:
    by_floats = {"floats": lambda x, w, sizes, expert: gpu_products.grouped_dot(x, [w], sizes)}
    forms = {"integers": lambda x, w, sizes, expert: gpu_products.ragged_dot(x, [w], sizes)} | by_floats
    by_row = {"row by row": lambda x, w, sizes, expert: gpu_products.dot_by_row(x, [w], expert)}
    for model_name, (E, A, D, M) in EXPERTS.items():
        for format_name, bits in BITS.items():
            if D % (PAIR if format_name == "mxfp4" else GROUP) and bits == 4:
                continue  # it has smaller groups, or none
            for n in rows:
                active = E * (1 - (1 - A / E) ** n)  # expected
                by_name = forms if format_name.startswith("int") else by_floats
                by_name = by_row | by_name if n == 1 else by_name
                yield Case(
                    f"an expert's matrix, {model_name}, {format_name}, {n} rows", by_name,
                    partial(random_experts, n, format_name, E, A, D, M), int(active * D * M * bits / 8),
                )  # fmt: skip


# -------------------------------------------------------------------------------------------------- attention


def random_cache(B: int, T: int, S: int, dtype: str, key: jax.Array) -> tuple:
    """Queries of the last T of S positions, and a cache, as of Llama 3.1 8B."""
    K, G, H = 8, 4, 128
    of_q, of_kv = jax.random.split(key)
    values, scale = normal(of_kv, B, K, S, 2 * H), None
    if dtype == "int8":
        values, scale = (32 * values).astype(jnp.int8), jnp.full((B, K, 2, S), 1 / 32, jnp.bfloat16)
    length = jnp.broadcast_to(S - T + 1 + jnp.arange(T), (B, T))
    return normal(of_q, B, T, K, G, H), KV(values, scale, key_beside_value(H)), length


def by_flash(q: jax.Array, kv: KV, length: jax.Array, programs: int, large_block: int) -> jax.Array:
    before = gpu.PROGRAMS, gpu_attention.LARGE_BLOCK
    gpu.PROGRAMS, gpu_attention.LARGE_BLOCK = programs, large_block
    try:
        return gpu_attention.attend_cached(q, kv, length)[0].astype(q.dtype)
    finally:
        gpu.PROGRAMS, gpu_attention.LARGE_BLOCK = before


def by_cudnn(q: jax.Array, kv: KV, length: jax.Array) -> jax.Array:
    """NVIDIA's library, which has no int8. Of a prompt it needs the whole one.

    It wants keys and values in arrays of their own, which are made here, and timed with it.
    """
    B, T, K, G, H = q.shape
    k, v = jnp.split(kv.values.swapaxes(1, 2), 2, -1)
    o = jax.nn.dot_product_attention(
        q.reshape(B, T, K * G, H), k, v, is_causal=T > 1, implementation="cudnn",
        key_value_seq_lengths=None if T > 1 else length[:, 0],
    )  # fmt: skip
    return o.reshape(q.shape)


def attention() -> Iterator[Case]:
    """Decode with long and short caches, and a prompt of 2048 tokens."""
    for B, T, S in (
        (1, 1, 1024),
        (1, 1, 8192),
        (32, 1, 1024),
        (32, 1, 8192),
        (128, 1, 1024),
        (1, 512, 2048),
        (1, 2048, 2048),
    ):
        for dtype in ("bfloat16", "int8"):
            counts = sorted((128, 256, 512, 1024), key=lambda n: n != gpu.PROGRAMS)
            block = gpu_attention.LARGE_BLOCK
            forms = {
                f"flash of {n} programs": partial(by_flash, programs=n, large_block=block) for n in counts
            }
            if dtype == "bfloat16" and T > 1:
                forms["flash by blocks of 64"] = partial(by_flash, programs=counts[0], large_block=64)
            if dtype == "bfloat16" and T in (1, S):
                forms["cuDNN"] = by_cudnn
            cache = B * 8 * S * 256 * BITS[dtype] // 8
            pairs = B * (T * S - T * (T - 1) // 2) * 32 if T > 1 else 0
            name = f"attention, cache in {dtype}, {B} rows, {T} queries to {S} positions"
            yield Case(name, forms, partial(random_cache, B, T, S, dtype), cache, 4.0 * 128 * pairs)


# ------------------------------------------------------------------------------------------------ measurement

PARTS = {
    "products": lambda: products_of_few((1, 8, 32, 64)),
    "prefill": lambda: products((512, 2048), OF_MANY_ROWS, counted=True),
    "experts": lambda: experts((1, 8, 32)),
    "attention": attention,
}


def repeated(form: Callable, inputs: list[tuple]):
    return [form(*each) for each in inputs]


def measure(case: Case, repeat: int, least: int, bandwidth: float, flops: float) -> dict:
    """Times of a case's forms, which take turns, and by how much their results differ from the first's.

    least: bytes that one run reads.
    """
    copies = 4 if case.operations else min(MOST_COPIES, math.ceil(least / case.read))
    make = jax.jit(case.make)
    inputs = [make(key) for key in jax.random.split(jax.random.key(0), copies)]
    programs, found, expected = {}, {}, None
    for name, form in case.forms.items():
        try:
            programs[name] = jax.jit(partial(repeated, form))
            result = jax.tree.map(lambda x: np.asarray(x, np.float32), programs[name](inputs)[0])
        except Exception as e:  # a compiler's error, for example
            del programs[name]
            found[name] = dict(ok=bool(found), failure=one_line(e))
            continue
        expected = result if expected is None else expected
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        error = float(np.max([np.abs(x - y).max() / np.abs(y).max() for x, y in pairs]))  # or NaN
        found[name] = dict(error=error, ok=error < 0.02)  # several roundings to bfloat16, of 2**-9 each
    seconds = {name: [] for name in programs}
    for _ in range(repeat):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready([program(inputs) for _ in range(CALLS)])
            seconds[name].append((time.perf_counter() - began) / copies / CALLS)
    floor = case.operations / flops if case.operations else case.read / bandwidth
    for name, each in seconds.items():
        median = statistics.median(each)
        found[name] |= dict(seconds=median, least=min(each), most=max(each), share=floor / median)
    return dict(name=case.name, read=case.read, operations=case.operations, copies=copies, forms=found)


def line(found: dict) -> str:
    forms, timed = found["forms"], {n: x for n, x in found["forms"].items() if "seconds" in x}
    told = []
    for name, x in forms.items():
        what = f"{1e6 * x['seconds']:.1f} us, {x['share']:.0%}" if name in timed else x["failure"]
        told.append(f"{'' if x['ok'] else 'WRONG '}{name} {what}")
    right = [name for name in timed if forms[name]["ok"]]
    fastest = min(right, key=lambda name: timed[name]["seconds"], default="no form")
    return f"{found['name']}: {'; '.join(told)}: {fastest}"


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    names = ", ".join(PARTS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help=f"default: {names}")
    parser.add_argument("--repeat", type=int, default=7, metavar="N", help="turns of each form; default: 7")
    parser.add_argument("--json", metavar="FILE", help="write all measurements there, after each line")
    args = parser.parse_args(arguments)
    parser.check_positive(args, "repeat")
    return args


def main() -> None:
    args = parse_arguments()
    results.check_writable(args.json)
    if jax.default_backend() != "gpu":
        raise UserError(f"the platform is {jax.default_backend()}: these are forms for GPUs")
    if gpu.missing:
        raise UserError(f"Pallas' Triton backend is missing: {gpu.missing}")
    bandwidth, flops = speed.measure_bandwidth(), speed.measure_flops(jnp.dtype("bfloat16"))
    rates = f"{bandwidth / 1e12:.2f} TB/s, products {flops / 1e12:.0f} TFLOP/s"
    print(f"{jax.devices()[0].device_kind}: a copy {rates}", flush=True)
    result = dict(device=jax.devices()[0].device_kind, bandwidth=bandwidth, flops=flops, cases=[])
    result |= results.versions_and_date()
    for part in args.only:
        launch.log(f"{part}: compiling and timing")
        for case in PARTS[part]():
            result["cases"].append(measure(case, args.repeat, READ, bandwidth, flops))
            print(line(result["cases"][-1]), flush=True)
            results.write(result, args.json)
    if not all(x["ok"] for case in result["cases"] for x in case["forms"].values()):
        sys.exit(1)


if __name__ == "__main__":
    run(main)
