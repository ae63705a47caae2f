"""`model.prefill` and `model.decode_step` in several programs: before the layers, some layers, after them.

A program of a few layers, called several times, compiles many times as fast as one of all layers. Each call
costs the host some 100 us: too much for an accelerator, little for a CPU, which gains nothing by seeing all
layers at once. So a single CPU device runs a model in this way.
"""

import dataclasses
import functools
from functools import partial

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import model
from model import KV, Cache, Config, Layer, LayerKind, Norm, Output, Sampling, Scores, Span, Weights
from ops.platform import platform
from sharding import mesh as axes
from sharding.arrays import specs

ROWS = P(axes.ROWS)
LARGEST_GROUP = 6  # of layers: 30 take 18.6 s of CPU time to compile in one program, 3.6 in this, 3.1 alone


def suits(mesh: Mesh) -> bool:
    return mesh.size == 1 and platform(mesh) == "cpu"


def prefill(
    rows, count, weights: Weights, cache: Cache, *,
    width: int, score: int | None = None, cfg: Config, mesh: Mesh,
) -> tuple[Scores | None, Cache]:  # fmt: skip
    """See model.prefill."""
    w, state, static = _but_layers(weights), _but_layers(cache), dict(cfg=cfg, mesh=mesh)
    x, _, span = _before(rows, count, None, w, state, width=width, **static)
    x, layers = _layers(x, weights, cache, span, **static)
    scores, length = _after_chunk(x, span, w, state, score=score, **static)
    return scores, Cache(layers=layers, tokens=cache.tokens, length=length)


def decode_step(
    count, drafts, sampling: Sampling, weights: Weights, cache: Cache, *, cfg: Config, mesh: Mesh
) -> tuple[Output, Cache]:
    """See model.decode_step."""
    w, state, static = _but_layers(weights), _but_layers(cache), dict(cfg=cfg, mesh=mesh)
    x, tokens, span = _before(None, count, drafts, w, state, width=None, **static)
    x, layers = _layers(x, weights, cache, span, **static)
    output, text, length = _after_step(x, tokens, span, sampling, w, state, **static)
    return output, Cache(layers=layers, tokens=text, length=length)


def _but_layers(tree):
    return dataclasses.replace(tree, layers=[])


def _weight_specs(w: Weights, cfg: Config) -> Weights:
    return specs(_but_layers(model.weight_infos(cfg)), w)


@partial(jax.jit, static_argnames=("width", "cfg", "mesh"))
def _before(rows, count, drafts, w: Weights, cache: Cache, *, width: int | None, cfg: Config, mesh: Mesh):
    """-> (the embedded tokens [B,T,D], the tokens [B,T], Span) of a chunk of this width; None: of a step."""

    def on_device(rows, count, drafts, w: Weights, cache: Cache):
        if width is None:
            tokens, span = model.step_at(count, drafts, cache, cfg)
        else:
            tokens, span = model.chunk_at(rows, count, width, cache, cfg)
        return model.embed(tokens, w, span, cfg), tokens, span

    layouts = (ROWS, ROWS, ROWS, _weight_specs(w, cfg), ROWS)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=layouts, out_specs=ROWS)
    return run(rows, count, drafts, w, cache)


def _layers(x: Array, weights: Weights, cache: Cache, span: Span, *, cfg: Config, mesh: Mesh):
    """x: [B,T,D] -> (the same after all layers, the layers' caches)."""
    caches, n = [], group_size(cfg.layers)
    for first in range(0, len(cfg.layers), n):
        kinds, w, kv = (some[first : first + n] for some in (cfg.layers, weights.layers, cache.layers))
        x, kv = _group(x, w, kv, span, kinds=kinds, norm=cfg.norm, mesh=mesh)
        caches += kv
    return x, caches


@functools.cache
def group_size(kinds: tuple[LayerKind, ...]) -> int:
    """How many layers make a group: as many as may be, if all groups are alike."""
    sizes = range(min(LARGEST_GROUP, len(kinds)), 0, -1)
    return next((n for n in sizes if len({kinds[i : i + n] for i in range(0, len(kinds), n)}) == 1), 1)


@partial(jax.jit, static_argnames=("kinds", "norm", "mesh"), donate_argnames=("x", "kv"))
def _group(x: Array, w: list[Layer], kv: list[KV], span: Span, *, kinds, norm: Norm, mesh: Mesh):
    cfg = Config(D=x.shape[-1], V=0, layers=kinds, norm=norm, max_positions=0)
    kv_specs = specs(model.cache_infos(cfg, 0, 0, kv[0].values.dtype).layers, kv)
    layouts = ROWS, specs(model.weight_infos(cfg).layers, w), kv_specs, ROWS

    @model.on_each_device(mesh, x.shape[1], layouts, (ROWS, kv_specs))
    def on_device(x: Array, w: list[Layer], kv: list[KV], span: Span):
        return model.decoder_layers(x, w, kv, span, kinds, norm)

    return on_device(x, w, kv, span)


@partial(jax.jit, static_argnames=("score", "cfg", "mesh"))
def _after_chunk(x, span: Span, w: Weights, cache: Cache, *, score: int | None, cfg: Config, mesh: Mesh):
    def on_device(x: Array, span: Span, w: Weights, cache: Cache):
        return model.after_chunk(x, span, score, w, cache, cfg)

    layouts = (ROWS, ROWS, _weight_specs(w, cfg), ROWS)
    return jax.shard_map(on_device, mesh=mesh, in_specs=layouts, out_specs=ROWS)(x, span, w, cache)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="cache")
def _after_step(
    x, tokens, span: Span, sampling: Sampling, w: Weights, cache: Cache, *, cfg: Config, mesh: Mesh
):
    def on_device(x: Array, tokens: Array, span: Span, sampling: Sampling, w: Weights, cache: Cache):
        return model.after_step(x, tokens, span, sampling, w, cache, cfg)

    layouts = (ROWS, ROWS, ROWS, ROWS, _weight_specs(w, cfg), ROWS)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=layouts, out_specs=ROWS)
    return run(x, tokens, span, sampling, w, cache)
