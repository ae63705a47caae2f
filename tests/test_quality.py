"""benchmarks/quality.py against numpy in float64: errors of weights and of predictions, what it refuses."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import quality
from conftest import CHECKPOINTS, ONE_EACH, invoke, mesh_of
from questions import WEATHER
from test_conversion import edited

import convert_checkpoint
import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from checkpoints.names import named_infos
from conversation.text import load_tokenizer
from quantize import INT8

LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Other hosts must be joined before jax is used, as it has been."""
    monkeypatch.setattr(quality.launch, "join_hosts", lambda args: None)


# ---------------------------------------------------------------------------------------------------- weights


def test_errors_of_all_weights(tiny):
    """Each weight, channel by channel: the error of rounding to 127 steps, and the outlier that sets them."""
    checkpoint = open_checkpoint(tiny)
    weights = load(checkpoint, mesh_of(checkpoint.config), "float32", None)
    expected = {}
    for (name, info), w in zip(named_infos(checkpoint.config), jax.tree.leaves(weights), strict=True):
        if info.contracted:
            last = range(-len(info.contracted), 0)
            channels = np.moveaxis(np.asarray(w, float), info.contracted_axes, last)
            shape = channels.shape[: -len(info.contracted)]
            channels = channels.reshape(*shape, -1)
            step = np.abs(channels).max(-1, keepdims=True) / 127
            expected[name] = channels, np.round(channels / step) * step - channels
    found = quality.weight_errors(checkpoint, INT8)
    assert [weight["name"] for weight in found] == list(expected)
    for weight in found:
        w, error = expected[weight["name"]]
        relative = np.sqrt((error**2).sum(-1) / (w**2).sum(-1))
        peaks = np.abs(w).max(-1) / np.sqrt((w**2).mean(-1))
        assert weight["error"] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(w), rel=1e-4)
        assert weight["max_over_rms"] == pytest.approx(peaks.max(), rel=1e-5)
        order = np.argsort(-relative.ravel())
        for channel, i in zip(weight["channels"], order, strict=False):
            place = np.unravel_index(i, relative.shape)
            letters = zip(weight["channels_of"], place, strict=True)
            assert channel["channel"] == " ".join(f"{letter}{n}" for letter, n in letters)
            assert channel["error"] == pytest.approx(relative[place], rel=1e-4)
            assert channel["max_over_rms"] == pytest.approx(peaks[place], rel=1e-5)
        assert len(weight["channels"]) == 3


def with_output(folder, edit) -> pathlib.Path:
    """tiny-llama3 with other values in layer 1's output matrix, [128,128] of "D(KGH)"."""
    shutil.copytree(LLAMA3, folder)
    with edited(folder) as tensors:
        edit(tensors["model.layers.1.self_attn.o_proj.weight"])
    return folder


def double(w):
    w[5] *= 2


@pytest.fixture(scope="module")
def int8(tmp_path_factory) -> pathlib.Path:
    """tiny-llama3, converted to int8."""
    folder = tmp_path_factory.mktemp("quality") / "int8"
    convert_checkpoint.convert(str(LLAMA3), str(folder), INT8)
    return folder


def test_the_int8_folder_is_what_is_compared(int8, tmp_path, monkeypatch):
    """As good as quantized on load, in slices too; of a model whose row 5 is doubled, half wrong there."""
    converted, exact = open_checkpoint(int8), open_checkpoint(LLAMA3)
    on_load = quality.weight_errors(exact, INT8)
    with monkeypatch.context() as patch:
        patch.setattr("checkpoints.layouts.SLICE_BYTES", 20_000)
        for a, b in zip(quality.weight_errors(exact, INT8, converted), on_load, strict=True):
            assert a["error"] == pytest.approx(b["error"], rel=1e-5)
            assert [x["channel"] for x in a["channels"]] == [x["channel"] for x in b["channels"]]

    found = quality.weight_errors(open_checkpoint(with_output(tmp_path / "double", double)), INT8, converted)
    for weight, before in zip(found, on_load, strict=True):
        if weight["name"] == "layers.1.attention.o":
            worst = weight["channels"][0]
            assert worst["channel"] == "D5" and worst["error"] == pytest.approx(0.5, rel=0.01)
        else:
            assert weight["error"] == pytest.approx(before["error"], rel=1e-5)


