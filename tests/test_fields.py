"""Every field of a checkpoint's files is used, checked, or in the table of docs/checkpoints.md."""

import copy
import json
import os
import pathlib
import re
from functools import partial

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from conftest import CHECKPOINTS, mesh_of
from test_gguf import CONFIG, said
from test_gguf import write as write_gguf
from test_transformers import CONFIGS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import model
from checkpoints import dequantized
from checkpoints.checkpoint import open_checkpoint
from checkpoints.gguf import architectures, vocabulary
from checkpoints.loading import load
from conversation.text import load_tokenizer, tokenize
from families import fields
from families.registry import FAMILIES, read_config
from feedback.errors import UserError
from serving import requests
from serving.requests import choose_sampling

pytestmark = pytest.mark.usefixtures("own_cache")
DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "checkpoints.md"


def cannot_matter(file: str) -> set[str]:
    """The fields of the rows of the document's table whose first column names this file."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \| .*? \|$", DOCUMENT.read_text(), re.M)
    return {name for where, names in rows if file in where for name in re.findall(r"`(.*?)`", names)}


@pytest.mark.parametrize(
    ("file", "no_effect"),
    [
        ("`config.json`", fields.NO_EFFECT),
        ("`config.json`", {family.model_type: family.no_effect for family in FAMILIES}),
        ("`quantization_config`", dequantized.NO_EFFECT),
        ("`generation_config.json`", requests.NO_EFFECT),
        ("GGUF", architectures.NO_EFFECT),
        ("GGUF", vocabulary.NO_EFFECT),
    ],
)
def test_the_table(file, no_effect):
    assert set(" ".join(no_effect.values()).split()) <= cannot_matter(file)


# --------------------------------------------------------------------------------------------- config.json


def numbers_in(content: dict, path=()):
    """The place of each number and each boolean in a JSON object, and its value."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from numbers_in(value, (*path, name))
        elif isinstance(value, (bool, int, float)):
            yield (*path, name), value


def with_value(content: dict, path: tuple[str, ...], value) -> dict:
    changed = copy.deepcopy(content)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return changed


deep = partial(pytest.param, marks=pytest.mark.deep)


@pytest.mark.parametrize("name", [x if x == "llama3-scaled-tied" else deep(x) for x in CONFIGS])
def test_each_field_of_config_json(name, saved, tmp_path):
    """Another value changes the answer or is refused; or the field is in the table."""
    folder, known = pathlib.Path(saved(name)[0]), cannot_matter("`config.json`")
    # With all fields that transformers gives them, also those that a published file leaves out.
    content = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    content["architectures"] = json.loads((folder / "config.json").read_text())["architectures"]
    for file in folder.iterdir():
        os.symlink(file, tmp_path / file.name)
    (tmp_path / "config.json").unlink()

    tokens = np.random.default_rng(2).integers(0, read_config(content).V, (1, 37))
    answers = {}

    def answer_of(content: dict):
        """The longest text, and the logits."""
        (tmp_path / "config.json").write_text(json.dumps(content))
        checkpoint = open_checkpoint(str(tmp_path))
        cfg = checkpoint.config
        if cfg not in answers:
            mesh = mesh_of(cfg)
            weights = load(checkpoint, mesh, "float32", format=None, show=False)
            answers[cfg] = model.forward(tokens, weights, cfg=cfg, mesh=mesh)
        return cfg.max_positions, answers[cfg]

    limit, logits = answer_of(content)
    changes = 0
    for path, value in numbers_in(content):
        others = [not value] if isinstance(value, bool) else [2 * value, 4 * value, 0] if value else [1]
        for other in others if isinstance(value, int) else [*others, value + 0.5, value / 8]:
            try:
                other_limit, other_logits = answer_of(with_value(content, path, other))
            except UserError as e:
                assert "\n" not in str(e)
                break
            if other_limit != limit or not jnp.array_equal(other_logits, logits):
                changes += 1
                break
        else:
            assert known.intersection(path) or path[-1].startswith("_"), (path, value)
    assert changes >= 2  # GPT-2 has few other numbers than sizes


