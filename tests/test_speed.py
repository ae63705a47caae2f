"""benchmarks/speed.py and plots.py: what they count, what they print, what they refuse."""

import dataclasses
import gzip
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import plots
import pytest
import speed
from conftest import Kind, invoke, llama4_config

import model
from planner.published_models import read_model
from quantize import INT8
from sharding.arrays import abstract
from sharding.mesh import make_mesh

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = "tests/checkpoints/tiny-llama4"


def run_speed(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "benchmarks/speed.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


# ------------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("format", [None, INT8])
@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("tokens, context", [(1, 0), (1, 5), (6, 0), (3, 4)])
def test_operations_are_those_of_each_product(tokens, context, chooses, format):
    """Counted one by one, for a model with dense and routed, chunked and global layers."""
    kinds = (Kind(chunk=4, moe=True), Kind(rope=False), Kind(chunk=4))
    cfg = llama4_config(kinds, D=8, K=2, G=3, H=4, F=16, V=10, E=4, A=2, M=6)
    weights = abstract(model.weight_infos(cfg, format=format), make_mesh(cfg), np.float32)
    count = 0
    for kind in kinds:
        for position in range(context, context + tokens):
            if kind is kinds[-1] and not chooses:
                count += 2 * 8 * 4 * (2 + 2)  # k, v
                continue
            count += 2 * 8 * 4 * (2 * 3 + 2 + 2) + 2 * 2 * 3 * 4 * 8  # q, k, v; o
            seen = position % 4 + 1 if kind.chunk else position + 1
            count += seen * 2 * 3 * (2 * 4 + 2 * 4)  # of each head: scores, values
            if kind.moe:
                count += 2 * 8 * 4 + 3 * 2 * 8 * 6 * (2 + 1)  # router; two experts and the shared one
            else:
                count += 3 * 2 * 8 * 16
    count += 2 * 8 * 10 * chooses  # the last token's logits
    assert speed.needed_flops(weights, cfg, 5, tokens, context, chooses) == 5 * count


def test_operations_of_states():
    """Three products with S for each token, wherever it is; prefill ends with what the last layer keeps."""
    cfg = read_model("qwen3.5-0.8b")
    cfg = dataclasses.replace(cfg, layers=2 * cfg.layers[:1])
    weights = abstract(model.weight_infos(cfg), make_mesh(cfg), np.float32)
    inputs = 2 * 1024 * (3 * 2048 + 2 * 16)  # q, k and v, decay and strength
    taps, others = 2 * 4 * 3 * 2048, 2 * 2 * 1024 * 2048 + 2 * 3 * 1024 * 3584  # z and the output; the MLP
    vectors = 2 * (2 * 16 + 128)  # counted as a matrix
    layer = inputs + taps + others + vectors + 3 * 2 * 16 * 128 * 128
    for context in (0, 100):
        found = speed.needed_flops(weights, cfg, 5, 6, context, chooses=False)
        assert found == 5 * 6 * (layer + inputs)


@pytest.mark.parametrize(
    ("batch", "length", "limit", "width"),
    [(1, 600, 512, 512), (1, 2048, 2048, 2048), (3, 4096, 2048, 1024), (8, 20, 512, 32), (9, 512, 512, 256),
     (32, 512, 512, 128), (999, 40, 512, 16)],
)  # fmt: skip
def test_prefill_chunks_fit_in_memory(batch, length, limit, width):
    assert speed.chunk_width(batch, length, limit) == width


HLO = """
  %fusion.1 = f32[2]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(step)/shard_map/attention/dot"}
  ROOT %dot.2 = f32[2]{0} dot(%a, %b), metadata={op_name="jit(step)/feed_forward/experts/dot_general"}
  %all-reduce.3 = f32[2]{0} all-reduce(%a), metadata={op_name="jit(step)/attention/psum"}
  %copy.4 = (f32[2]{0}, s32[]) copy(%a)
  %while.5 = (f32[2]{0}, s32[]) while(%t), body=%b, metadata={op_name="jit(step)/attention/while"}
"""


def test_components(tmp_path):
    """Time goes to the scope of the instruction, whether it is named by its event or by an argument."""

    def event(name, duration, **arguments):
        return dict(ph="X", name=name, dur=duration, args=arguments)

    events = [event("fusion.1", 3), event("x", 2, hlo_op="dot.2"), event("all-reduce.3", 4)]
    events += [event("copy.4", 1), event("while.5", 50)]
    events += [event("somewhere in the host", 100), dict(ph="M", name="fusion.1")]
    file = tmp_path / "plugins" / "profile" / "now" / "host.trace.json.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps(dict(traceEvents=events)).encode()))
    shares = dict(attention=0.3, experts=0.2, collectives=0.4, other=0.1)
    assert speed.components(tmp_path, HLO) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("profiles", "platform", "options"),
    [
        (True, "gpu", [{}, speed.WITHOUT_GRAPHS]),
        (False, "gpu", [{}]),
        (True, "cpu", [{}]),
    ],
)
def test_a_second_program_is_for_a_profile(profiles, platform, options, monkeypatch):
    """Compiling one takes a GPU long, and without a profile nobody runs it."""
    seen = []

    def compile(given=None):
        seen.append(given or {})
        return f"program {len(seen)}"

    monkeypatch.setattr(speed, "platform", lambda mesh: platform)
    bench = speed.Bench(None, None, None, "float32", 1, 1.0, 1.0, profiles)
    function = types.SimpleNamespace(lower=lambda **_: types.SimpleNamespace(compile=compile))
    program = bench.compile(function)
    assert seen == options and program.compiled == "program 1"
    assert program.profiled == (f"program {len(options)}" if profiles else None)