def test_zeros_outliers_and_what_is_not_finite(int8, tmp_path):
    def zero(w):
        w[5] = 0
        w[7] = 0.001
        w[7, 20] = 0.127  # one step is 0.001: nothing to round

    exact = open_checkpoint(with_output(tmp_path / "zero", zero))
    weight = next(x for x in quality.weight_errors(exact, INT8) if x["name"] == "layers.1.attention.o")
    assert np.isfinite([weight["error"], *(x["error"] for x in weight["channels"])]).all()
    assert not {"D5", "D7"} & {x["channel"] for x in weight["channels"]}
    assert weight["max_over_rms"] == pytest.approx((128 / (1 + 127 / 127**2)) ** 0.5, rel=0.01)
    with pytest.raises(ValueError, match=r"layers\.1\.attention\.o: int8 is not zero"):
        quality.weight_errors(exact, INT8, open_checkpoint(int8))
    for number in (np.nan, np.inf):
        folder = with_output(tmp_path / str(number), lambda w, number=number: w.put(3, number))
        with pytest.raises(ValueError, match=r"layers\.1\.attention\.o: holds NaN or Inf"):
            quality.weight_errors(open_checkpoint(folder), INT8)


# ------------------------------------------------------------------------------------------------ predictions


def in_float64(exact, int8, targets) -> tuple[np.ndarray, ...]:
    """KL, same likeliest token, and losses, from logits [...,V] and targets [...]."""
    p, q = (np.asarray(x, float) for x in (exact, int8))
    p, q = (x - x.max(-1, keepdims=True) for x in (p, q))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    losses = [-np.take_along_axis(x, targets[..., None], -1)[..., 0] for x in (p, q)]
    return (np.exp(p) * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1), *losses


@pytest.mark.parametrize("spread, difference", [(5, 0.0), (5, 1e-3), (5, 0.1), (5, 10.0), (100, 300.0)])
def test_divergence_of_any_size(spread, difference):
    """From equal logits to opposite ones; a mean over small KLs needs each to a few digits, none negative."""
    random = np.random.default_rng(0)
    exact = spread * random.standard_normal((2, 8, 300)).astype(np.float32)
    int8 = exact + difference * random.standard_normal(exact.shape).astype(np.float32)
    targets = random.integers(0, 300, exact.shape[:2])
    found = quality.divergence(exact, int8, targets)
    for ours, truth in zip(found, in_float64(exact, int8, targets), strict=True):
        np.testing.assert_allclose(ours, truth, rtol=2e-3, atol=1e-12)


def test_predictions():
    """A text in windows of which the last is not full, nor the rows of the last batch on two data shards."""
    checkpoint = open_checkpoint(LLAMA4)
    cfg = checkpoint.config
    mesh = mesh_of(cfg, "dp2-ep2-tp2")
    weights = [load(checkpoint, mesh, "float32", format) for format in (None, INT8)]
    tokenizer = load_tokenizer(LLAMA4)
    tokens = quality.windows(tokenizer, WEATHER, 48, mesh.shape["data"], cfg)
    found = quality.compare(*weights, tokens, cfg, mesh)

    ids = tokenizer.encode(WEATHER, add_special_tokens=False)
    rows = [[tokenizer.bos_token_id, *ids[i : i + 48]] for i in range(0, len(ids), 48)]
    assert len(rows) > 2 and len(rows) % 2 and len(rows[-1]) < 49
    measured = []
    for row in rows:
        padded = np.full((mesh.shape["data"], 48), 7, np.int32)  # what follows is not seen
        padded[:, : len(row) - 1] = row[:-1]
        logits = [model.forward(padded, w, cfg=cfg, mesh=mesh)[0, : len(row) - 1] for w in weights]
        measured.append(in_float64(*logits, np.array(row[1:])))
    kl, same, *losses = (np.concatenate(x) for x in zip(*measured, strict=True))
    assert found["tokens"] == len(ids) == len(kl) and found["window"] == 48
    truth = dict(mean=kl.mean(), median=np.median(kl), percentile_99=np.quantile(kl, 0.99), max=kl.max())
    assert found["kl"] == pytest.approx(truth, rel=1e-3) and 0 < truth["median"] < truth["mean"]
    assert found["top_1"] == same.mean()
    assert found["perplexity"] == pytest.approx([np.exp(loss.mean()) for loss in losses], rel=1e-4)