LLAMA = json.loads((CHECKPOINTS / "tiny-llama3" / "config.json").read_text())
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
DEFAULT = dict(rope_type="default", rope_theta=10000.0)
LLAMA3_SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA31 = LLAMA3_SCALING | dict(rope_theta=5e5, original_max_position_embeddings=8192)
GPT_OSS = dict(rope_type="yarn", rope_theta=1.5e5, factor=32.0, original_max_position_embeddings=4096)
DEEPSEEK = GPT_OSS | dict(rope_theta=1e4, factor=40.0, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize(
    "more",
    [
        dict(rope_parameters=DEFAULT, rope_scaling=YARN),
        dict(rope_parameters=DEFAULT, rope_scaling=dict(type="yarn", factor=4.0), rope_theta=10000.0),
        dict(rope_parameters=YARN | dict(rope_theta=5e5), rope_scaling=YARN, rope_theta=5e5),
        dict(rope_scaling=dict(type="yarn", factor=4.0), rope_theta=10000.0),
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=2.0)),
        dict(rope_parameters=YARN | dict(rope_theta=1e6), rope_theta=5e5),
        dict(rope_parameters=LLAMA3_SCALING, rope_theta=5e5),
        dict(rope_parameters=dict(rope_type="linear", factor=2.0), rope_scaling={}),
        dict(rope_parameters={}, rope_scaling=YARN),
        dict(rope_parameters=LLAMA31),
        dict(rope_parameters=LLAMA31 | dict(factor=32.0)),  # Llama 3.2
        dict(rope_parameters=LLAMA31 | dict(factor=16.0, high_freq_factor=1.0)),  # Scout: nothing is blended
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e6, factor=8.0)),
        dict(rope_parameters=GPT_OSS | dict(truncate=False)),
        dict(rope_parameters=GPT_OSS | dict(attention_factor=1.5)),
        dict(rope_parameters=DEEPSEEK),
        dict(rope_parameters=DEEPSEEK | dict(mscale=0.7, mscale_all_dim=1.3, beta_fast=16.0, beta_slow=2.0)),
    ],
)
def test_rope(more):
    """The frequencies and the magnitude are those of transformers, whichever of two places says what."""
    content = {name: value for name, value in LLAMA.items() if "rope" not in name}
    content |= dict(head_dim=128, max_position_embeddings=131072) | copy.deepcopy(more)
    rope = read_config(content).layers[0].rope
    theirs = transformers.LlamaConfig(**{k: v for k, v in content.items() if k != "model_type"})
    kind = theirs.rope_parameters["rope_type"]
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    np.testing.assert_allclose(rope.frequencies, frequencies.numpy(), rtol=1e-6)  # float32, in another order
    assert rope.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(DEFAULT, rope_theta=1e6), "whose rope_theta = 1000000.0 would be lost"),
        (dict(YARN, factor=2.0), "whose factor = 2.0 would be lost"),
        (dict(rope_type="linear", factor=4.0), "whose rope_type = 'linear' would be lost"),
        (dict(YARN, beta_fast=16), "whose beta_fast = 16 would be lost"),
    ],
)
def test_two_places_of_rope_that_differ(parameters, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_config(LLAMA | dict(rope_parameters=parameters, rope_scaling=YARN))


def test_two_places_of_latent_attention():
    """The scale of its scores follows from the same parameters as its frequencies."""
    content = json.loads(CONFIGS["deepseek-v3"].to_json_string(use_diff=False))
    parameters = content["rope_parameters"] | dict(rope_theta=5e5)
    older = {name: value for name, value in parameters.items() if name != "rope_theta"}
    both = content | dict(rope_parameters=parameters, rope_scaling=older, rope_theta=5e5)
    assert read_config(both) == read_config(content | dict(rope_parameters=parameters))


def test_fields_outside_of_text_config():
    """transformers reads only tie_word_embeddings there; any other field that differs is refused."""
    inside = json.loads(CONFIGS["scout"].to_json_string(use_diff=False))
    inside.pop("tie_word_embeddings")
    outer = dict(model_type="llama4", text_config=inside, image_token_index=5, dtype="bfloat16")
    assert not read_config(outer).tied_embeddings
    assert read_config(outer | dict(tie_word_embeddings=True)).tied_embeddings
    assert read_config(outer | dict(rms_norm_eps=inside["rms_norm_eps"])) == read_config(outer)
    inside["tie_word_embeddings"] = False
    for name, value in (
        ("rms_norm_eps", 1e-3), ("rope_theta", 1e6), ("tie_word_embeddings", True), ("use_qk_norm", False),
        ("is_decoder", True),
    ):  # fmt: skip
        with pytest.raises(
            UserError, match=f"config.json: {name} = .* is outside of text_config, where it is"
        ):
            read_config(outer | {name: value})


def test_one_field_under_two_names():
    gpt2 = json.loads(CONFIGS["gpt2"].to_json_string(use_diff=False))
    same = dict(hidden_size=gpt2["n_embd"], num_hidden_layers=None)
    assert read_config(gpt2 | same) == read_config(same | gpt2) == read_config(gpt2)
    with pytest.raises(UserError, match="hidden_size = 128 is there under another name with another value"):
        read_config(gpt2 | dict(hidden_size=128))


def test_windows_of_qwen():
    """As in transformers: 28 layers without a window, unless the file says how many, also none, or which."""
    content = json.loads(CONFIGS["qwen2"].to_json_string(use_diff=False)) | dict(num_hidden_layers=30)
    content = {k: v for k, v in content.items() if k not in ("layer_types", "max_window_layers")}
    for more, full in (({}, 28), (dict(max_window_layers=0), 0), (dict(max_window_layers=29), 29)):
        windows = [kind.mask.window for kind in read_config(content | more).layers]
        assert windows == [None] * full + [content["sliding_window"]] * (30 - full)
        fields = {k: v for k, v in (content | more).items() if k != "model_type"}
        kinds = transformers.Qwen2Config(**fields).layer_types
        assert [bool(x) for x in windows] == [kind == "sliding_attention" for kind in kinds]
    for more, message in (
        (dict(sliding_window=None), "field 'sliding_window' is missing"),
        (dict(use_sliding_window=False, layer_types=kinds), "layer_types do not describe 30 layers"),
    ):
        with pytest.raises(UserError, match=message):
            read_config(content | more)


def test_no_dense_layer():
    """first_k_dense_replace = 0: all layers have experts."""
    content = json.loads(CONFIGS["deepseek-v3"].to_json_string(use_diff=False))
    content = {k: v for k, v in content.items() if k != "mlp_layer_types"} | dict(first_k_dense_replace=0)
    assert all(isinstance(kind.feed_forward, model.MoE) for kind in read_config(content).layers)


# ------------------------------------------------------------------------------------------------- GGUF


def gguf_keys(keys: type = gguf.Keys):
    """The names of all fields that the package gguf knows, for Llama."""
    for name, value in vars(keys).items():
        if isinstance(value, type):
            yield from gguf_keys(value)
        elif isinstance(value, str) and not name.startswith("__"):
            yield value.format(arch="llama", id=0, name="tool_use", dense="dense")


def contents(path) -> dict[str, bytes]:
    """The small files that are made of a GGUF file, by their names, but for their checksums."""
    folder = open_checkpoint(str(path)).folder
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "checksums.json"}


