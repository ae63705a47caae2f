"""Weights that others quantized, read as floats.

A tensor is dequantized when it is read, some rows at a time: (values - zero points) * scales in float32,
where only the product is rounded. An unknown field of config.json's quantization_config is refused.

Sources: the projects that write these formats, vllm-project/compressed-tensors, ModelCloud/GPTQModel,
casper-hansen/AutoAWQ, deepseek-ai/DeepSeek-V3 (fp8), transformers' FbgemmFp8Config for Meta's own, and for
MXFP4 the OCP Microscaling Formats specification 1.0 and transformers' integrations/mxfp4.py.
"""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ml_dtypes import float8_e4m3fn

from checkpoints.tensor_files import FLOAT_TYPES, StoredTensor, TensorFile
from distributed.exchange import warn
from families.fields import ConfigFields
from feedback.errors import UserError
from quantize import BLOCK

WORD = 32  # bits
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in a word of each of eight columns
E4M3 = np.arange(256, dtype=np.uint8).view(float8_e4m3fn).astype(np.float32)  # the value of each byte
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # of each code
WORDS, NUMBERS, SCALES = ("I32",), ("I32", "I64"), FLOAT_TYPES
TYPES = {  # of a quantized weight's tensors, by the end of their names
    "qweight": WORDS, "qzeros": WORDS, "scales": SCALES, "g_idx": NUMBERS,
    "weight_packed": WORDS, "weight_zero_point": WORDS, "weight_shape": NUMBERS, "weight_g_idx": NUMBERS,
    "weight": ("I8", "F8_E4M3"), "weight_scale": SCALES, "weight_scale_inv": SCALES,
    "blocks": ("U8",),
}  # fmt: skip
Rows = Callable[[int, int], np.ndarray]  # [lo, hi) -> [hi - lo, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Dequantized:
    """A float32 tensor that is computed from stored ones. It has the attributes of a StoredTensor, and:

    parts: the stored tensors. rows: computes rows [lo, hi).
    int8:  int8 values and one float32 scale per row, if the tensor is stored in that way.
    mxfp4: whether the tensor is stored as MXFP4.
    users: how many tensors are computed of the same parts, each of its own share.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]
    rows: Rows
    dtype: str = "F32"
    int8: "tuple[StoredTensor, Dequantized] | None" = None
    mxfp4: bool = False
    users: int = 1

    __str__ = StoredTensor.__str__

    @property
    def nbytes(self) -> int:
        """Bytes of the file, of which the tensor is computed."""
        return sum(part.nbytes for part in self.parts) // self.users

    @property
    def file(self) -> TensorFile:
        return self.parts[0].file

    @property
    def remote(self) -> bool:
        return self.parts[0].remote

    @property
    def values(self) -> np.ndarray:
        return self.rows(0, self.shape[0])

    def read(self, lo: int, hi: int, select: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return select(self.rows(lo, hi))

    def holds(self, part: np.ndarray) -> bool:
        return False

    def forget(self) -> None:
        for part in self.parts:
            part.forget()

    def sample(self) -> str:
        return hashlib.sha256("".join(part.sample() for part in self.parts).encode()).hexdigest()


class Parts(NamedTuple):
    """The stored tensors of one quantized weight, by the ENDs of their names.

    base: what precedes the END, with the dot or underscore between the two.
    """

    base: str
    tensors: dict[str, StoredTensor]

    def get(self, end: str, *shape: int | None, types: tuple[str, ...] | None = None) -> StoredTensor:
        """The tensor of this END. Raises UserError if it is missing or has another shape; None: any size.

        types: that it may have, by default those in TYPES.
        """
        if end not in self.tensors:
            other = next(iter(self.tensors.values()))
            raise UserError(f"{other} is there, but {self.base}{end} is missing")
        tensor = self.tensors[end]
        known = [b if a is None else a for a, b in zip(shape, tensor.shape, strict=False)]
        if len(tensor.shape) != len(shape) or known != list(tensor.shape):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            self.refuse(end, f"has shape {tensor.shape}, not ({wanted})")
        types = types or TYPES[end]
        if tensor.dtype not in types:
            self.refuse(end, f"has type {tensor.dtype}, not {' or '.join(types)}")
        return tensor

    def refuse(self, end: str, what: str):
        raise UserError(f"{self.tensors[end]} {what}")


class Method(NamedTuple):
    """A quantization method with the settings of a config.json.

    ends:  of the names of a weight's tensors; a weight that has the first of them is quantized.
    read:  from a weight's parts to its shape, mostly [out, in], and the function that computes its rows.
    int8:  whether int8 values have one scale per row. mxfp4: whether the weight is one of MXFP4 values.
    dot:   what stands before the ENDs. name: of the weight, after BASE.
    """

    ends: tuple[str, ...]
    read: Callable[[Parts], tuple[tuple[int, ...], Rows]]
    int8: bool = False
    mxfp4: bool = False
    dot: str = "."
    name: str = ".weight"


def dequantized(tensors: dict[str, StoredTensor], config: dict) -> dict[str, StoredTensor | Dequantized]:
    """A folder's tensors, with the parts of each quantized weight replaced by one tensor of floats.

    config: config.json's quantization_config. Raises UserError naming the field or tensor that is wrong.
    """
    config = dict(config)
    name = config.pop("quant_method", None)
    if name not in METHODS:
        raise UserError(f"config.json: quant_method = {name!r} is not supported ({', '.join(METHODS)})")
    fields = ConfigFields(config, UNREAD)
    method = METHODS[name](fields)
    fields.finish({})
    weights, others = collections.defaultdict(dict), {}
    for name, tensor in tensors.items():
        base, _, end = name.rpartition(method.dot)
        quantized = end in method.ends and (end != "weight" or f"{base}.{method.ends[0]}" in tensors)
        (weights[base] if quantized else others)[end if quantized else name] = tensor
    for base, parts in weights.items():
        name = base + method.name
        shape, rows = method.read(Parts(base + method.dot, parts))
        int8 = None
        if method.int8 and parts["weight"].dtype == "I8":
            int8 = parts["weight"], float32(parts[method.ends[0]])
        stored = tuple(parts.values())
        others[name] = Dequantized(name, shape, stored, rows, int8=int8, mxfp4=method.mxfp4)
    return others


def float32(scales: StoredTensor) -> Dequantized:
    """Scales [N] or [N,1] as float32 [N]."""
    N = scales.shape[0]
    return Dequantized(
        scales.name, (N,), (scales,), lambda lo, hi: scales.read(lo, hi).reshape(-1).astype(np.float32)
    )


# -------------------------------------------------------------------------------------------------- values


def packing(bits: int) -> tuple[int, int]:
    """-> (the fewest words that hold whole values, the number of these values)"""
    words = bits // math.gcd(bits, WORD)
    return words, words * WORD // bits


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., n] -> float32 [..., n / W, V]: the V values in each W words, from the lowest bits on.

    W, V: see `packing`.
    """
    count, per_group = packing(bits)
    words = np.ascontiguousarray(words).view(np.uint32)
    if count == 1:
        shifts = np.arange(0, WORD, bits, dtype=np.uint32)
        return (words[..., None] >> shifts & np.uint32(2**bits - 1)).astype(np.float32)
    groups = words.reshape(*words.shape[:-1], -1, count).astype(np.uint64)
    word, shift = np.divmod(np.arange(per_group, dtype=np.uint64) * np.uint64(bits), np.uint64(WORD))
    both = groups[..., word] | groups[..., np.minimum(word + 1, count - 1)] << np.uint64(WORD)
    return (both >> shift & np.uint64(2**bits - 1)).astype(np.float32)


