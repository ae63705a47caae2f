"""Parts of a Config, from fields of config.json that several families share."""

import math

from families.fields import NUMBER, ConfigFields
from families.rope_scaling import LinearScaling, Llama3Scaling, ProportionalScaling, YarnScaling
from feedback.errors import UserError
from model import MLP, Attention, Config, Full, LayerKind, MoE, Norm, Normalization, Rope, Router, Window

MOST_LAYERS = 1000  # a sanity limit: a list of that many layers is made


def config(
    fields: ConfigFields, layers: tuple[LayerKind, ...], norm: Normalization, tied: bool = False, **others
) -> Config:
    """The Config of these layers. norm: the final norm. tied: the default of tie_word_embeddings."""
    return Config(
        D=fields.take("hidden_size", int),
        V=fields.take("vocab_size", int),
        layers=layers,
        norm=norm,
        max_positions=fields.take("max_position_embeddings", int),
        tied_embeddings=fields.take("tie_word_embeddings", bool, tied),
        **others,
    )


def depth(fields: ConfigFields) -> int:
    """The number of layers."""
    depth = fields.take("num_hidden_layers", int)
    if depth > MOST_LAYERS:
        raise UserError(f"config.json: num_hidden_layers = {depth} makes no sense")
    return depth


def norm(fields: ConfigFields, **others) -> Norm:
    """The norm before attention and feed-forward. others: what the family adds to Llama's."""
    return Norm(fields.take("rms_norm_eps", NUMBER), **others)