@pytest.mark.parametrize("value", [3, deep(True), deep(2.5)])
def test_each_field_of_gguf(value, tmp_path):
    """Each field that the package gguf knows changes what is read or is refused; or it is in the table."""
    path, known = tmp_path / "model.gguf", cannot_matter("GGUF")
    write_gguf(path)
    original = contents(path)
    elsewhere = re.compile(
        r"(?!llama\.|tokenizer\.|general\.)|general\.(?!type|quantization|sampl|arch|align)"
    )
    for key in gguf_keys():
        if elsewhere.match(key):
            continue
        write_gguf(path, fault=said(key, value))
        try:
            unchanged = contents(path) == original
        except UserError as e:
            assert str(e).startswith(f"{path}: ") and "\n" not in str(e)
            continue
        last = re.sub(r"^(llama|tokenizer\.ggml)\.", "", key)
        neutral = value in architectures.NEUTRAL.get(last, ())
        # The list of the chat templates' names; what the file says anyway; a factor of 1.
        same = key in ("tokenizer.chat_templates", "tokenizer.ggml.add_bos_token")
        same |= key == "llama.rope.scaling.factor" and value == 1
        assert not unchanged or neutral or same or {last, key} & known, key


def test_general_fields(tmp_path):
    path = tmp_path / "model.gguf"
    for name, value in (("type", "adapter"), ("quantization_version", 1)):
        write_gguf(path, fault=said(f"general.{name}", value))
        with pytest.raises(UserError, match=f"general.{name} = {value!r} is not supported"):
            open_checkpoint(str(path))
    write_gguf(path, fault=said("mradermacher.quantize_version", "2"))
    assert open_checkpoint(str(path)).config == read_config(CONFIG)


