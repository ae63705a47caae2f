"""Conversions that are killed, run out of room or meet damage: what is written is whole, or is not there."""

import collections
import contextlib
import errno
import json
import mmap
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from conftest import CHECKPOINTS
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file
from test_quantize import read

import convert_checkpoint
from checkpoints import unfinished, writing
from checkpoints.checkpoint import open_checkpoint
from checkpoints.file_plan import PlannedArray, divide, plan_files
from checkpoints.folders import INDEX, STATE
from checkpoints.layouts import layout_of
from checkpoints.loading import load
from checkpoints.names import named_infos
from checkpoints.tensor_files import MappedFile, TensorFile
from convert_checkpoint import convert, verify
from families.registry import read_config
from quantize import INT8, quantize
from sharding.mesh import make_mesh

ROOT = pathlib.Path(convert_checkpoint.__file__).parent
LLAMA3, LLAMA4 = CHECKPOINTS / "tiny-llama3", CHECKPOINTS / "tiny-llama4"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """tiny-llama4 in int8, in a dozen files."""
    folder = tmp_path_factory.mktemp("undisturbed") / "int8"
    convert(str(LLAMA4), str(folder), format=INT8, file_bytes=150_000)
    return folder


# Converts, and kills itself at the n-th of the calls by which something on the disk changes.
KILLED = """
import os
import pathlib
import signal
import sys
import numpy
import convert_checkpoint
calls, fatal = 0, int(sys.argv[3])
def counted(function):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
for place, name in (os, "pwrite"), (os, "fsync"), (pathlib.Path, "rename"), (pathlib.Path, "unlink"):
    setattr(place, name, counted(getattr(place, name)))
convert_checkpoint.convert(sys.argv[1], sys.argv[2], convert_checkpoint.FORMATS['int8'], file_bytes=150_000)
print(calls)
"""