def attention(fields: ConfigFields, kind: type[Attention] = Attention, **others) -> Attention:
    """Grouped-query attention. kind: the family's own subclass. others: what it adds to Llama's."""
    heads = fields.take("num_attention_heads", int)
    kv_heads = fields.take("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise UserError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key/value heads")
    width = fields.take("head_dim", int, fields.take("hidden_size", int) // heads)
    if not width:
        raise UserError(f"config.json: hidden_size is less than num_attention_heads = {heads}")
    return kind(kv_heads, heads // kv_heads, width, **others)


def layer_types(fields: ConfigFields, name: str, default: list[str], *known: str) -> list[str]:
    """A field that gives each layer's type, one of the known ones. default: where the field is absent."""
    types = fields.take(name, list, default)
    if len(types) != len(default) or not all(kind in known for kind in types):
        expected = " or ".join(known)
        raise UserError(f"config.json: {name} do not describe {len(default)} layers, each {expected}")
    return types


def masks(fields: ConfigFields, *default: int) -> dict[str, Full | Window]:
    """The masks of the types of layers of models in which some have a sliding window.

    default: of sliding_window; without it the field must be there.
    """
    size = fields.take("sliding_window", int, *default)
    return dict(sliding_attention=Window(size), full_attention=Full())


def optional_windows(fields: ConfigFields, slides: list[bool]) -> list[Full | Window]:
    """The mask of each layer of models in which no layer has a window unless use_sliding_window is set.

    slides: whether each layer has one then, where layer_types does not say it.
    """
    if fields.take("use_sliding_window", bool, False):
        known = masks(fields)
        types = ["sliding_attention" if x else "full_attention" for x in slides]
    else:
        known, types = dict(full_attention=Full()), ["full_attention"] * len(slides)
        fields.get("sliding_window")  # has no effect
    return [known[x] for x in layer_types(fields, "layer_types", types, *known)]


def rotary_layers(fields: ConfigFields) -> list[bool]:
    """Whether each layer has RoPE, in models in which every fourth layer has none."""
    layers, every = range(depth(fields)), fields.take("no_rope_layer_interval", int, 4)
    # A 1 in no_rope_layers means that the layer does have RoPE.
    rotary = fields.take("no_rope_layers", list, []) or [(i + 1) % every != 0 for i in layers]
    if len(rotary) != len(layers) or not all(x in (0, 1) for x in rotary):
        raise UserError(f"config.json: no_rope_layers do not describe {len(layers)} layers, each 0 or 1")
    return [bool(x) for x in rotary]


def window(fields: ConfigFields) -> Full | Window:
    """The mask of models whose layers all have the same sliding window, or none."""
    size = fields.take("sliding_window", int, None)
    return Window(size) if size else Full()


def mlp(fields: ConfigFields, width: str = "intermediate_size", **others) -> MLP:
    """width: the field with the MLP's width. others: what the family adds to Llama's."""
    return MLP(fields.take(width, int), **others)


def moe(
    fields: ConfigFields,
    router: Router,
    width: str = "intermediate_size",
    count: str = "num_local_experts",
    shared: int = 0,
    kind: type[MoE] = MoE,
    **others,
) -> MoE:
    """width, count: the fields with an expert's width and the number of experts.

    shared: the width of the shared expert as a multiple of a routed expert's; 0: no shared expert.
    kind: the family's own subclass. others: what it adds to Llama's.
    """
    E, A, M = (fields.take(name, int) for name in (count, "num_experts_per_tok", width))
    if A > E:
        raise UserError(f"config.json: num_experts_per_tok = {A} of {E} experts")
    return kind(E, A, M, router, shared=MLP(shared * M) if shared else None, **others)


def _linear(fields: ConfigFields, positions: int) -> dict:
    return dict(scaling=LinearScaling(fields.take("factor", NUMBER)))


def _proportional(fields: ConfigFields, positions: int) -> dict:
    kept, factor = (fields.take(name, NUMBER, 1) for name in ("partial_rotary_factor", "factor"))
    return dict(scaling=ProportionalScaling(kept, factor))


def _llama3(fields: ConfigFields, positions: int) -> dict:
    names = "factor", "low_freq_factor", "high_freq_factor"
    factor, low, high = (fields.take(name, NUMBER) for name in names)
    original = fields.take("original_max_position_embeddings", NUMBER, positions)
    return dict(scaling=Llama3Scaling(factor, low, high, original))


def _yarn(fields: ConfigFields, positions: int) -> dict:
    original = fields.take("original_max_position_embeddings", NUMBER, positions)
    factor = fields.take("factor", NUMBER, positions / original)
    fast, slow = fields.take("beta_fast", NUMBER, 32), fields.take("beta_slow", NUMBER, 1)
    scaling = YarnScaling(factor, original, fast, slow, fields.take("truncate", bool, True))
    magnitude, names = yarn_growth(factor), ("mscale", "mscale_all_dim")
    mscale, of_scores = (fields.take(name, NUMBER, None) for name in names)
    if mscale and of_scores:
        magnitude = yarn_growth(factor, mscale) / yarn_growth(factor, of_scores)
    return dict(scaling=scaling, magnitude=fields.take("attention_factor", NUMBER, magnitude))


def yarn_growth(factor: float, mscale: float = 1) -> float:
    """By how much YaRN enlarges queries and keys where contexts are `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


# rope_type -> from its parameters, and max_position_embeddings, to the fields of Rope that it determines
SCALINGS = {"default": lambda fields, positions: {}, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
SCALINGS |= {"proportional": _proportional}


def rope(
    fields: ConfigFields,
    H: int,
    theta: float = 10000.0,
    interleaved: bool = False,
    rotated: float = 1,
    default: dict | None = None,
) -> Rope:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    H: the width of a head. theta, rotated: the defaults of rope_theta and of partial_rotary_factor, the part
    of a head's width that is rotated. default: of rope_parameters.
    """
    theta = fields.take("rope_theta", NUMBER, theta)
    rotated = fields.take("partial_rotary_factor", NUMBER, rotated)
    positions = fields.take("max_position_embeddings", int)
    parameters = rope_parameters(fields, theta) or default or {}
    return rope_of(parameters, H, positions, theta, interleaved, rotated)


def ropes(fields: ConfigFields, H: int, thetas: dict[str, float]) -> dict[str, Rope]:
    """The RoPEs of models in which each type of layers has its own object in `rope_parameters`.

    thetas: {type: its theta where the object has none}. `rope_scaling`, from before transformers 5, is of the
    layers with full attention.
    """
    parameters = ConfigFields(fields.take("rope_parameters", dict, {}))
    scalings = dict(full_attention=fields.take("rope_scaling", dict, {}))
    positions, found = fields.take("max_position_embeddings", int), {}
    for name, theta in thetas.items():
        own = parameters.take(name, dict, {}) | scalings.get(name, {})
        found[name] = rope_of(own, H, positions, theta)
    parameters.finish({})
    return found


def rope_parameters(fields: ConfigFields, theta: float) -> dict:
    """`rope_parameters` or, from before transformers 5, `rope_scaling`, which takes the place of the other.

    theta: where neither has rope_theta. Raises UserError if both are there and rope_parameters has anything
    that rope_scaling has not: transformers drops it without a word.
    """
    newer, older = fields.take("rope_parameters", dict, {}), fields.take("rope_scaling", dict, {})
    if newer and older:
        kept = dict(rope_theta=theta, partial_rotary_factor=fields.get("partial_rotary_factor")) | older
        for name, value in newer.items():
            unscaled = name in ("type", "rope_type") and value == "default"
            if not unscaled and kept.get(name) != value:
                raise UserError(
                    f"config.json: rope_scaling takes the place of rope_parameters, whose {name} = {value!r} "
                    "would be lost; put all into one of them"
                )
    return older or newer


def rope_of(
    parameters: dict,
    H: int,
    positions: int,
    theta: float = 10000.0,
    interleaved: bool = False,
    rotated: float = 1,
) -> Rope:
    """RoPE from an object of the form of `rope_parameters`: see `rope`.

    positions: max_position_embeddings, which stands for the original length where that is not given.
    """
    fields = ConfigFields(parameters)
    theta = fields.take("rope_theta", NUMBER, theta)
    rotated = fields.take("partial_rotary_factor", NUMBER, rotated)
    kind = fields.take("type", str, "default")  # the field's name before it was rope_type
    kind = fields.take("rope_type", str, kind)
    if kind not in SCALINGS:
        raise UserError(f"config.json: rope_type {kind!r} is not supported ({', '.join(SCALINGS)})")
    scaled = SCALINGS[kind](fields, positions)
    fields.finish({})
    width = H if kind == "proportional" else int(H * rotated)  # that one sets frequencies to 0 instead
    if width < 2 or width % 2 or width > H:
        raise UserError(f"config.json: RoPE needs an even head_dim, or part of it, not {width}")
    return Rope(float(theta), width, interleaved=interleaved, **scaled)