LENGTH = "rope.scaling.original_context_length"
YARN_FIELDS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, {}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0, LENGTH: 64}, {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, dict(rope_type="linear", factor=4.0)),
        ({"rope.scaling.factor": 4.0}, dict(rope_type="linear", factor=4.0)),
        ({"rope.scale_linear": 4.0}, dict(rope_type="linear", factor=4.0)),
        ({**YARN_FIELDS, LENGTH: 64}, YARN),
        (YARN_FIELDS, dict(YARN, original_max_position_embeddings=512)),
        (
            {
                **YARN_FIELDS,
                LENGTH: 64,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_ext_factor": 1.0,
            },
            dict(YARN, beta_fast=16.0),
        ),
        ({"rope.scaling.attn_factor": 1.0, "rope.scaling.finetuned": True}, {}),
        ({"attention.head_count_kv": [2, 2], "feed_forward_length": [256] * 4}, {}),
        ({"attention.causal": True, "vocab_size": 512}, {}),
    ],
)
def test_rope_of_gguf(stated, expected, tmp_path):
    """RoPE as llama.cpp understands the fields, and numbers that all layers share."""

    def change(writer):
        writer.tensors[0].pop("rope_freqs.weight")
        for name, value in stated.items():
            said(f"llama.{name}", value)(writer)

    write_gguf(tmp_path / "model.gguf", fault=change)
    theta = CONFIG["rope_parameters"]["rope_theta"]
    content = CONFIG | dict(rope_parameters=dict(rope_type="default") | expected | dict(rope_theta=theta))
    assert open_checkpoint(str(tmp_path / "model.gguf")).config == read_config(content)


SCALED = [x for x in architectures.ARCHITECTURES if x[0] != "gemma4"]  # which has another RoPE


@pytest.mark.parametrize(("name", "experts"), SCALED)
def test_yarn_of_each_architecture(name, experts):
    needed = {"block_count": 4, "embedding_length": 64, "attention.head_count": 4, "attention.key_length": 16}
    needed |= {"attention.value_length": 16, "rope.dimension_count": 8, "expert_gating_func": 2}
    needed |= {"attention.sliding_window_pattern": [True, True, True, False]}
    needed |= {"ssm.time_step_rank": 2, "ssm.inner_size": 32}
    found = architectures.ARCHITECTURES[name, experts].config({**needed, **YARN_FIELDS, LENGTH: 64})
    assert YARN.items() <= found["rope_scaling"].items()


# ---------------------------------------------------------------- generation_config, tokenizer_config


def test_generation_config(tmp_path, capsys):
    """What is not done is said, once; what changes nothing is not."""
    content = dict(
        bos_token_id=1, max_length=20, num_beams=1, typical_p=1.0, no_repeat_ngram_size=0, min_length=0,
        transformers_version="4.40.0", use_cache=True, length_penalty=2.0, temperature=0.5, do_sample=True,
    )  # fmt: skip
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(content))
    assert choose_sampling({}, tmp_path).temperature == 0.5 and not capsys.readouterr().err
    file.write_text(json.dumps(content | dict(suppress_tokens=[3], min_length=5, top_h=0.4)))
    for _ in range(2):
        choose_sampling({}, tmp_path)
    line = f"warning: {file}: min_length, suppress_tokens, top_h: not supported, answers are made without\n"
    assert capsys.readouterr().err == line


def test_each_field_of_generation_config(tmp_path, capsys):
    """Each field that transformers knows is used, named in a warning, or in the table."""
    used = {"do_sample", "eos_token_id", *requests.SAMPLING_OPTIONS}
    known = cannot_matter("`generation_config.json`") | used
    for name in transformers.GenerationConfig().to_dict():
        (tmp_path / "generation_config.json").write_text(json.dumps({name: 0.5, "do_sample": False}))
        choose_sampling({}, tmp_path)
        assert (f": {name}: not supported" in capsys.readouterr().err) == (
            name not in known and not name.startswith("_")
        )


CLASSES = "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"
SETTINGS = "add_bos_token add_eos_token add_prefix_space split_special_tokens legacy do_lower_case".split()


@pytest.mark.parametrize("kind", CLASSES)
def test_tokenizer_config(kind, tmp_path):
    """The tokens of transformers' own class, whatever its fields say; or a refusal."""
    source = CHECKPOINTS / "tiny-llama3"
    content = json.loads((source / "tokenizer_config.json").read_text())
    os.symlink(source / "tokenizer.json", tmp_path / "tokenizer.json")
    for name in SETTINGS:
        for value in (True, False):
            config = content | {"tokenizer_class": kind, name: value}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
            try:
                ours = load_tokenizer(tmp_path).backend_tokenizer
            except UserError as e:
                assert (name, value) == ("add_prefix_space", True) and "says add_prefix_space" in str(e)
                assert theirs("a").input_ids != theirs(" a").input_ids[:1] + theirs("a").input_ids
                continue
            for text in ("hello World", "a <|eot_id|>b", " x"):
                assert tokenize(ours, text, add_special_tokens=True) == theirs(text).input_ids