@pytest.mark.parametrize("random_points", [0, pytest.param(8, marks=pytest.mark.deep)])
def test_killed_conversion_goes_on(random_points, undisturbed, tmp_path):
    """SIGKILL at random calls and the last two, of which the first gives the folder its name.

    Before that there is none, and the next run makes the same bytes.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}

    def start(name, fatal):
        command = [sys.executable, "-c", KILLED, LLAMA4, tmp_path / name, str(fatal)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)

    calls = int(start("counted", 0).communicate()[0])
    assert contents(tmp_path / "counted") == contents(undisturbed)
    points = random.Random(0).sample(range(1, calls - 1), random_points) + [calls - 1, calls]
    killed = {}
    for pair in zip(points[::2], points[1::2], strict=True):
        killed |= {point: start(f"at{point}", point) for point in pair}
        for point in pair:
            killed[point].communicate()
            assert killed[point].returncode == -signal.SIGKILL
    for point in points:
        folder, partial = tmp_path / f"at{point}", tmp_path / f"at{point}.incomplete"
        assert folder.exists() == (point == calls)
        before = {path: path.stat().st_mtime_ns for path in partial.glob("weights-*.safetensors")}
        if partial.exists() and not (partial / INDEX).exists():
            with pytest.raises(ValueError):
                open_checkpoint(partial)
        convert(str(LLAMA4), str(folder), format=INT8, file_bytes=150_000)
        assert contents(folder) == contents(undisturbed) and not partial.exists()
        for path, time in before.items():  # what was whole was not written again
            assert (folder / path.name).stat().st_mtime_ns == time


def test_full_disk(tmp_path, monkeypatch):
    """No room from the start, and none any more after some writes."""
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(ValueError, match="GB are to be written, and 0.00 GB are free"):
            convert(str(LLAMA3), str(tmp_path / "x"))
    writes, pwrite = [], os.pwrite

    def full(*arguments):
        writes.append(arguments)
        if len(writes) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(ValueError, match="x.incomplete: No space left on device; make room and run"):
            convert(str(LLAMA3), str(tmp_path / "x"), file_bytes=200_000)
    assert not (tmp_path / "x").exists()
    written = [TensorFile(MappedFile(x)) for x in (tmp_path / "x.incomplete").glob("*.safetensors")]
    whole = sum(tensor.stop - tensor.start for file in written for tensor in file.tensors.values())
    left = (LLAMA3 / "model.safetensors").stat().st_size - whole
    with monkeypatch.context() as patch:  # room for what is left, if what was begun makes way

        def disk_usage(folder):
            begun = sum(path.stat().st_size for path in folder.glob("*.partial"))
            return usage._replace(free=left - begun)

        patch.setattr("shutil.disk_usage", disk_usage)
        convert(str(LLAMA3), str(tmp_path / "x"), file_bytes=200_000)
    convert(str(LLAMA3), str(tmp_path / "y"), file_bytes=200_000)
    assert contents(tmp_path / "x") == contents(tmp_path / "y")


def test_whose_folder_it_is(undisturbed, tmp_path, monkeypatch, capsys):
    """Done already; under way; begun for something else; not a conversion's."""
    convert(str(LLAMA4), str(undisturbed), format=INT8, file_bytes=150_000)
    assert "is there already" in capsys.readouterr().err
    last = sorted(undisturbed.glob("weights-*"))[-1]
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{last.name}: has .* bytes, not"):
        convert(str(LLAMA4), str(undisturbed), format=INT8, file_bytes=150_000)
    last.write_bytes(whole)
    with pytest.raises(ValueError, match="is int8 already"):
        convert(str(undisturbed), str(tmp_path / "x"), format=INT8)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="link: exists and is something else"):
        convert(str(LLAMA3), str(tmp_path / "link"))
    with pytest.raises(ValueError, match="exists and is something else"):
        convert(str(LLAMA4), str(undisturbed), format=INT8)
    (tmp_path / "mine.incomplete").mkdir()
    (tmp_path / "mine.incomplete" / "diary").write_text("")
    with pytest.raises(ValueError, match="mine.incomplete: is left from another conversion"):
        convert(str(LLAMA3), str(tmp_path / "mine"))
    (tmp_path / "mine.incomplete" / "diary").unlink()
    (tmp_path / "mine.incomplete" / STATE).touch()
    mine = unfinished.NewFolder(tmp_path / "mine")
    with monkeypatch.context() as patch:  # what is left of several processes, of which the first was killed
        patch.setattr(unfinished, "process_index", lambda: 1)
        patch.setattr(unfinished, "from_first", lambda function: None)
        with mine.claimed({}):
            patch.undo()
            with pytest.raises(ValueError, match="another conversion is writing there"):
                convert(str(LLAMA3), str(tmp_path / "mine"))
    with mine.claimed({"source": "another"}):
        with pytest.raises(ValueError, match="another conversion is writing there"):
            convert(str(LLAMA3), str(tmp_path / "mine"))
        (tmp_path / "mine.incomplete" / "weights-00001.safetensors").write_text("")
    with pytest.raises(ValueError, match="is left from another conversion"):
        convert(str(LLAMA3), str(tmp_path / "mine"))


def test_disk_without_locks(tmp_path, monkeypatch, capsys):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    convert(str(LLAMA3), str(tmp_path / "x"))
    assert "conversion.json: No locks available; start no other conversion" in capsys.readouterr().err
    verify(str(tmp_path / "x"), str(LLAMA3))


def test_another_fine_tune_is_another_source(tmp_path):
    """The same names, shapes and sizes, other weights: neither done already nor to be gone on with."""
    source = small_model(tmp_path / "source")
    convert(str(source), str(tmp_path / "x"))
    with edited(source) as tensors:
        tensors["model.norm.weight"] += 1
    with pytest.raises(ValueError, match="exists and is something else"):
        convert(str(source), str(tmp_path / "x"))


# ------------------------------------------------------------------------------------------ several processes


# The n-th write of one process kills it, or finds the disk full.
TOGETHER = """
import argparse
import errno
import os
import signal
import sys
import jax
import convert_checkpoint
from checkpoints import unfinished
from terminal.command_line import run
from terminal.launch import join_hosts
source, destination, victim, fatal, how = sys.argv[1:]
join_hosts(argparse.Namespace(timeout=20))
pwrite, calls = os.pwrite, 0
def counted(*arguments):
    global calls
    calls += 1
    if jax.process_index() == int(victim) and calls == int(fatal):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, "No space left on device")
    return pwrite(*arguments)
os.pwrite = counted
unfinished.SECONDS_UNSEEN, dtype = 1, None
if jax.process_index() == int(victim) and how == "elsewhere":
    destination = os.path.join(os.path.dirname(destination), "elsewhere", "x")
if jax.process_index() == int(victim) and how == "dtype":
    dtype = "float32"
format = convert_checkpoint.FORMATS["int8"]
run(lambda: convert_checkpoint.convert(source, destination, format, dtype, file_bytes=150_000))
"""


