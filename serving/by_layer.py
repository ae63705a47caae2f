"""`model.prefill` and `model.decode_step` in several programs: one per kind of layer, one before, one after.

A program of one layer compiles many times as fast as one of all layers. The host calls it for each layer,
which costs some 50 us: too much for an accelerator, little for a CPU, which gains nothing by seeing all
layers at once. So a single CPU device runs a model in this way.
"""

import dataclasses
from functools import partial

import jax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import model
from model import KV, Cache, Config, Layer, LayerKind, Norm, Output, Sampling, Span, Weights, specs
from ops.platform import platform

ROWS = P("data")


def suits(mesh: Mesh) -> bool:
    return mesh.size == 1 and platform(mesh) == "cpu"


def prefill(
    rows, count, weights: Weights, cache: Cache, *, width: int, score: bool = False, cfg: Config, mesh: Mesh
) -> tuple[Array | None, Cache]:
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
        return model.embed(tokens, w), tokens, span

    layouts = (ROWS, ROWS, ROWS, _weight_specs(w, cfg), ROWS)
    return jax.shard_map(on_device, mesh=mesh, in_specs=layouts, out_specs=ROWS)(
        rows, count, drafts, w, cache
    )


def _layers(x: Array, weights: Weights, cache: Cache, span: Span, *, cfg: Config, mesh: Mesh):
    """x: [B,T,D] -> (the same after all layers, the layers' caches)."""
    layers = []
    for w, kind, kv in zip(weights.layers, cfg.layers, cache.layers, strict=True):
        x, kv = _layer(x, w, kv, span, kind=kind, norm=cfg.norm, mesh=mesh)
        layers.append(kv)
    return x, layers


@partial(jax.jit, static_argnames=("kind", "norm", "mesh"), donate_argnames=("x", "kv"))
def _layer(x: Array, w: Layer, kv: KV, span: Span, *, kind: LayerKind, norm: Norm, mesh: Mesh):
    cfg = Config(D=x.shape[-1], V=0, layers=(kind,), norm=norm, max_positions=0)
    [info], [kv_info] = model.weight_infos(cfg).layers, model.cache_infos(cfg, 0, 0, kv.values.dtype).layers
    kv_specs = specs(kv_info, kv)

    @model.on_each_device(mesh, x.shape[1], (ROWS, specs(info, w), kv_specs, ROWS), (ROWS, kv_specs))
    def on_device(x: Array, w: Layer, kv: KV, span: Span):
        return model.decoder_layer(x, w, kv, span, kind, norm)

    return on_device(x, w, kv, span)


@partial(jax.jit, static_argnames=("score", "cfg", "mesh"))
def _after_chunk(x: Array, span: Span, w: Weights, cache: Cache, *, score: bool, cfg: Config, mesh: Mesh):
    def on_device(x: Array, span: Span, w: Weights, cache: Cache):
        return model.after_chunk(x, span, score, w, cache, cfg)

    layouts = (ROWS, ROWS, _weight_specs(w, cfg), ROWS)
    return jax.shard_map(on_device, mesh=mesh, in_specs=layouts, out_specs=ROWS)(x, span, w, cache)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def _after_step(
    x, tokens, span: Span, sampling: Sampling, w: Weights, cache: Cache, *, cfg: Config, mesh: Mesh
):
    def on_device(x: Array, tokens: Array, span: Span, sampling: Sampling, w: Weights, cache: Cache):
        return model.after_step(x, tokens, span, sampling, w, cache, cfg)

    layouts = (ROWS, ROWS, ROWS, ROWS, _weight_specs(w, cfg), ROWS)
    run = jax.shard_map(on_device, mesh=mesh, in_specs=layouts, out_specs=ROWS)
    return run(x, tokens, span, sampling, w, cache)