def columns(tensor: StoredTensor, lo: int, hi: int) -> np.ndarray:
    """[n, hi - lo]: columns [lo, hi) of a tensor [n, m]."""
    return tensor.read(select=lambda x: x[:, lo:hi])


def unpack_columns(
    tensor: StoredTensor, bits: int, lo: int, hi: int, order=slice(None), axis: int = 1
) -> np.ndarray:
    """Columns [lo, hi) of N, transposed: float32 [hi - lo, C].

    tensor: [C, words]; with axis 0, [words, C]. order: the position in a word of each of its columns.
    """
    count, per_group = packing(bits)
    first = lo // per_group
    ends = first * count, -(-hi // per_group) * count
    words = columns(tensor, *ends) if axis else tensor.read(*ends).T
    values = unpack(words, bits)[..., order]
    return values.reshape(len(values), -1)[:, lo - first * per_group : hi - first * per_group].T


def scaled(
    values: np.ndarray, zeros: np.ndarray | float, scales: np.ndarray, group: np.ndarray
) -> np.ndarray:
    """(values - zeros) * scales -> [n, C]: values [n, C], zeros and scales [n, G], a column's group [C]."""

    def of_columns(x: np.ndarray | float) -> np.ndarray | float:
        return x[:, group] if np.ndim(x) == 2 and x.shape[1] > 1 else x

    return (values - of_columns(zeros)) * of_columns(scales.astype(np.float32))


def even_groups(parts: Parts, end: str, columns: int, size: int | None) -> np.ndarray:
    """[columns]: each column's group of `size` columns; None: one group. end: names the tensor to blame."""
    size = size or columns
    if columns % size:
        parts.refuse(end, f"has {columns} columns, which are no groups of {size}")
    return np.arange(columns) // size


def stored_groups(parts: Parts, end: str, columns: int, count: int) -> np.ndarray:
    """[columns]: each column's group, from 0 to count - 1, as a tensor states them."""
    group = parts.get(end, columns).values
    if group.min() < 0 or group.max() >= count:
        parts.refuse(end, f"has groups from {group.min()} to {group.max()}, but there are scales of {count}")
    return group


# ------------------------------------------------------------------------------------------------- methods


def one_of(fields: ConfigFields, name: str, *known, default=None):
    """The value of a field that must be one of these."""
    value = fields.get(name)
    value = default if value is None else value
    if not any(value == x and type(value) is type(x) for x in known):
        listed = ", ".join(map(repr, known))
        raise UserError(f"config.json: {name} = {value!r} of a quantized model is not supported ({listed})")
    return value


def group_size(fields: ConfigFields) -> int | None:
    """None for one group of all columns, which is written as -1, too."""
    return None if fields.get("group_size") == -1 else fields.take("group_size", int, None)


GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what must be added to stored zero points


def gptq(fields: ConfigFields) -> Method:
    bits, size = one_of(fields, "bits", 4, 8, 2, 3), group_size(fields)
    ordered = fields.take("desc_act", bool, False)  # columns in order of importance, and so the groups
    one_of(fields, "method", "gptq", default="gptq")  # newer names, of quant_method and checkpoint_format
    stated = one_of(fields, "format", *GPTQ_OFFSETS, default="gptq")
    stated = one_of(fields, "checkpoint_format", *GPTQ_OFFSETS, default=stated)
    # A rule may give some weights other settings. One that begins with -: says which are not quantized.
    for rule, other in fields.take("dynamic", dict, {}).items():
        if other and not rule.startswith("-:"):
            raise UserError(
                f"config.json: dynamic {rule!r} = {other!r} of a quantized model is not supported"
            )
    # The zero point of symmetric weights is known, and shows the version.
    middle = 2 ** (bits - 1) if fields.take("sym", bool, False) else None
    versions = []  # of the first weight

    def version(zeros: StoredTensor) -> str:
        if not versions:
            first = np.unique(unpack(zeros.read(0, 1), bits))
            known = [
                x for x, offset in GPTQ_OFFSETS.items() if middle and first.tolist() == [middle - offset]
            ]
            versions.extend(known or [stated])
            if versions[0] != stated:
                warn(
                    f"{zeros}: the config says checkpoint_format {stated}, but this symmetric weight has the "
                    f"zero points of {versions[0]}; the weights are read as {versions[0]}"
                )
        return versions[0]

    def read(parts: Parts):
        packed = parts.get("qweight", None, None)
        C, N = packed.shape[0] * WORD // bits, packed.shape[1]
        if ordered or "g_idx" in parts.tensors:
            scales = parts.get("scales", None, N)
            group = stored_groups(parts, "g_idx", C, scales.shape[0])
        else:
            group = even_groups(parts, "qweight", C, size)
            scales = parts.get("scales", group[-1] + 1, N)
        zeros = parts.get("qzeros", scales.shape[0], N * bits // WORD)
        offset = GPTQ_OFFSETS[version(zeros)]

        def rows(lo: int, hi: int) -> np.ndarray:
            values = unpack(columns(packed, lo, hi).T, bits).reshape(hi - lo, C)
            # In version 1 the zero point 0 is stored as -1, which is 2**bits - 1 without a sign.
            zero = (unpack_columns(zeros, bits, lo, hi) + offset) % 2**bits
            return scaled(values, zero, columns(scales, lo, hi).T, group)

        return (N, C), rows

    return Method(("qweight", "qzeros", "scales", "g_idx"), read)


def awq(fields: ConfigFields) -> Method:
    bits, size = one_of(fields, "bits", 4), group_size(fields)
    one_of(fields, "version", "gemm", "GEMM")
    one_of(fields, "zero_point", True)

    def read(parts: Parts):
        packed = parts.get("qweight", None, None)
        C, words = packed.shape
        group = even_groups(parts, "qweight", C, size)
        scales = parts.get("scales", group[-1] + 1, words * WORD // bits)
        zeros = parts.get("qzeros", group[-1] + 1, words)

        def rows(lo: int, hi: int) -> np.ndarray:
            values, zero = (unpack_columns(x, bits, lo, hi, AWQ_ORDER) for x in (packed, zeros))
            return scaled(values, zero, columns(scales, lo, hi).T, group)

        return (scales.shape[1], C), rows

    return Method(("qweight", "qzeros", "scales"), read)


def compressed_tensors(fields: ConfigFields) -> Method:
    weights = ConfigFields(_weights_scheme(fields.take("config_groups", dict)), UNREAD)
    forms = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized"
    form = one_of(fields, "format", *forms)
    one_of(fields, "quantization_status", "compressed", default="compressed")
    one_of(ConfigFields(fields.take("sparsity_config", dict, {})), "format", "dense", default="dense")
    fields.take("version", str, None)
    one_of(weights, "type", "int", "float", default="int")  # which the tensors' own types say
    strategy = one_of(weights, "strategy", "group", "channel", "tensor", "block")
    size, block = group_size(weights), weights.take("block_structure", list, None)
    if bool(size) != (strategy == "group") or bool(block) != (strategy == "block"):
        raise UserError(
            f"config.json: strategy {strategy!r} of a quantized model has not the sizes that it needs"
        )
    if form == "pack-quantized":
        method = packed_integers(weights, size)
    else:
        is_mxfp4 = form == "mxfp4-pack-quantized"
        one_of(weights, "num_bits", 4 if is_mxfp4 else 8)
        one_of(weights, "symmetric", True, default=True)
        if is_mxfp4 and size != BLOCK:
            raise UserError(f"config.json: group_size = {size!r} of MXFP4 weights is not supported ({BLOCK})")
        method = PACKED_MXFP4 if is_mxfp4 else eight_bits("weight_scale", strategy, size, block)
    weights.finish({})
    return method


def _weights_scheme(groups: dict) -> dict:
    """How weights are quantized. Raises UserError unless all groups of layers have the same scheme."""
    schemes = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()]
    if not schemes or not isinstance(schemes[0], dict) or any(scheme != schemes[0] for scheme in schemes):
        raise UserError("config.json: config_groups of a quantized model do not all have the same weights")
    return schemes[0]


def packed_integers(weights: ConfigFields, size: int | None) -> Method:
    """pack-quantized. Values and zero points are stored without a sign."""
    bits = one_of(weights, "num_bits", 4, 8)
    ordered = one_of(weights, "actorder", "group", "weight", "static", default="weight") == "group"
    symmetric = weights.take("symmetric", bool, True)

    def read(parts: Parts):
        N, C = map(int, parts.get("weight_shape", 2).values)
        packed = parts.get("weight_packed", N, -(-C * bits // WORD))
        if ordered:
            scales = parts.get("weight_scale", N, None)
            group = stored_groups(parts, "weight_g_idx", C, scales.shape[1])
        else:
            group = even_groups(parts, "weight_packed", C, size)
            scales = parts.get("weight_scale", N, group[-1] + 1)
        zeros = None if symmetric else parts.get("weight_zero_point", -(-N * bits // WORD), scales.shape[1])

        def rows(lo: int, hi: int) -> np.ndarray:
            values = unpack(packed.read(lo, hi), bits).reshape(hi - lo, -1)[:, :C]
            zero = 2 ** (bits - 1) if zeros is None else unpack_columns(zeros, bits, lo, hi, axis=0)
            return scaled(values, zero, scales.read(lo, hi), group)

        return (N, C), rows

    return Method(
        ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"), read
    )


def read_packed_mxfp4(parts: Parts) -> tuple[tuple[int, ...], Rows]:
    packed = parts.get("weight_packed", None, None, types=("U8",))
    N, C = packed.shape[0], 2 * packed.shape[1]
    group = even_groups(parts, "weight_packed", C, BLOCK)
    scales = parts.get("weight_scale", N, group[-1] + 1, types=("U8",))
    return (N, C), lambda lo, hi: mxfp4_values(packed, scales, lo, hi)


PACKED_MXFP4 = Method(("weight_packed", "weight_scale"), read_packed_mxfp4, mxfp4=True)


def mxfp4(fields: ConfigFields) -> Method:
    """gpt-oss: blocks of 32 values along the contracted dimension, of all experts in one tensor [E, N, C]."""

    def read(parts: Parts):
        blocks = parts.get("blocks", None, None, None, BLOCK // 2)
        scales = parts.get("scales", *blocks.shape[:3], types=("U8",))
        E, N, count, _ = blocks.shape
        return (E, N, count * BLOCK), lambda lo, hi: mxfp4_values(blocks, scales, lo, hi)

    return Method(("blocks", "scales"), read, mxfp4=True, dot="_", name="_mxfp4")


def mxfp4_values(packed: StoredTensor, scales: StoredTensor, lo: int, hi: int) -> np.ndarray:
    """Rows [lo, hi) of MXFP4: two e2m1 codes a byte, the first in its low bits, and a scale per BLOCK values.

    packed: uint8 [N, ...]. scales: uint8 [N, ..., count], the exponent of 2 plus 127. Returns float32
    [hi - lo, ..., BLOCK * count]. Raises UserError if a scale is 255, which stands for NaN.
    """
    exponent = scales.read(lo, hi)
    if (exponent == 255).any():
        raise UserError(f"{scales} has a scale of 255, that is NaN; download the model again")
    pairs = packed.read(lo, hi).reshape(*exponent.shape, BLOCK // 2)
    values = np.stack([E2M1[pairs & 15], E2M1[pairs >> 4]], -1).reshape(*exponent.shape, BLOCK)
    values = np.ldexp(values, exponent[..., None].astype(np.int32) - 127)
    return values.reshape(*exponent.shape[:-1], -1)


def fp8(fields: ConfigFields) -> Method:
    block = fields.take("weight_block_size", list, None)
    one_of(fields, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")  # two names of the same type
    one_of(fields, "activation_scheme", "dynamic", "static", default="dynamic")  # activations stay floats
    one_of(fields, "scale_fmt", "ue8m0", default="ue8m0")  # powers of two; their tensors have a float type
    return eight_bits("weight_scale_inv", "block" if block else "tensor", None, block)


def fbgemm_fp8(fields: ConfigFields) -> Method:
    return eight_bits("weight_scale", "channel", None, None)


def eight_bits(scale: str, strategy: str, size: int | None, block: list | None) -> Method:
    """Values of a byte each, int8 or float8_e4m3fn, and scales of tensors, channels, groups or blocks."""
    if block and not (len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise UserError(f"config.json: a quantized model's blocks of {block!r} make no sense")

    def read(parts: Parts):
        stored = parts.get("weight", None, None)
        N, C = stored.shape
        height, width = block or (N if strategy == "tensor" else 1, size or C)
        if not block:
            even_groups(parts, "weight", C, size)
        grid = -(-N // height), -(-C // width)
        one = scale in parts.tensors and parts.tensors[scale].shape == ()  # a scalar, as some have it
        scales = parts.get(scale, *(grid if strategy != "tensor" else () if one else (1,)))

        def rows(lo: int, hi: int) -> np.ndarray:
            x = stored.read(lo, hi)
            # No byte exceeds the table; with mode="clip" NumPy does not look for one.
            fp8 = stored.dtype == "F8_E4M3"
            x = E4M3.take(x.view(np.uint8), mode="clip") if fp8 else x.astype(np.float32)
            of_blocks = scales.values.reshape(grid)[np.arange(lo, hi) // height].astype(np.float32)
            x *= np.repeat(of_blocks, width, 1)[:, :C]  # in place: new pages cost more than the product
            return x

        return (N, C), rows

    return Method((scale, "weight", "input_scale_ub", "activation_scale"), read, int8=strategy == "channel")


METHODS: dict[str, Callable[[ConfigFields], Method]] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "mxfp4": mxfp4,
}
# Fields that cannot change what a weight is, by the reason.
NO_EFFECT = {
    "which weights are quantized, which their tensors show": "ignore lm_head modules_to_not_convert",
    "how the quantizer found the values": """batch_size damp_percent dataset global_compression_ratio
        model_name_or_path observer observer_kwargs quantizer static_groups tokenizer true_sequential""",
    "types of tensors, which the tensors have": "pack_dtype scale_dtype zp_dtype",
    "the program that ran or wrote the model": """activation_scale_ub backend dequantize do_fuse
        is_marlin_format meta model_file_base_name""",
}
UNREAD = " ".join(NO_EFFECT.values())