def test_windows_without_a_first_token():
    """A tokenizer that begins a text with nothing: the first token of each window is not predicted."""

    class Letters:
        def __call__(self, text, **_):
            return type("Encoding", (), dict(input_ids=[ord(letter) - ord("a") for letter in text]))

    cfg = open_checkpoint(LLAMA3).config
    rows = quality.windows(Letters(), "abcdefgh", 2, 2, cfg)
    np.testing.assert_array_equal(rows, [[0, 1, 2], [3, 4, 5], [6, 7, -1], [-1, -1, -1]])


# ------------------------------------------------------------------------------------------------ the command


def test_a_run(int8, tmp_path, monkeypatch, capsys):
    """int8 of another model than the float one: both halves of the report say so."""
    folder = with_output(tmp_path / "double", double)
    (tmp_path / "text").write_text("3 + 4 = 7.", encoding="utf-8")
    files = ["--checkpoint", folder, "--converted", int8, "--text", tmp_path / "text"]
    files += ["--json", tmp_path / "json"]
    code, out, err = invoke(monkeypatch, capsys, quality, *files, "--top", "2", *ONE_EACH)
    assert code == 0 and "comparing predictions" in err
    result = json.loads((tmp_path / "json").read_text())
    assert out == quality.report(result, 2) + "\n"
    tables = [part.split("\n") for part in out.split("\n\n")]
    assert [len(part) for part in tables] == [2 + 8, 2 + 2, 2 + 1, 2]
    for part in tables[:-1]:
        assert len({line.count("|") for line in part}) == 1
    found = {x["name"]: x["error"] for x in result["weights"]}
    k = [found[f"layers.{i}.attention.k"] for i in range(4)]
    assert max(k) > k[0] and f"| attention.k | khD, kh | 4 | {np.mean(k):.2%} | {max(k):.2%} |" in out
    assert tables[1][2].startswith(f"| layers.1.attention.o | {max(found.values()):.2%} | D5: 50.0")
    assert result["text"]["kl"]["median"] > 1e-3  # of its own int8: 2e-4


def test_without_a_text(monkeypatch, capsys):
    code, out, _ = invoke(monkeypatch, capsys, quality, "--checkpoint", LLAMA3)
    assert code == 0 and out.count("\n|---|") == 2 and "No --text: predictions are not compared." in out


WRONG = {
    "int8 already": (["--checkpoint", "INT8"], "its weights are int8; give the float model"),
    "not int8": (["--checkpoint", LLAMA3, "--converted", LLAMA3], "its weights are not int8"),
    "another model": (["--checkpoint", LLAMA4, "--converted", "INT8"], "its config.json is not that of"),
    "empty": (["--checkpoint", LLAMA3, "--text", "EMPTY"], "no text in it"),
    "one token": (["--checkpoint", LLAMA3, "--text", "SHORT", *ONE_EACH], "--text: 1 token is too little"),
    "not UTF-8": (["--checkpoint", LLAMA3, "--text", "BINARY"], "not a UTF-8 text file"),
    "no such text": (["--checkpoint", LLAMA3, "--text", "/nowhere"], "/nowhere"),
    "no place for the result": (["--checkpoint", LLAMA3, "--json", "/no/such/file"], "/no/such/file"),
    "no such model": (["--checkpoint", "/no/such/model"], "/no/such/model: no such folder"),
    "no window": (["--checkpoint", LLAMA3, "--window", "0"], "--window 0 is not at least 1"),
    "no checkpoint": ([], "--checkpoint"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input(wrong, int8, tmp_path, monkeypatch, capsys):
    files = dict(EMPTY=b" \n", SHORT=b"a", BINARY=b"\xff\xfe\x00")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    places = {name: tmp_path / name for name in files} | dict(INT8=int8)
    arguments, message = WRONG[wrong]
    code, out, err = invoke(monkeypatch, capsys, quality, *(places.get(x, x) for x in arguments))
    assert code in (1, 2) and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
