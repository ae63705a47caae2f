"""The kernels of this platform beside plain numpy in float64, on small random arrays.

`checks` lists what the platform runs, by the tables in which ops/ and ragged_attention.py choose a kernel;
`run_check` runs one of them. The arrays are bfloat16, int8 or what a number format stores, and numpy computes
with exactly these numbers. Letters as in model.py.

What a kernel may differ by: it may round each number that it multiplies to bfloat16, for example a key, a
probability or a weight that was int4. Such an error is at most ROUNDING of the number, and the errors are
independent of one another. So the error of a sum of products a·b has a standard deviation of at most
ROUNDING times the root of the sum of (a·b)², and it exceeds DEVIATIONS of them about once in 10^9 sums. A
slot too many or too few, a wrong scale or a wrong expert changes a result by more. The sums themselves are in
float32.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import results  # noqa: F401  it adds the repository's folder to Python's path
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import model
import ragged_attention
from ops import attention, gpu_attention, grouped_matmul, matmul, tpu
from ops.kv_cache import KV, SlotLayout, key_beside_value, map_slots
from ops.platform import choose
from quantize import FORMATS, Format, QuantizedArray, quantize
from sharding.arrays import ArrayInfo
from sharding.collective_matmul import products
from sharding.mesh import SLOTS as SHARED
from sharding.slots import slot_mapping, visible_slots

ROUNDING = 2**-8  # of bfloat16, which has 8 significant bits: the largest error, relative to the number
DEVIATIONS = 6
FLOAT32 = 1e-5  # what sums in float32 may differ by: all results here are around 1
SLOTS = 384  # of a cache: three blocks of a TPU's lanes
WIDTHS = (128, 64)  # of a key
SEEN = 200  # tokens in a window; its cache is a ring
FULL, WINDOW = model.Full(), model.Window(SEEN, SLOTS - SEEN)

Case = tuple[Callable, Callable]  # see Check


@dataclasses.dataclass(frozen=True)
class Check:
    """What a platform computes in one number format.

    job: what it is for. option: how a user chooses the format. kind: of kernel, see `choose`. by: the
    function that the platform has for it. cases: pairs (function, make). make(rng) returns the function's
    arguments, what numpy computes in the place of its results, and by how much each element may differ.
    """

    job: str
    option: str
    kind: str
    by: Callable
    cases: list[Case]


PLAIN = (  # functions without a kernel
    attention.attend_cached, attention.attend_causal, attention.write,
    matmul.plain_einsum, matmul.take_rows, grouped_matmul.plain_ragged_dot,
)  # fmt: skip


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def run_check(check: Check, seeds: int) -> dict:
    """Compare each case on `seeds` random inputs, on this process's first device.

    Of the result, error: the largest of all elements. share: the largest part of what an element may differ
    by. failure: in one line, what was raised, or that a number is missing. remedy: what a user can do.
    """
    device = np.array(jax.local_devices()[:1]).reshape(1, 1)
    mesh = Mesh(device, SHARED, axis_types=(AxisType.Auto,) * 2)  # the axes that `visible_slots` asks for
    kernels, error, share, failure = {}, 0.0, 0.0, None
    try:
        for function, make in check.cases:
            mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            for seed in range(seeds):
                arguments, expected, allowed = make(np.random.default_rng(seed))
                if seed == 0:
                    traced = jax.jit(mapped).trace(*arguments)
                    kernels |= dict.fromkeys(pallas_kernels(traced.jaxpr.jaxpr))
                    compiled = traced.lower().compile()
                result = jax.block_until_ready(compiled(*arguments))
                for parts in zip(jax.tree.leaves(result), expected, allowed, strict=True):
                    found = difference(*parts)
                    error, share = max(error, found[0]), max(share, found[1])
    except Exception as e:  # a compiler's, for example
        failure = one_line(e)
    if share == np.inf and not failure:
        failure = "NaN or Inf where numpy has none, or the reverse"
    ok = failure is None and share <= 1
    own = f"{check.by.__module__.removeprefix('ops.')}.{check.by.__name__}"
    return dict(
        name=f"{check.job}, {check.option}, by {' and '.join(kernels or [own])}", ok=ok, failure=failure,
        error=None if failure else error, share=None if failure else share,
        remedy=None if ok else remedy(check),
    )  # fmt: skip


def difference(result, expected: np.ndarray, allowed: np.ndarray) -> tuple[float, float]:
    """The largest error, and its largest share of what is allowed. Both are infinite if there is NaN for a
    number. Where `allowed` is infinite, any result is right.
    """
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((result == expected) | np.isinf(allowed), 0, np.abs(result - expected))
    error = np.where(np.isnan(error), np.inf, error)
    return float(error.max()), float((error / allowed).max())


def pallas_kernels(jaxpr) -> Iterator[str]:
    """The names of the Pallas kernels that a traced program calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield str(equation.params.get("name") or "a Pallas kernel")
        else:
            for value in jax.tree.leaves(list(equation.params.values())):
                inner = getattr(value, "jaxpr", value)
                yield from pallas_kernels(inner) if hasattr(inner, "eqns") else ()