# ------------------------------------------------------------------------------------------------ the command


def test_a_run_and_a_comparison_with_it(tmp_path):
    size = ["--batch", "1,2", "--context", "64", "--prompt", "16", "--repeat", "2"]
    done = run_speed(
        "--checkpoint", TINY, *size, "--json", f"{tmp_path}/a.json", "--profile", f"{tmp_path}/p"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "a.json").read_text())
    measured = [(row["batch"], row["phase"]) for row in result["rows"]]
    assert measured == [(1, "decode"), (1, "prefill"), (2, "decode"), (2, "prefill")]
    for row in result["rows"]:
        assert row["tokens_per_second"] == row["batch"] * row["tokens"] / row["seconds"]
        assert row["seconds_least"] <= row["seconds"] <= row["seconds_most"]
        assert row["of_roofline"] == max(row["mbu"], row["mfu"]) > 0
        assert sum(row["components"].values()) == pytest.approx(1)
        assert {"attention", "experts"} <= set(row["components"])
        assert ("unembed" in row["components"]) == (row["phase"] == "decode")
    assert len(list((tmp_path / "p").rglob("perfetto_trace.json.gz"))) == 4
    assert speed.report(result) in done.stdout

    plots.draw(tmp_path / "a.json", tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()

    half = json.loads((tmp_path / "a.json").read_text())
    for row in half["rows"]:
        row["tokens_per_second"] /= 2
    half["rows"].pop()
    table = speed.table(result, half)
    assert table.count("+100.0%") == 3 and table.count("not measured") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "one of the arguments --model --checkpoint is required"),
        (["--model", "llama9"], "--model llama9: no such model or config.json"),
        (["--model", "llama3.2-1b", "--batch", "0"], "--batch: invalid list of numbers above 0 value: '0'"),
        (["--model", "llama3.2-1b", "--batch", "1,x"], "--batch: invalid list"),
        (["--checkpoint", TINY, "--profile", "README.md/x"], "README.md"),
        (["--checkpoint", TINY, "--layers", "1"], "--layers is for --model"),
        (["--checkpoint", TINY, "--context", "100000"], "--context 100000: the model's limit is"),
        (["--model", "llama3.1-405b"], "does not fit"),
        (["--checkpoint", TINY, "--compare", "README.md"], "README.md: not what speed.py --json writes"),
        (["--checkpoint", TINY, "--compare", "nowhere.json"], "nowhere.json"),
        (["--checkpoint", TINY, "--json", "no/such/folder.json"], "no/such/folder.json"),
    ],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(speed.launch, "join_hosts", lambda args: None)  # which must come before jax is used
    code, out, err = invoke(monkeypatch, capsys, speed, *arguments)
    assert code != 0 and message in err
    assert "Traceback" not in err and out == ""


def test_the_docs_have_what_was_measured():
    """Every table that plots.py makes of images/ is in docs/, whose lines may be broken elsewhere."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    docs = " ".join("\n".join(file.read_text() for file in files).split())
    for file in sorted((ROOT / "images").glob("*.json*")):
        for part in plots.tables(file).split("\n\n"):
            assert " ".join(part.split()) in docs, (file.name, part.split("\n")[0])
