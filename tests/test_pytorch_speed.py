"""benchmarks/pytorch_speed.py on a CPU: what it times of transformers, what it tells, what it refuses.

gpt-fast is not a package, so its model is not run here.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import pytorch_speed

from planner import published_models

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = "tests/checkpoints/tiny-llama3"


def run_it(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "benchmarks/pytorch_speed.py", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_a_run(tmp_path):
    file = tmp_path / "found.json"
    size = ["--batch", "1,2", "--context", "64", "--prompt", "16", "--steps", "2", "--repeat", "2"]
    done = run_it("--config", TINY, *size, "--no-compile", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    measured = [(row["program"], row["batch"], row["phase"]) for row in result["rows"]]
    decode = [("transformers", 1, "decode"), ("transformers", 2, "decode")]
    assert measured == [*decode, ("transformers", 1, "prefill")], result
    for row in result["rows"]:
        assert row["tokens_per_second"] == row["batch"] * row["tokens"] / row["seconds"]
        assert 0 < row["seconds_least"] <= row["seconds"] <= row["seconds_most"]
    assert done.stdout == pytorch_speed.report(result) + "\n"
    assert "| transformers | bfloat16, prefill 1 x 16, not compiled | " in done.stdout
    assert result["versions"]["torch"] in done.stdout and result["gpt_fast"] is None
    assert done.stderr.startswith("gpt-fast is not timed: --gpt-fast DIR names a checkout of it\n")


def test_the_static_cache_is_used_as_it_should():
    """A step after a prompt computes the logits that the model computes without a cache."""
    config = pytorch_speed.read_config(ROOT / TINY)
    with torch.no_grad():
        program = pytorch_speed.Transformers(config, "bfloat16", "cpu", "")
        tokens = torch.arange(20)[None].repeat(2, 1)
        tokens[1] += 100
        expected = program.model(tokens, use_cache=False).logits[:, -1]
        cache, positions = program.cache(2, 24), torch.arange(20)
        program.logits(tokens[:, :10], positions[:10], cache)
        pytorch_speed.set_length(cache, torch.tensor([4]))  # back to the fifth token, as for another turn
        program.logits(tokens[:, 4:19], positions[4:19], cache)
        found = program.logits(tokens[:, 19:], positions[19:], cache)[:, -1]
    assert found.shape == expected.shape == (2, config["vocab_size"])
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def test_shapes_are_those_of_the_published_models():
    for name, config in pytorch_speed.MODELS.items():
        known = published_models.MODELS[name]
        assert all(config[key] == known[key] for key in known.keys() & config.keys())
        assert known.keys() - config.keys() <= {"head_dim"}


def test_sizes_for_gpt_fast():
    sizes = pytorch_speed.gpt_fast_sizes(pytorch_speed.MODELS["llama3.1-8b"])
    assert (sizes["dim"], sizes["n_layer"], sizes["n_local_heads"]) == (4096, 32, 8)
    assert sizes["rope_base"] == 500000 and sizes["rope_scaling"]["factor"] == 8
    older = dict(pytorch_speed.MODELS["llama3.1-8b"], rope_parameters=None, rope_theta=1e6, head_dim=128)
    sizes = pytorch_speed.gpt_fast_sizes(older)
    assert sizes["rope_base"] == 1e6 and sizes["rope_scaling"] is None
    with pytest.raises(ValueError, match="no heads of 64 columns"):
        pytorch_speed.gpt_fast_sizes(older | dict(head_dim=64))
    with pytest.raises(ValueError, match="no RoPE of the kind yarn"):
        pytorch_speed.gpt_fast_sizes(older | dict(rope_scaling=dict(rope_type="yarn")))


def test_a_process_that_fails_is_told(tmp_path):
    """Nor does it take our own model.py and quantize.py for gpt-fast's."""
    job = dict(program="gpt-fast", format="int8", config={}, device="cpu", path=str(tmp_path))
    facts, failure = pytorch_speed.cases_found(job)
    assert facts["cuda"] is None and failure["failure"] == "ModuleNotFoundError: No module named 'generate'"
    (failure,) = pytorch_speed.cases_found("not a job")
    assert failure["failure"].startswith("TypeError: ")


def test_what_is_told():
    job, row = dict(program="gpt-fast", format="int8"), dict(phase="decode", batch=2, tokens=1, context=64)
    row |= dict(compiled=True, seconds=0.004, seconds_least=0.003, seconds_most=0.01, tokens_per_second=500.0)
    result = dict(model="m", versions={}, gpt_fast="abc", date="today", repeat=1, steps=2, rows=[], notes=[])
    for found in (
        dict(device="card", cuda="13.0"),
        row,
        dict(failure="no | memory"),
        dict(note="skipping cudagraphs"),
    ):
        pytorch_speed.add(result, job, found)
    lines = pytorch_speed.report(result).splitlines()
    assert lines[2] == "| gpt-fast | int8, decode 2 x 64 | 4.00 (3.00..10.00) | 500.0 |"
    assert lines[3] == "| gpt-fast | int8 | no \\| memory | none |"
    assert "; card; CUDA 13.0; gpt-fast abc; today." in lines[5]
    assert lines[7] == "gpt-fast, int8: skipping cudagraphs"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "llama3.1-8"], "--model llama3.1-8: none of llama3.1-8b, llama3.2-1b; did you mean"),
        (["--config", "README.md"], "--config README.md: not JSON"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--config", "tests/checkpoints/tiny-llama4"], "config.json: model_type is"),
        (["--gpt-fast", "."], ": no generate.py there; give the folder of a checkout of gpt-fast"),
        (["--gpt-fast", "nowhere"], "nowhere: no model.py there"),
        (["--formats", "int8,int2"], "--formats: int2 is none of bfloat16, int8, int4"),
        (["--batch", "0"], "--batch: invalid list of numbers above 0 value: '0'"),
        (["--steps", "0"], "--steps 0 is not at least 1"),
        (["--config", TINY, "--context", "500"], "--context 500 and --steps 64: the limit is 512 positions"),
        (["--config", TINY, "--context", "64"], "--prompt 2048: the limit is 512 positions"),
        (["--json", "no/such/folder.json"], "no/such/folder.json: no such file or directory"),
    ],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["pytorch_speed.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        pytorch_speed.run()
    printed = capsys.readouterr()
    told = ended.value.code if isinstance(ended.value.code, str) else printed.err
    assert ended.value.code and message in told and told.startswith("error: ")
    assert len(told.strip().splitlines()) == 1 and printed.out == ""
