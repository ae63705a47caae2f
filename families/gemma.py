"""Gemma 1: norms times 1 + weight, a scaled embedding, GELU. Source: transformers, models/gemma."""

import dataclasses

import jax
from jax import Array

from families import read
from families.family import Family
from families.fields import ConfigFields
from model import Config, LayerKind


@dataclasses.dataclass(frozen=True)
class GeGLU:
    """A gated MLP's activation with GELU, in the form that uses tanh."""

    def __call__(self, gate: Array, up: Array) -> Array:
        return jax.nn.gelu(gate, approximate=True) * up


def config(fields: ConfigFields) -> Config:
    heads, mlp = read.attention(fields), read.mlp(fields, activation=GeGLU())
    norm = read.norm(fields, offset=1.0)
    layers = (LayerKind(heads, mlp, norm, rope=read.rope(fields, heads.H)),) * read.depth(fields)
    scale = fields.take("hidden_size", int) ** 0.5
    return read.config(fields, layers, norm, tied=True, embedding_scale=scale)


GEMMA = Family(
    "gemma",
    config,
    # The first config.json files say "gelu" and mean its tanh form.
    supported={"hidden_act": ("gelu", "gelu_pytorch_tanh"), "hidden_activation": ("gelu_pytorch_tanh",)},
)