def together(count, *arguments, program=convert_checkpoint.__file__):
    """The same command in each of so many processes, which are one computation."""
    own = processes.Own((), {"PYTHONPATH": str(ROOT)}, program)
    return processes.start(count, 1, *arguments, own=[own] * count)


@pytest.fixture
def program(tmp_path):
    (tmp_path / "faulty.py").write_text(TOGETHER)
    return tmp_path / "faulty.py"


def test_two_processes_divide_the_files(tmp_path):
    """The same bytes as of one process; each has written files of its own, and the first one tells."""
    convert(str(LLAMA4), str(tmp_path / "x"), file_bytes=2**20)
    running = together(2, LLAMA4, tmp_path / "new" / "y", "--file-mib", 1)
    (code, _, first), (other, _, second) = processes.finish(running)
    assert (code, other) == (0, 0), first + second
    assert contents(tmp_path / "new" / "y") == contents(tmp_path / "x")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["y"]
    assert "converting: 100%" in first and "converting" not in second


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_of_the_files(count):
    """Each file once, and no process has more bytes than another but by one set of files."""
    file_sets = plan_files(open_checkpoint(str(LLAMA4)), INT8, "bfloat16", 50_000)
    shares = divide(file_sets, count)
    assert sorted(name for share in shares for file_set in share for name in file_set.files) == sorted(
        name for file_set in file_sets for name in file_set.files
    )
    loads = [sum(file_set.nbytes for file_set in share) for share in shares]
    assert max(loads) - min(loads) <= max(file_set.nbytes for file_set in file_sets)
    assert count > 1 or shares == [file_sets]


@pytest.mark.deep
@pytest.mark.parametrize(("count", "victim"), [(2, 1), (3, 0)])
def test_killed_process_of_several(count, victim, undisturbed, program, tmp_path):
    """One is killed at its first write or when some files are whole, and the others leave; others go on."""
    for fatal, again in ((1, 2), (60, count)):
        folder, partial = tmp_path / f"at{fatal}", tmp_path / f"at{fatal}.incomplete"
        running = together(count, LLAMA4, folder, victim, fatal, "kill", program=program)
        outcomes = processes.finish(running)
        assert outcomes[victim][0] == -signal.SIGKILL and not folder.exists(), outcomes
        before = {path: path.stat().st_mtime_ns for path in partial.glob("weights-*.safetensors")}
        assert (fatal == 1) or before
        outcomes = processes.finish(together(again, LLAMA4, folder, -1, 0, "", program=program))
        assert [code for code, *_ in outcomes] == [0] * again, outcomes
        assert contents(folder) == contents(undisturbed) and not partial.exists()
        for path, time in before.items():  # what was whole was not written again
            assert (folder / path.name).stat().st_mtime_ns == time


@pytest.mark.deep
def test_errors_of_one_process(tmp_path, program, undisturbed):
    """A full disk, a disk of its own, NaN: it says what it is, and the other that it was this one."""

    def refused(*arguments, source=LLAMA4):
        outcomes = processes.finish(together(2, source, tmp_path / "x", *arguments, program=program))
        lines = [error.splitlines()[-1] for *_, error in outcomes]
        assert [code for code, *_ in outcomes] == [1, 1], outcomes
        (own,) = {line for line in lines if not re.match(r"error: process \d of 2 \(on ", line)}
        (reason,) = {line.partition(" has failed: ")[2] for line in lines} - {""} or {own[7:]}
        assert f"error: {reason}" == own, lines
        return own

    partial = tmp_path / "x.incomplete"
    no_room = f"error: {partial}: No space left on device; make room and run again to go on"
    assert refused(1, 9, "full") == no_room
    shutil.copytree(partial, tmp_path / "y.incomplete")
    convert(str(LLAMA4), str(tmp_path / "y"), format=INT8, file_bytes=150_000)
    assert contents(tmp_path / "y") == contents(undisturbed)
    shutil.rmtree(partial)
    shutil.copytree(LLAMA4, tmp_path / "source")
    with edited(tmp_path / "source") as tensors:
        name = next(name for name in tensors if "down_proj" in name)
        tensors[name][0] = np.nan
    assert f": tensor {name} holds NaN or Inf; " in refused(-1, 0, "", source=tmp_path / "source")
    assert "is left from another conversion" in refused(-1, 0, "")
    elsewhere = tmp_path / "elsewhere" / "x.incomplete" / STATE
    shutil.rmtree(partial)
    absent = f"error: {elsewhere}: is not there, though another process wrote it; is the disk shared?"
    assert refused(1, 0, "elsewhere") == absent
    assert "all processes must see the same files" in refused(1, 0, "dtype")


