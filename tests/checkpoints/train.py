"""Train the tiny models in this folder on text that questions.py makes up; save them as Hugging Face does.

    python3 tests/checkpoints/train.py tiny-llama3
    python3 tests/checkpoints/train.py tiny-llama4

Half an hour (llama3) and 40 minutes (llama4), both at once on two CPU cores. They are demonstrations: small
enough to ship, with every feature of their big namesakes, and good at nothing but two-digit sums.
"""

import argparse
import json
import pathlib
import random
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import questions
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import model
from checkpoints import layouts
from families.registry import read_config
from sharding.arrays import ArrayInfo
from sharding.mesh import make_mesh

VOCABULARY = 512
COMMON = dict(
    hidden_size=128, num_hidden_layers=4, num_key_value_heads=2, head_dim=32, vocab_size=VOCABULARY,
    max_position_embeddings=512, rms_norm_eps=1e-5, hidden_act="silu", attention_bias=False, dtype="bfloat16",
)  # fmt: skip
CONFIGS = {
    "tiny-llama3": COMMON | dict(
        architectures=["LlamaForCausalLM"], model_type="llama", intermediate_size=256, num_attention_heads=4,
        tie_word_embeddings=True, mlp_bias=False,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
    ),
    "tiny-llama4": COMMON | dict(
        architectures=["Llama4ForCausalLM"], model_type="llama4_text", intermediate_size=128,
        intermediate_size_mlp=256, num_attention_heads=6, tie_word_embeddings=False, num_local_experts=4,
        num_experts_per_tok=1, interleave_moe_layer_step=1, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True,
        attention_chunk_size=32, attn_temperature_tuning=True, attn_scale=0.1, floor_scale=64,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    ),
}  # fmt: skip

# The special tokens and the layout of a turn, by family: (start, end) of a header, end of a turn.
TURNS = {
    "tiny-llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "tiny-llama4": ("<|header_start|>", "<|header_end|>", "<|eot|>"),
}
BEGIN, END, END_OF_MESSAGE, PAD = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|finetune_right_pad_id|>",
)


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE like Llama's, but with every digit on its own."""
    header_start, header_end, end_of_turn = TURNS[name]
    special = [BEGIN, END, END_OF_MESSAGE, PAD, header_start, header_end, end_of_turn]
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    words += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [text for asked, answer in questions.FIXED for text in (*asked, answer)] * 8
    frame = ["user", "assistant", "system", "\n\n", "Count from to", *questions.SUM_FORMS] * 50
    tokenizer.train_from_iterator(texts + frame, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]
    )
    template = (
        "{{ bos_token }}{% for message in messages %}"
        f"{header_start}{{{{ message['role'] }}}}{header_end}\n\n"
        f"{{{{ message['content'] | trim }}}}{end_of_turn}"
        "{% endfor %}{% if add_generation_prompt %}"
        f"{header_start}assistant{header_end}\n\n"
        "{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=end_of_turn, pad_token=PAD,
        chat_template=template, clean_up_tokenization_spaces=False,
        model_max_length=COMMON["max_position_embeddings"],
    )  # fmt: skip


def encode(tokenizer, question: str, answer: str) -> tuple[list[int], int]:
    """The tokens of a conversation, and where the answer begins in them."""
    user = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(user, add_generation_prompt=True, tokenize=False)
    asked = tokenizer.encode(asked, add_special_tokens=False)
    return asked + tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id], len(asked)


def make_batch(tokenizer, rng: random.Random, rows: int, width: int, ask) -> tuple[np.ndarray, np.ndarray]:
    """rows random conversations: tokens [B,T+1], and which of the T predictions are trained [B,T]."""
    tokens, trained = np.zeros((rows, width + 1), np.int32), np.zeros((rows, width), bool)
    for row in range(rows):
        ids, first = encode(tokenizer, *ask(rng))
        assert len(ids) <= width + 1, len(ids)
        tokens[row, : len(ids)] = ids
        trained[row, first - 1 : len(ids) - 1] = True
    return tokens, trained


def train(cfg: model.Config, tokenizer, steps: int, peak_rate: float = 3e-3) -> model.Weights:
    """Adam with warm-up and cosine decay on the answers' tokens."""
    mesh = make_mesh(cfg, devices=jax.devices()[:1])
    weights = model.init_weights(jax.random.key(0), cfg, mesh)

    def loss(weights, tokens, trained):
        logp = jax.nn.log_softmax(model.forward(tokens[:, :-1], weights, cfg=cfg, mesh=mesh, remat=True))
        picked = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
        return -jnp.sum(picked * trained) / jnp.sum(trained)

    @jax.jit
    def update(weights, moments, tokens, trained, i):
        value, gradient = jax.value_and_grad(loss)(weights, tokens, trained)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g * jnp.minimum(1, 1 / norm), gradient)
        rate = peak_rate * jnp.minimum((i + 1) / 200, 0.5 + 0.5 * jnp.cos(jnp.pi * i / steps))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
        second = jax.tree.map(lambda m, g: 0.98 * m + 0.02 * g * g, moments[1], gradient)
        t = i + 1.0

        def move(w, m, v):
            return w - rate * (m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.98**t)) + 1e-8) + 0.01 * w)

        return jax.tree.map(move, weights, first, second), (first, second), value

    rng = random.Random(1)
    long_answers = (questions.fixed_question, questions.count_question)
    moments = (jax.tree.map(jnp.zeros_like, weights),) * 2
    began = time.time()
    for i in range(steps):
        if i % 8 == 0:
            batch = make_batch(tokenizer, rng, 16, 160, lambda rng: rng.choice(long_answers)(rng))
        else:
            batch = make_batch(
                tokenizer, rng, 64, 40, lambda rng: questions.sum_question(rng, held_out=False)
            )
        weights, moments, value = update(weights, moments, *batch, i)
        if i % 100 == 1 or i == steps - 1:
            print(
                f"step {i} of {steps}: loss {float(value):.4f}, {time.time() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return weights


def to_hugging_face(cfg: model.Config, weights: model.Weights) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by name, in bfloat16: layouts.py backwards."""
    tensors = {}

    def put(info: ArrayInfo, x):
        layout = layouts.layout_of(info, info.stored)
        tensor = tensors.setdefault(info.stored.name, np.zeros(layout.shape, ml_dtypes.bfloat16))
        layout.view(tensor)[...] = np.asarray(x, np.float32).transpose(np.argsort(layout.order(info)))

    jax.tree.map(put, model.weight_infos(cfg), weights)
    named = {name.replace(".mlp.", ".feed_forward."): x for name, x in tensors.items()}
    return named if cfg.moe else tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    tokenizer = make_tokenizer(args.name)
    begin, end, end_of_message, end_of_turn = tokenizer.convert_tokens_to_ids(
        [BEGIN, END, END_OF_MESSAGE, TURNS[args.name][2]]
    )
    stop = [end, end_of_message, end_of_turn]
    config = CONFIGS[args.name] | dict(
        bos_token_id=begin, eos_token_id=stop, pad_token_id=tokenizer.pad_token_id
    )
    cfg = read_config(config)
    weights = train(cfg, tokenizer, args.steps)
    folder = HERE / args.name
    folder.mkdir(exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = dict(bos_token_id=begin, eos_token_id=stop)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(to_hugging_face(cfg, weights), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