def remedy(check: Check) -> str:
    """What a user can do about a check that fails."""
    if check.by in PLAIN:
        return "XLA computes it without a kernel; another number format may avoid it"
    return f"LLAMA_JAX_PLAIN={check.kind} computes it without this kernel, more slowly"


def normal(rng, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), "bfloat16")


# ------------------------------------------------------------------------------------------------- references


def numpy_attention(q, k, v, mask, scale=None):
    """q [B,T,K,G,H], k, v [B,K,S,H], mask [B,T,S], in float64 -> (o, lse)."""
    q = np.asarray(q, np.float64)
    scores = np.einsum("BTKGH,BKSH->BTKGS", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = np.where(mask[:, :, None, None], scores, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None])
    return np.einsum("BTKGS,BKSH->BTKGH", p, v), lse


def attention_and_error(q, k, v, mask) -> tuple[tuple, tuple]:
    """`numpy_attention`, and by how much o and lse may differ.

    A score has the errors of a key's H numbers; then a probability and a value are rounded, too.
    """
    o, lse = numpy_attention(q, k, v, mask)
    q = np.asarray(q, np.float64)
    scores = np.einsum("BTKGH,BKSH->BTKGS", q, k) * q.shape[-1] ** -0.5
    shift = np.where(np.isfinite(lse), lse, np.inf)[..., None]
    p = np.where(mask[:, :, None, None], np.exp(scores - shift), 0)
    of_score = np.einsum("BTKGH,BKSH->BTKGS", q**2, k**2) / q.shape[-1]
    of_term = p**2 * (2 + of_score)
    of_o = np.einsum("BTKGS,BKSH->BTKGH", of_term, v**2) + o**2 * of_term.sum(-1, keepdims=True)
    return (o, lse), tuple(map(allow, (of_o, (p**2 * of_score).sum(-1))))


def allow(squares: np.ndarray) -> np.ndarray:
    """What a sum may differ by. squares: the sum of the squares of what is rounded."""
    return DEVIATIONS * ROUNDING * np.sqrt(squares) + FLOAT32


def experts_and_error(x, weight, gates, ups, downs) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the experts' MLPs, x [R,D], times weight [R,E], and by how much it may differ."""
    total, squares = 0.0, 0.0
    for factor, gate, up, down in zip(weight.T[..., None], gates, ups, downs, strict=True):
        g, u = x @ gate, x @ up
        silu = g / (1 + np.exp(-g))
        hidden = silu * u
        # The derivative of silu is at most 1.1.
        of_hidden = (1.1 * u) ** 2 * (x**2 @ gate**2) + silu**2 * (x**2 @ up**2) + hidden**2
        total = total + factor * (hidden @ down)
        squares = squares + factor**2 * ((of_hidden + hidden**2) @ down**2)
    return total, allow(squares)


# ------------------------------------------------------------------------------------------------- attention