# --------------------------------------------------------------------------------------------------- damage


def flip(random, data):
    position = random.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << random.randrange(8)]) + data[position + 1 :]


def flip_header(random, data):
    """A bit among the first 4096 bytes: lengths, names, shapes, offsets."""
    return flip(random, data[:4096]) + data[4096:]


def cut(random, data):
    return data[: random.randrange(len(data))]


def zero(random, data):
    """A block that was never written."""
    position = random.randrange(len(data))
    return data[:position] + bytes(min(512, len(data) - position)) + data[position + 512 :]


def random_model(folder, like, config):
    """A Hugging Face folder with random bfloat16 weights, and the tokenizer of a tiny model."""
    folder.mkdir()
    for path in like.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(0), {}
    for _, info in named_infos(read_config(config)):
        stored = info.stored
        tensors[stored.name] = rng.standard_normal(layout_of(info, stored).shape).astype(bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder


@contextlib.contextmanager
def edited(folder):
    """The tensors of a model by their names, which are written back."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors")


def small_model(folder):
    """tiny-llama3's configuration with sizes that make a file of a few kilobytes."""
    config = json.loads((LLAMA3 / "config.json").read_text())
    sizes = dict(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    sizes |= dict(intermediate_size=64, num_hidden_layers=1, vocab_size=40)
    return random_model(folder, LLAMA3, config | sizes)


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@pytest.mark.parametrize("times", [200, pytest.param(2000, marks=pytest.mark.deep)])
def test_random_damage(times, tmp_path):
    """Each time a file is damaged: opening or --verify finds that, or all that is loaded is the same."""
    folder, rng = tmp_path / "small", random.Random(0)
    convert(str(small_model(tmp_path / "source")), str(folder), format=INT8, file_bytes=2000)
    whole, expected = contents(folder), open_checkpoint(folder)
    arrays = {name: read(source) for name, source in expected.sources.items()}

    def outcome():
        try:
            opened = open_checkpoint(folder)
            found = {name: read(source) for name, source in opened.sources.items()}
        except ValueError as e:
            assert str(folder) in str(e)
            return "refused"
        try:
            verify(str(folder))
        except ValueError as e:
            assert str(folder) in str(e)
            return "found by --verify"
        assert opened.config == expected.config and found.keys() == arrays.keys()
        assert all(same(found[name], array) for name, array in arrays.items())
        return "harmless"

    outcomes = collections.Counter()
    for _ in range(times):
        name, other = rng.choices(sorted(whole), k=2)
        damage = rng.choice([flip, flip_header, cut, zero, None])
        if damage:
            (folder / name).write_bytes(damage(rng, whole[name]))
        else:  # the two change places
            (folder / name).write_bytes(whole[other])
            (folder / other).write_bytes(whole[name])
        outcomes[outcome()] += 1
        for file in (name, other):
            (folder / file).write_bytes(whole[file])
    assert len(outcomes) == 3 and min(outcomes.values()) > times / 100, outcomes


def test_verify(undisturbed, tmp_path):
    """Exactly the source's, or within half a step; damage by name; another model; a source that is int8."""
    assert "within half a step of int8" in verify(str(undisturbed), str(LLAMA4))[1]
    for dtype in ("bfloat16", "float32"):
        convert(str(LLAMA4), str(tmp_path / dtype), dtype=dtype)
        assert f"in {dtype} exactly" in verify(str(tmp_path / dtype), str(LLAMA4))[1]
        assert open_checkpoint(tmp_path / dtype).dtype == dtype
    convert(str(tmp_path / "bfloat16"), str(tmp_path / "int8"), format=INT8, file_bytes=150_000)
    weights = {name: data for name, data in contents(undisturbed).items() if name.startswith("weights-")}
    assert weights.items() <= contents(tmp_path / "int8").items()  # with or without the original
    with pytest.raises(ValueError, match="another model"):
        verify(str(undisturbed), str(LLAMA3))
    with pytest.raises(ValueError, match="is int8"):
        verify(str(undisturbed), str(undisturbed))
    with pytest.raises(ValueError, match="is not a converted folder"):
        verify(str(LLAMA4))


def test_verify_of_the_other_files(tmp_path):
    """Damage to the tokenizer, also where the index does not know of it; an index that is not ours."""
    folder = tmp_path / "x"
    convert(str(LLAMA3), str(folder))
    index, tokenizer = json.loads((folder / INDEX).read_text()), (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(tokenizer + b" ")
    facts = index["files"].pop("tokenizer.json")
    for files in (index["files"] | {"tokenizer.json": facts}, index["files"]):
        (folder / INDEX).write_text(json.dumps(index | {"files": files}))
        with pytest.raises(ValueError, match="tokenizer.json: is not the file that"):
            verify(str(folder))
    (folder / INDEX).write_text(json.dumps(index | {"files": index["files"] | {"config.json": 5}}))
    with pytest.raises(ValueError, match="no config.json in it"):
        verify(str(folder))


def test_commands(tmp_path, capsys, monkeypatch):
    """A converted folder to int8, --verify with and without its source."""
    convert(str(LLAMA3), str(tmp_path / "float"), file_bytes=20_000)
    assert len(list((tmp_path / "float").glob("weights-*"))) > 32
    command = [sys.executable, ROOT / "convert_checkpoint.py", tmp_path / "float", tmp_path / "int8"]
    command += ["--quantize", "int8"]
    # Fewer open files than there are: the limit is raised as far as it may be.
    done = subprocess.run(["sh", "-c", 'ulimit -Sn 16; exec "$@"', "sh", *command])
    assert done.returncode == 0 and open_checkpoint(tmp_path / "int8").format
    monkeypatch.setattr(convert_checkpoint, "join_hosts", lambda args: None)  # jax has been used
    convert_checkpoint.main([str(tmp_path / "float"), str(tmp_path / "int8"), "--verify"])
    out = capsys.readouterr().out
    assert "checksums of" in out and "within half a step of int8 of those of" in out
    convert_checkpoint.main([str(tmp_path / "int8"), "--verify"])
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("wrong", ["I8", "F32", "BF16"])
def test_verify_compares_with_the_source(wrong, tmp_path, monkeypatch):
    """A converter that is wrong by one step, one scale or one bit, with checksums that are right."""
    write = PlannedArray.write

    def write_wrongly(self, files, letter, lo, values):
        if self.dtype == wrong and self.parts[0].name.startswith("layers.0.attention.o"):
            values = values.copy()
            values.view(np.dtype(f"u{values.itemsize}")).flat[3] ^= 2 if wrong == "I8" else 1 << 8
        write(self, files, letter, lo, values)

    monkeypatch.setattr(PlannedArray, "write", write_wrongly)
    convert(str(LLAMA4), str(tmp_path / "x"), format=None if wrong == "BF16" else INT8)
    verify(str(tmp_path / "x"))
    with pytest.raises(ValueError, match="x: layers.0.attention.o is not what .*tiny-llama4 has"):
        verify(str(tmp_path / "x"), str(LLAMA4))


def test_verify_finds_steps_that_are_too_coarse(tmp_path, monkeypatch):
    """Within half a step of the source, but the steps are twice what they need to be."""

    def coarse(x, info):
        axes = info.contracted_axes
        scale = 2 * quantize(jnp.asarray(x), axes).scale
        values = jnp.round(x.astype(jnp.float32) / jnp.expand_dims(scale, axes))
        return [np.asarray(values.astype(jnp.int8)), np.asarray(scale)]

    monkeypatch.setattr(writing, "quantize_on_host", coarse)
    convert(str(LLAMA4), str(tmp_path / "x"), format=INT8)
    with pytest.raises(ValueError, match="x: layers.0.attention.q is not what .*tiny-llama4 has"):
        verify(str(tmp_path / "x"), str(LLAMA4))


# ------------------------------------------------------------------------------------------ sources and sizes


@pytest.mark.parametrize("format", [None, INT8])
@pytest.mark.parametrize("value", [np.nan, np.inf, pytest.param(-np.inf, marks=pytest.mark.deep)])
def test_nonfinite_weights(value, format, tmp_path):
    """Refused by name; if asked for, their channel is not finite in int8 either, also quantized on load."""
    shutil.copytree(LLAMA3, tmp_path / "source")
    with edited(tmp_path / "source") as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value
    source = str(tmp_path / "source")
    with pytest.raises(ValueError, match="safetensors: tensor model.layers.1.mlp.up_proj.weight holds NaN"):
        convert(source, str(tmp_path / "x"), format)
    convert(source, str(tmp_path / "x"), format, allow_nonfinite=True)
    verify(str(tmp_path / "x"), source)
    for folder in (source, tmp_path / "x"):
        checkpoint = open_checkpoint(folder)
        mesh = make_mesh(checkpoint.config, devices=jax.devices()[:1])
        up = load(checkpoint, mesh, "bfloat16", format).layers[1].feed_forward.up
        finite = np.isfinite(up.scale if format else np.asarray(up, np.float32).sum(1))
        assert not finite[5] and finite.sum() == len(finite) - 1


def test_source_that_changes_meanwhile(tmp_path, monkeypatch):
    source, finish = small_model(tmp_path / "source"), writing._add_small_files

    def change(*arguments):
        index = finish(*arguments)
        (source / "model.safetensors").touch()
        return index

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_add_small_files", change)
        with pytest.raises(ValueError, match="source: changed in the meantime; remove .*x.incomplete and"):
            convert(str(source), str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_tiny_channels(tmp_path):
    """A scale that is subnormal, which XLA takes for 0: still within half a step."""
    source = small_model(tmp_path / "source")
    with edited(source) as tensors:
        tensors["model.layers.0.mlp.up_proj.weight"][5] *= 1e-37
    convert(str(source), str(tmp_path / "x"), format=INT8)
    assert "within half a step" in verify(str(tmp_path / "x"), str(source))[1]


def test_float32_anywhere_is_kept(tmp_path):
    source = small_model(tmp_path / "source")
    with edited(source) as tensors:
        up = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float32) * np.float32(1.1)
        tensors["model.layers.0.mlp.up_proj.weight"] = up
    convert(str(source), str(tmp_path / "x"))
    checkpoint = open_checkpoint(tmp_path / "x")
    np.testing.assert_array_equal(read(checkpoint.sources["layers.0.feed_forward.up"]), up)
    convert(str(source), str(tmp_path / "int8"), format=INT8)
    assert open_checkpoint(tmp_path / "int8").dtype == "float32"


def test_float_that_bfloat16_cannot_hold(tmp_path):
    """float32 up to 3.4e38, and float16, become bfloat16; what rounds to infinity there is refused."""
    source = small_model(tmp_path / "source")
    with edited(source) as tensors:
        tensors |= {name: x.astype(np.float16) for name, x in tensors.items()}
    convert(str(source), str(tmp_path / "x"))
    assert "exactly" in verify(str(tmp_path / "x"), str(source))[1]
    with edited(source) as tensors:
        tensors |= {name: x.astype(np.float32) for name, x in tensors.items()}
        tensors["model.norm.weight"][0] = np.finfo(np.float32).max
    with pytest.raises(ValueError, match="model.norm.weight holds numbers that are too large for bfloat16"):
        convert(str(source), str(tmp_path / "y"), dtype="bfloat16")


@pytest.mark.parametrize("file_bytes", [pytest.param(1, marks=pytest.mark.deep), 3000, 40_000])
def test_files_have_the_size_that_was_asked_for(file_bytes, tmp_path):
    """No file holds more of tensors, unless it is one row of one; what was cut is whole when loaded."""
    convert(str(LLAMA4), str(tmp_path / "x"), format=INT8, file_bytes=file_bytes)
    for path in (tmp_path / "x").glob("weights-*.safetensors"):
        tensors = load_file(path).values()
        one_row = len(tensors) == 1 and len(*tensors) == 1
        assert one_row or sum(x.nbytes for x in tensors) <= file_bytes
    assert "within half a step" in verify(str(tmp_path / "x"), str(LLAMA4))[1]


def test_slices(tmp_path, monkeypatch):
    """Weights that are converted in slices of a few rows end as the same bytes."""
    convert(str(LLAMA4), str(tmp_path / "x"), format=INT8)
    monkeypatch.setattr("checkpoints.layouts.SLICE_BYTES", 5000)
    convert(str(LLAMA4), str(tmp_path / "y"), format=INT8)
    assert contents(tmp_path / "x") == contents(tmp_path / "y")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A converted Llama 4 layer whose matrices exceed what is read at once."""
    folder = tmp_path_factory.mktemp("wide")
    config = json.loads((LLAMA4 / "config.json").read_text())
    sizes = dict(hidden_size=512, head_dim=64, num_attention_heads=8, num_key_value_heads=4, vocab_size=644)
    sizes |= dict(num_hidden_layers=1, intermediate_size=2048, intermediate_size_mlp=2048)
    config = {name: value for name, value in config.items() if name not in ("layer_types", "no_rope_layers")}
    random_model(folder / "source", LLAMA4, config | sizes | dict(moe_layers=[0], tie_word_embeddings=True))
    convert(str(folder / "source"), str(folder / "bfloat16"))
    convert(str(folder / "source"), str(folder / "int8"), format=INT8)
    return folder


def watch(checkpoint):
    """The pages of its files, as (mapping, number), that the system will be advised about, by advice."""
    advised = collections.defaultdict(set)

    class Mapped(mmap.mmap):
        def madvise(self, advice, start, length):
            pages = range(start // 4096, -(-(start + length) // 4096))
            advised[advice].update((id(self), page) for page in pages)

    for file in {x.file.content for source in checkpoint.sources.values() for x in source.tensors}:
        with file.path.open("rb") as opened:
            file.mapped = Mapped(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return advised


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("expert, tensor", [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_a_process_reads_its_own_bytes(expert, tensor, kind, wide):
    """What one device's process has read from the files is 5% more than what it holds, at most."""
    checkpoint = open_checkpoint(wide / kind)
    mesh = make_mesh(checkpoint.config, 1, expert, tensor, jax.devices()[: expert * tensor])
    advised, held = watch(checkpoint), 0
    for source in checkpoint.sources.values():
        sharding = jax.sharding.NamedSharding(mesh, source.info.spec)
        index = sharding.devices_indices_map(source.info.shape)[mesh.devices.flat[-1]]
        box = tuple(x.indices(n)[:2] for x, n in zip(index, source.info.shape, strict=True))
        held += source.read(box).nbytes
    assert held <= 4096 * len(advised[mmap.MADV_WILLNEED]) <= 1.05 * held


def test_a_cpu_uses_weights_in_place(wide):
    """What has our order and type in the file is not copied; not even with an odd vocabulary before it."""
    checkpoint = open_checkpoint(wide / "int8")
    mesh = make_mesh(checkpoint.config, devices=jax.devices()[:1])
    weights = load(checkpoint, mesh, "bfloat16", INT8)
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    places = [line.split()[0].split("-") for line in maps if str(wide / "int8") in line]

    def in_place(x):
        return any(int(lo, 16) <= x.unsafe_buffer_pointer() < int(hi, 16) for lo, hi in places)

    layer, embed = weights.layers[0], weights.embed
    shared = layer.feed_forward.shared
    for x in (embed, layer.attention.q, layer.attention.k, layer.feed_forward.down, shared.up):
        assert in_place(x.values)
    assert embed.scale.nbytes % 64 and in_place(layer.feed_forward.router) and in_place(weights.norm)
    assert not in_place(layer.attention.o.values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_copied_is_not_held_twice(dtype, wide):
    """The pages that were read are given back; in the type of the file, those of matrices that move."""
    checkpoint = open_checkpoint(wide / "bfloat16")
    advised = watch(checkpoint)
    load(checkpoint, make_mesh(checkpoint.config, devices=jax.devices()[:1]), dtype, None)
    moved = {"attention.o", "feed_forward.gate", "feed_forward.up", "feed_forward.shared.down"}
    for name, source in checkpoint.sources.items():
        copied = dtype == "float32" or name.removeprefix("layers.0.") in moved
        (tensor,) = source.tensors
        pages = range(tensor.start // 4096 + 1, tensor.stop // 4096)  # that are no other tensor's
        given_back = {(id(tensor.file.content.mapped), page) in advised[mmap.MADV_DONTNEED] for page in pages}
        assert given_back <= {copied}
