"""The published models by name: what of their config.json says shapes."""
# ruff: noqa: E402  the folder above must be on the path first

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from checkpoints.config_json import read_config
from checkpoints.errors import UserError
from checkpoints.folders import read_json
from model import Config

LLAMA3 = dict(model_type="llama", vocab_size=128256, rms_norm_eps=1e-5, max_position_embeddings=131072)
LLAMA4 = dict(
    model_type="llama4_text", vocab_size=202048, rms_norm_eps=1e-5, hidden_size=5120, num_attention_heads=40,
    num_key_value_heads=8, head_dim=128, num_hidden_layers=48, intermediate_size=8192,
    intermediate_size_mlp=16384, num_experts_per_tok=1, attention_chunk_size=8192, attn_temperature_tuning=4,
)  # fmt: skip


def _llama3(width: int, heads: int, depth: int, feed_forward: int, **other) -> dict:
    shape = dict(hidden_size=width, num_attention_heads=heads, num_key_value_heads=8, num_hidden_layers=depth)
    return LLAMA3 | shape | dict(intermediate_size=feed_forward) | other


MODELS = {
    "llama3.1-8b": _llama3(4096, 32, 32, 14336),
    "llama3.1-70b": _llama3(8192, 64, 80, 28672),
    "llama3.1-405b": _llama3(16384, 128, 126, 53248),
    "llama3.2-1b": _llama3(2048, 32, 16, 8192, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _llama3(3072, 24, 28, 8192, tie_word_embeddings=True),
    "llama4-scout": LLAMA4 | dict(num_local_experts=16, max_position_embeddings=10485760),
    "llama4-maverick": LLAMA4 | dict(
        num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False, max_position_embeddings=1048576
    ),
}  # fmt: skip


def read_model(name: str) -> Config:
    """A model by its name in MODELS, or from a config.json or the folder that holds one."""
    file = pathlib.Path(os.path.expanduser(name))
    file = file / "config.json" if file.is_dir() else file
    if name in MODELS:
        return read_config(MODELS[name])
    if not file.is_file():
        raise UserError(f"--model {name}: no config.json there, and none of {', '.join(MODELS)}")
    try:
        return read_config(read_json(file))
    except UserError as e:
        raise UserError(f"--model {name}: {e}") from None