def kv_of(values: np.ndarray, dtype="float32", layout: SlotLayout | None = None) -> KV:
    """[B,K,S,C] float -> KV, by default keys beside values. A latent's value is a part of its key."""
    parts, layout = (1, layout) if layout else (2, key_beside_value(values.shape[-1] // 2))
    if dtype != "int8":
        return KV(jnp.asarray(values, dtype), None, layout)
    both = quantize(jnp.float32(values).reshape(*values.shape[:3], parts, -1), (4,), jnp.bfloat16)
    scale = jnp.tile(both.scale.swapaxes(2, 3), (1, 1, 2 // parts, 1))
    return KV(both.values.reshape(values.shape), scale, layout)


def exact(kv: KV) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values that a KV stands for, [B,K,S,H] float64."""
    values = np.asarray(kv.values, np.float64)
    both = values[..., : kv.layout.key], values[..., slice(*kv.layout.value)]
    if kv.scale is None:
        return both
    return tuple(x * np.asarray(kv.scale, np.float64)[:, :, i, :, None] for i, x in enumerate(both))


def poisoned(kv: KV, used: np.ndarray) -> KV:
    """With NaN in the slots that are not used, [B,S] bool: in the values, or in the scales of int8."""
    if kv.scale is None:
        return KV(jnp.where(used[:, None, :, None], kv.values, jnp.nan), None, kv.layout)
    return KV(kv.values, jnp.where(used[:, None, None], kv.scale, jnp.nan), kv.layout)


def written(kv: KV, new: KV, place: np.ndarray, row: np.ndarray) -> KV:
    """A cache in float32 with T new slots in the places [B,T] of its rows [B]; one beyond the end is none."""

    def put(axis: int, cache, new) -> np.ndarray:
        cache, new = (np.moveaxis(np.array(x, np.float32), axis, 1) for x in (cache, new))  # B, slots, ...
        for r, tokens, places in zip(row, new, place, strict=True):
            inside = places < cache.shape[1]
            cache[r, places[inside]] = tokens[inside]
        return np.moveaxis(cache, 1, axis)

    return map_slots(put, kv, new)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Which tokens a case reads: T of each of five rows, of which the first `count` are no padding.

    mask: FULL, or WINDOW, whose cache is a ring. row: [5] int32, of a cache of six rows; None: of a cache of
    five. start, count: [5] int. at_once: the cache has the piece, and each token sees those up to itself.
    """

    mask: model.Mask
    T: int
    row: np.ndarray | None
    start: np.ndarray
    count: np.ndarray
    at_once: bool

    @property
    def rows(self) -> np.ndarray:
        return np.arange(5) if self.row is None else self.row

    @property
    def cached_rows(self) -> int:
        return 5 if self.row is None else 6

    @property
    def chunk(self) -> model.Chunk:
        return model.chunk_at(jnp.int32(self.start), jnp.int32(self.count), self.T, self.row)

    def seen(self) -> np.ndarray:
        """Which slots of its row each token sees, [5,T,SLOTS] bool: by the position that is in a slot."""
        last = self.start + self.count * self.at_once - 1  # of the positions in the cache
        slot, at = np.arange(SLOTS), (self.start[:, None] + np.arange(self.T))[..., None]
        held = last[:, None] - (last[:, None] - slot) % SLOTS  # the latest that has gone to this slot
        held = np.where(self.count[:, None] > 0, held, -1)[:, None]
        return (held >= 0) & (held <= at) & (held > at - (self.mask.window or 2 * SLOTS))

    def places(self) -> np.ndarray:
        """The slot that each token is written to, [5,T] int; SLOTS for padding."""
        at = self.start[:, None] + np.arange(self.T)
        return np.where(np.arange(self.T) < self.count[:, None], at % SLOTS, SLOTS)

    def of_cache(self, x: np.ndarray) -> np.ndarray:
        """x, [5,...] bool of the rows of the piece, by rows of the cache; False for one that is not read."""
        whole = np.zeros((self.cached_rows, *x.shape[1:]), bool)
        whole[self.rows] = x
        return whole


def piece_of(rng, mask: model.Mask, T: int, some: bool, at_once: bool) -> Piece:
    """Rows of which no token is read, which begins, whose visible slots do not go around the ring, whose do,
    and which reaches the end of the cache. some: of the cache's rows, in another order.

    In a tile of queries of which only some see slots up to the ring's end, a GPU also reads slots that nobody
    sees. Tokens of the same row are in them, never NaN. Here all queries of a row are of one kind.
    """
    end = SLOTS - T * at_once
    start = [rng.integers(1, end), 0, rng.integers(SEEN + 9, end), rng.integers(1, end), end]
    if mask.ring:
        start[3:] = rng.integers(SLOTS + 9, SLOTS + SEEN - T), 2 * SLOTS - (T + 1) // 2
    count = [0, T, T, rng.integers(1, T + 1), T]
    row = np.array([4, 0, 5, 2, 1], np.int32) if some else None
    return Piece(mask, T, row, np.array(start), np.array(count), at_once)


def decode_case(dtype: str, H: int, mask: model.Mask, some: bool) -> Case:
    """One token of each row: written into its slot, then it attends to the row. Other slots hold NaN.

    What a row gets that reads no token does not matter.
    """
    K, G = 2, 4

    def function(q, new, kv, chunk):
        length, gap = visible_slots(chunk, mask, has_chunk=True)
        place = slot_mapping(chunk, mask, SLOTS)
        return ragged_attention.ragged_decode(q, new, kv, length, place, gap, chunk.row)

    def make(rng):
        piece, q = piece_of(rng, mask, 1, some, at_once=True), normal(rng, 5, 1, K, G, H)
        sizes = (piece.cached_rows, SLOTS), (5, 1)
        kv, new = (kv_of(rng.standard_normal((B, K, n, 2 * H)), dtype) for B, n in sizes)
        place, seen = piece.places(), piece.seen()
        used, fresh = piece.of_cache(seen[:, 0]), piece.of_cache(np.arange(SLOTS) == place)
        given, after = poisoned(kv, used & ~fresh), written(kv, new, place, piece.rows)
        expected, of_values = attention_and_error(q, *(x[piece.rows] for x in exact(after)), seen)
        idle = (piece.count == 0).reshape(5, 1, 1, 1, 1)
        of_values = np.where(idle, np.inf, of_values[0]), np.where(idle[..., 0], np.inf, of_values[1])
        cache, known = jax.tree.leaves(after), (used[:, None, :, None], used[:, None, None])
        of_cache = [np.where(x, FLOAT32, np.inf) for x in known[: len(cache)]]  # of values, and of scales
        return (q, new, given, piece.chunk), (*expected, *cache), (*of_values, *of_cache)

    return function, make


def cached_case(dtype: str, H: int, T: int, mask: model.Mask, some: bool, at_once: bool = False) -> Case:
    """A piece of a prompt attends to what its rows have in the cache. Slots that nobody sees hold NaN."""
    K, G = 2, 4

    def function(q, kv, chunk):
        length, gap = visible_slots(chunk, mask, has_chunk=at_once)
        return ragged_attention.attend_cached(q, kv, length, gap, chunk.row)

    def make(rng):
        piece, q = piece_of(rng, mask, T, some, at_once), normal(rng, 5, T, K, G, H)
        kv = kv_of(rng.standard_normal((piece.cached_rows, K, SLOTS, 2 * H)), dtype)
        seen = piece.seen()
        given = poisoned(kv, piece.of_cache(seen.any(1)))
        expected = attention_and_error(q, *(x[piece.rows] for x in exact(kv)), seen)
        return (q, given, piece.chunk), *expected

    return function, make


def causal_case(dtype: str, H: int, window: int | None) -> Case:
    """The tokens of a piece of a prompt attend to one another, in two segments, or in a window."""
    B, T, K, G = 2, 128, 2, 4

    def make(rng):
        q, kv = normal(rng, B, T, K, G, H), kv_of(rng.standard_normal((B, K, T, 2 * H)), dtype)
        cut = T if window else rng.integers(1, T, (B, 1))
        segment = (np.arange(T) >= cut) * np.ones((B, 1), int)
        back = np.arange(T)[:, None] - np.arange(T)
        seen = (back >= 0) & (back < (window or T)) & (segment[..., None] == segment[:, None])
        return (q, kv, jnp.int32(segment)), *attention_and_error(q, *exact(kv), seen)

    return partial(ragged_attention.attend_causal, window=window), make


def write_case(dtype: str, H: int, mask: model.Mask, some: bool) -> Case:
    """The tokens of a piece of a prompt go to their slots, those behind its end to none."""
    T, K = 32, 2

    def function(kv, new, chunk):
        place = slot_mapping(chunk, mask, SLOTS)
        return ragged_attention.write(kv, new, place, chunk.row, T + 1, ring=mask.ring is not None)

    def make(rng):
        piece = piece_of(rng, mask, T, some, at_once=True)
        sizes = (piece.cached_rows, SLOTS), (5, T)
        kv, new = (kv_of(rng.standard_normal((B, K, n, 2 * H)), dtype) for B, n in sizes)
        expected = jax.tree.leaves(written(kv, new, piece.places(), piece.rows))
        return (kv, new, piece.chunk), expected, [FLOAT32] * len(expected)

    return function, make


# ---------------------------------------------------------------------------------------------------- weights


def encoded(rng, info: ArrayInfo, format: Format | None) -> tuple[jax.Array | QuantizedArray, np.ndarray]:
    """A random weight as the platform holds it, and what it stands for, float64. Its products are near 1."""
    size = np.sqrt(np.prod([info.shape[axis] for axis in info.contracted_axes]))
    w = jnp.asarray(rng.standard_normal(info.shape) / size, "bfloat16")
    held = format and format.for_array(info)
    if held is None:
        return w, np.asarray(w, np.float64)
    q = held.encode(w, info)
    return q, np.asarray(q.format.decode(q, info), np.float64)


def product_case(format: Format | None, spec: str, contracted: str, B: int, T: int) -> Case:
    """Activations of T tokens in each of B rows times a matrix. spec: as of `matmul.einsum`."""
    ours, theirs = spec.partition("->")[0].split(",")
    sizes = dict(b=B, T=T, D=256, f=384, k=4, g=2, U=64)
    info = ArrayInfo(theirs, contracted, shape=tuple(sizes[letter] for letter in theirs))

    def make(rng):
        x = normal(rng, *(sizes[letter] for letter in ours))
        (w, whole), known = encoded(rng, info, format), np.asarray(x, np.float64)
        squares = np.einsum(spec, known**2, whole**2, optimize=True)
        return (x, w), [np.einsum(spec, known, whole, optimize=True)], [allow(squares)]

    return partial(matmul.einsum, spec, out_dtype=jnp.float32), make


def products_case(format: Format | None) -> Case:
    """A token of each of 8 rows times three matrices, as model.py computes queries, keys and values."""
    specs = "bTD,kgHD->bTkgH", "bTD,khD->bTkh", "bTD,kUD->bTkU"
    sizes = dict(D=256, k=4, g=2, H=64, h=64, U=20)  # of the letters; 512, 256 and 80 columns
    letters = [spec.partition("->")[0].split(",")[1] for spec in specs]
    infos = [ArrayInfo(x, "D", shape=tuple(sizes[letter] for letter in x)) for x in letters]

    def function(x, *matrices):
        return products(x, *zip(specs, matrices, strict=True))

    def make(rng):
        x = normal(rng, 8, 1, 256)
        matrices, whole = zip(*(encoded(rng, info, format) for info in infos), strict=True)
        known, expected, allowed = np.asarray(x, np.float64), [], []
        for spec, w in zip(specs, whole, strict=True):
            expected.append(np.einsum(spec, known, w, optimize=True))
            # The products are rounded, too.
            squares = np.einsum(spec, known**2, w**2, optimize=True) + expected[-1] ** 2
            allowed.append(allow(squares))
        return (x, *matrices), expected, allowed

    return function, make


def experts_case(format: Format | None, R: int) -> Case:
    """R rows, each through two experts of eight; or through one here and one of another device."""
    E, D, M, A = 8, 256, 256, 2
    infos = [ArrayInfo("eDm", "D", shape=(E, D, M))] * 2 + [ArrayInfo("emD", "m", shape=(E, M, D))]

    def make(rng):
        x = normal(rng, R, D)
        expert = np.stack([rng.permutation(E + 1)[:A] for _ in range(R)])
        factor, weight = rng.uniform(0.2, 0.9, (R, A)).astype(np.float32), np.zeros((R, E + 1))
        np.put_along_axis(weight, expert, factor, 1)
        matrices, whole = zip(*(encoded(rng, info, format) for info in infos), strict=True)
        expected, allowed = experts_and_error(np.asarray(x, np.float64), weight[:, :E], *whole)
        return (x, jnp.int32(expert), factor, *matrices), [expected], [allowed]

    options = dict(biases=(None,) * 3, activation=model.SwiGLU(), scales="output")
    return partial(grouped_matmul.expert_mlp, **options), make


def rows_case(format: Format | None) -> Case:
    """Tokens' rows of the embedding."""
    info = ArrayInfo("vD", "D", shape=(1024, 256))

    def make(rng):
        (w, whole), tokens = encoded(rng, info, format), rng.integers(0, 1024, (3, 2))
        return (w, jnp.int32(tokens)), [whole[tokens]], [FLOAT32]

    return matmul.take_rows, make


# -------------------------------------------------------------------------------------------------- the list


def checks(platform: str) -> Iterator[Check]:
    """What a platform runs, "cpu", "gpu" or "tpu", in each number format that it has a product of."""

    def attends(reference: Callable, plain: Callable | None = None) -> Callable:
        key = platform, reference
        return choose("attention", ragged_attention.KERNELS, key, plain or reference)

    references = attention.attend_cached, attention.attend_causal, attention.write
    to_cache, to_prompt, writes = map(attends, references)
    decodes = attends(ragged_attention.write_then_attend, to_cache)
    at_once = to_cache is gpu_attention.attend_cached  # see `sees_by_query`
    for dtype in ("float32",) * (platform == "cpu") + ("bfloat16", "int8"):
        option = f"--kv-cache-dtype {dtype}"
        # Only on CPUs a token of some rows is decoded, see `decode_rows` of serving/programs.py.
        tokens = [(64, FULL, False), (128, FULL, False), (128, WINDOW, platform == "cpu")]
        # In a ring a piece may overwrite what it sees; so it attends to it as it was before.
        pieces = [(64, 8, WINDOW, False), (64, 128, FULL, False, at_once)]
        pieces += [(128, 8, FULL, True, at_once), (128, 128, WINDOW, True)]
        writings = [(64, WINDOW, True), (128, FULL, False)]
        prompts = [causal_case(dtype, H, window) for H in WIDTHS for window in (None, 50)]
        for job, by, cases in (
            ("attention in decode", decodes, [decode_case(dtype, *case) for case in tokens]),
            ("attention in prefill to the cache", to_cache, [cached_case(dtype, *case) for case in pieces]),
            ("attention in prefill to the prompt", to_prompt, prompts),
            ("writing the cache in prefill", writes, [write_case(dtype, *case) for case in writings]),
        ):
            yield Check(job, option, "attention", by, cases)
    of_experts = {("tpu", scheme): grouped_matmul.active_experts for scheme in grouped_matmul.SCHEMES}
    for name in ("none", "int8", "int4", "fp8", "mxfp4"):
        format = FORMATS[name]
        if format and format.on(platform) != format:
            continue  # it is held as int8
        option, key = f"--quantize {name}", (platform, format.scheme if format else "float")
        by = choose("experts", grouped_matmul.RAGGED_DOTS | of_experts, key, grouped_matmul.plain_ragged_dot)
        yield Check("experts", option, "experts", by, [experts_case(format, R) for R in (1, 3, 100)])
        if name == "mxfp4":
            continue  # of experts alone
        by = choose("matmul", matmul.KERNELS, key, matmul.plain_einsum)
        sizes = (1, 1), (8, 1), (1, 32), (2, 160)  # of one row, of few, and of two kinds of many
        cases = [product_case(format, "bTD,fD->bTf", "D", *size) for size in sizes]
        cases += [product_case(format, "bTkgU,DkgU->bTD", "kgU", 8, 1), products_case(format)]
        yield Check("matrix product", option, "matmul", by, cases)
        if name in ("none", "int8"):
            by = choose("matmul", {("tpu", key[1]): tpu.take_rows}, key, matmul.take_rows)
            yield Check("rows of the embedding", option, "matmul", by, [rows_case(format)])
