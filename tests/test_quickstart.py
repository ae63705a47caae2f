"""docs/tpu-quickstart.md: its commands run in their order, for workers that are processes with CPU devices.

Stand-ins for gcloud, git archive, uv, sudo and others come before the real programs in PATH. gcloud's runs a
remote command here, once per worker, with a home of its own and the variables that tell a process who it is.
"""

import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from buckets import VARIABLES
from conftest import CHECKPOINTS, FAST
from processes import errors, finish, free_port, start

from checkpoints.layouts import layout_of
from checkpoints.names import named_infos
from convert_checkpoint import convert
from distributed.roll_call import call_roll
from families.registry import read_config
from feedback.errors import UserError
from planner.published_models import MODELS
from quantize import INT8

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "tpu-quickstart.md").read_text()
BLOCKS = re.findall(r"```bash slice\n(.*?)```", PAGE, re.DOTALL)
NAMES, STEPS = BLOCKS[0], BLOCKS[1:]
VARIANTS = dict(re.findall(r"```bash (v\d\w+-\d+)\n(.*?)```", PAGE, re.DOTALL))

# A network and processes of its own: ports are free, nobody else can connect, and at the end all are killed.
ALONE = ["unshare", "-rnpf", "--mount-proc", "bash", "-c", 'ip link set lo up && exec bash "$0"']

# Google's storage, as the workers and gcloud's stand-in find it.
STORAGE = f"""
{sys.executable} {ROOT}/tests/buckets.py 9000 &
until curl --silent --output /dev/null 127.0.0.1:9000; do /bin/sleep 0.2; done
"""

GCLOUD = r'''
import os, pathlib, re, shutil, subprocess, sys, threading
here = pathlib.Path(os.environ["STANDINS"])
workers = int(os.environ["WORKERS"])
IMAGES = {"v5litepod": "v2-alpha-tpuv5-lite", "v6e": "v2-alpha-tpuv6e"}
# Each command with options that it has by Google's reference; "=": with a value.
COMMANDS = {
    "services enable": "",
    "compute tpus queued-resources create":
        "--node-id= --zone= --accelerator-type= --runtime-version= --spot --data-disk=",
    "compute tpus queued-resources describe": "--zone= --format=",
    "compute tpus queued-resources delete": "--zone= --force --quiet",
    "compute tpus tpu-vm ssh": "--zone= --worker= --command=",
    "compute tpus tpu-vm scp": "--zone= --worker= --recurse",
    "compute tpus tpu-vm list": "--zone=",
    "config get-value project": "",
    "projects describe": "--format=",
    "storage buckets create": "--location= --uniform-bucket-level-access",
    "storage buckets add-iam-policy-binding": "--member= --role=",
    "storage rm": "--recursive",
}
PROJECT, NUMBER = "tiny", "123456789"

arguments = sys.argv[1:]
rest = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
words = [x for x in arguments[: len(arguments) - len(rest)] if not x.startswith("--")]
options = dict(x.partition("=")[::2] for x in arguments[: len(arguments) - len(rest)] if x[:2] == "--" != x)
command = next(name for name in COMMANDS if words[: len(name.split())] == name.split())
given = words[len(command.split()) :]
for name, value in options.items():
    assert (name + "=" if value else name) in COMMANDS[command].split(), (command, name)
if "--zone=" in COMMANDS[command]:
    assert options["--zone"] == os.environ["ZONE"]
with open(here / "log", "a") as log:
    print(command, *given, file=log)

def thing(kind, name):
    return here / f"{kind}-{name}"

def start(worker, text):
    """A command on a worker."""
    home = here / f"worker{worker}"
    home.mkdir(exist_ok=True)
    mine = {
        "HOME": str(home), "PATH": os.environ["PATH"], "STANDINS": str(here), "FLAGS": os.environ["FLAGS"],
        # What jax is told by the metadata server of a TPU.
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:8471", "JAX_NUM_PROCESSES": str(workers),
        "JAX_PROCESS_ID": str(worker),
        "STORAGE_EMULATOR_HOST": "127.0.0.1:9000",
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(["bash", "-c", text], cwd=home, env=mine, stdout=pipe, stderr=pipe)

def bucket(name):
    import boto3  # takes a second
    return boto3.resource("s3", endpoint_url="http://127.0.0.1:9000").Bucket(name.removeprefix("gs://"))

def relay(process):
    """Threads that pass on what a process writes, until nobody can write any more: so long ssh waits."""
    pairs = [(process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)]
    threads = [threading.Thread(target=shutil.copyfileobj, args=pair, daemon=True) for pair in pairs]
    [thread.start() for thread in threads]
    return threads

match command.split()[-2:]:
    case ["queued-resources", "create"]:
        generation, chips = options["--accelerator-type"].rsplit("-", 1)
        assert options["--runtime-version"] == IMAGES[generation] and int(chips) in (8, 16)
        thing("request", *given).write_text(options["--node-id"])
        thing("slice", options["--node-id"]).touch()
    case ["queued-resources", "describe"]:
        assert thing("request", *given).exists() and options["--format"] == "value(state.state)"
        print("ACTIVE")
    case ["queued-resources", "delete"]:
        thing("slice", thing("request", *given).read_text()).unlink()
        thing("request", *given).unlink()
    case ["get-value", "project"]:
        print(PROJECT)
    case ["projects", "describe"]:
        assert given == [PROJECT] and options["--format"] == "value(projectNumber)"
        print(NUMBER)
    case ["buckets", "create"]:
        assert os.environ["ZONE"].startswith(options["--location"] + "-")
        bucket(*given).create()
    case ["buckets", "add-iam-policy-binding"]:
        account = f"serviceAccount:{NUMBER}-compute@developer.gserviceaccount.com"
        assert options == {"--member": account, "--role": "roles/storage.objectUser"}
        assert bucket(*given).creation_date
    case ["storage", "rm"]:
        bucket(*given).objects.delete()
        bucket(*given).delete()
    case ["tpu-vm", "list"]:
        print(*(x.name for x in here.glob("slice-*")))
    case ["tpu-vm", "scp"]:
        source, destination = given
        assert thing("slice", destination.removesuffix(":")).exists() and options["--worker"] == "all"
        for worker in range(workers):
            (here / f"worker{worker}").mkdir(exist_ok=True)
            subprocess.run(["cp", source, here / f"worker{worker}"], check=True)
    case ["tpu-vm", "ssh"]:
        assert thing("slice", *given).exists()
        if rest:  # all is one machine, so the port is there already
            assert rest == ["-N", "-L", "8000:localhost:8000"] and options["--worker"] == "0"
            os.execv("/bin/sleep", ["sleep", "infinity"])
        numbers = range(workers) if options["--worker"] == "all" else [int(options["--worker"])]
        running = [start(worker, options["--command"]) for worker in numbers]
        threads = [thread for process in running for thread in relay(process)]
        codes = [process.wait() for process in running]
        for thread in threads:
            thread.join(2)
            if thread.is_alive():
                print("ssh hangs: a process holds its output", file=sys.stderr, flush=True)
                os._exit(92)
        sys.stdout.flush()
        sys.exit(max(codes))
'''

# The page's uv makes an environment: here its python is this test's, on chips that a CPU plays.
UV = """#!/usr/bin/env bash
set -e
case "$*" in
  "venv --allow-existing --python 3.11 $HOME/llama-env")
    mkdir -p ~/llama-env/bin && cp "$STANDINS/python" "$STANDINS/hf" ~/llama-env/bin ;;
  "pip install --python $HOME/llama-env/bin/python -e .[tpu,serve] jax==0.10.2") test -e pyproject.toml ;;
  *) exit 96 ;;
esac
"""
PYTHON = f"""#!/usr/bin/env bash
[[ $JAX_PLATFORMS == tpu,cpu ]] || exit 97
export JAX_PLATFORMS=cpu XLA_FLAGS=$FLAGS
exec {sys.executable} tests/pod.py v5e "$@"
"""
# pkill and pgrep find the processes of this worker only, those with its home.
OF_THIS_WORKER = """#!/usr/bin/env bash
[[ $* == "-f {name}" ]] || exit 93
for process in $(grep -lz "^HOME=$HOME$" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3); do
  if grep -q "{name}" /proc/$process/cmdline; then {do} $process; found=1; fi
done
[[ $found ]]
"""
STANDINS = {
    "gcloud": f'#!/usr/bin/env bash\nexec {sys.executable} "$STANDINS/gcloud.py" "$@"\n',
    "git": f"""#!/usr/bin/env bash
[[ $* == "archive --format=tar.gz --prefix=llama-jax/ -o $HOME/llama-jax.tar.gz HEAD" ]] || exit 95
cd {ROOT}
exec tar czf ~/llama-jax.tar.gz --exclude=.git --exclude=__pycache__ --transform 's,^\\.,llama-jax,' .
""",
    "curl": f"""#!/usr/bin/env bash
[[ $* == "-LsSf https://astral.sh/uv/install.sh" ]] || exec {shutil.which("curl")} --noproxy '*' "$@"
echo 'mkdir -p ~/.local/bin && cp "$STANDINS/uv" ~/.local/bin'
""",
    "pkill": OF_THIS_WORKER.format(name="[m]ain.py", do="kill"),
    "pgrep": OF_THIS_WORKER.format(name="[c]onvert_checkpoint", do="echo"),
    "hf": '#!/usr/bin/env bash\n[[ $* == "auth whoami" ]] && grep -qx hf_secret ~/.cache/huggingface/token\n',
    "ssh-add": '#!/usr/bin/env bash\n[[ $* == "$HOME/.ssh/google_compute_engine" ]]\n',
    "sleep": "#!/usr/bin/env bash\nexec /bin/sleep 3\n",
    "uv": UV,
    "python": PYTHON,
    "gcloud.py": GCLOUD,
}


@pytest.fixture
def follow(tmp_path):
    """Runs blocks of the page, each after `changes`: their output, a text per block."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*ALONE, "/dev/null"], capture_output=True).returncode
    ):
        pytest.skip("unshare -rnp and ip are needed, to run servers and to end them where nobody else can")
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "home").mkdir()

    def run(changes: str, blocks: list[str], workers: int, chips: int) -> list[str]:
        flags = f"--xla_force_host_platform_device_count={chips} {FAST}"
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path / "home"), "FLAGS": flags,
            "STANDINS": str(tmp_path), "WORKERS": str(workers), **VARIABLES,
        }  # fmt: skip
        script = ["set -e -o pipefail", STORAGE, NAMES, changes]
        script += [f"echo '=== {i}'\n{block}" for i, block in enumerate(blocks)]
        (tmp_path / "script").write_text("\n".join(script))
        with open(tmp_path / "errors", "w+") as errors:
            done = subprocess.run(
                [*ALONE, tmp_path / "script"], cwd=ROOT, env=variables, input="hf_secret\n", text=True,
                stdout=subprocess.PIPE, stderr=errors, timeout=570,
            )  # fmt: skip
            errors.seek(0)
            assert done.returncode == 0, done.stdout + errors.read()
        return re.split(r"=== \d+\n", done.stdout)[1:]

    return run


@pytest.mark.deep
def test_the_page(follow, tmp_path):
    """Two workers with two chips each, from the slice to an answer and back, with the tiny model."""
    outputs = dict(zip(STEPS, follow(f"MODEL={CHECKPOINTS / 'tiny-llama3'}", STEPS, 2, 2), strict=True))

    def printed(words: str) -> str:
        (out,) = [out for step, out in outputs.items() if words in step]
        return out

    assert printed("queued-resources create") == "ACTIVE\n"
    check = printed("--json --prompt 'Tell me your name'")
    assert '"devices": 4\n"text": "My name is Tiny' in check and check.replace("4", "16", 1) in PAGE
    token = tmp_path / "worker0" / ".cache" / "huggingface" / "token"
    assert token.read_text() == "hf_secret\n" and token.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "worker1" / ".cache" / "huggingface").exists()
    right = r"the checksums of \d+ tensors and of the model's other files are right"
    assert re.search("^gs://tiny-llama/llama3.1-70b-int8: " + right, printed("--verify"))
    assert printed("Why is the sky blue?").startswith("> Why is the sky blue?\n")
    assert '{"status":"ready"}' in printed("--serve")
    assert "My name is Tiny Llama" in printed("curl --retry")
    for worker in range(2):
        log = (tmp_path / f"worker{worker}" / "serve.log").read_text()
        assert "error" not in log and "Traceback" not in log, log
    assert printed("tpu-vm list") == "\n"  # nothing is left
    assert not [*tmp_path.glob("slice-*"), *tmp_path.glob("request-*")]
    for worker in range(2):  # the programs are in the bucket, not in the home
        assert not list((tmp_path / f"worker{worker}").rglob("*.program"))


def test_in_the_background(follow):
    """ssh ends at once after the page's form of starting something, and hangs after the shorter form."""
    create = next(step for step in STEPS if "queued-resources create" in step)
    kept = "nohup /bin/sleep 100 > ~/log 2>&1 < /dev/null &"
    shorter = f'(on all "cd ~ && {kept}" 2>&1 || echo failed)'
    outputs = follow("", [create, f'on all "cd ~ && {{ {kept} }}"', shorter], 2, 1)
    assert not outputs[1] and "ssh hangs" in outputs[2] and outputs[2].endswith("failed\n")
    background = [line for line in PAGE.replace("\\\n", "").splitlines() if "nohup" in line]
    assert len(background) == 2 and all(re.search(r"&& \{ .* & \}\"$", line) for line in background)


@pytest.mark.parametrize(
    "slice", ["v6e-16", *(pytest.param(x, marks=pytest.mark.deep) for x in ("v6e-8", "v5e-8"))]
)
def test_other_slices(follow, slice):
    """Their names go together, and the same commands create and delete them."""
    ends = [step for step in STEPS if re.search("buckets create|queued-resources", step)]
    assert len(ends) == 3
    workers = {"v6e-16": 4, "v6e-8": 1, "v5e-8": 1}[slice]
    assert follow(VARIANTS[slice], ends, workers, 4)[-1] == "\n"


def test_two_slices():
    """The page's `on` for them: both run a command, either may fail, and no tunnel is waited for."""
    (block,) = re.findall(r"```bash two slices\n(.*?)```", PAGE, re.DOTALL)
    gcloud = 'gcloud() { for x; do [ "${x%%=*}" != --command ] || c=${x#*=}; done; NODE=$5 bash -c "$c"; }\n'
    commands = ["on 0 'exit 7'", "on all '[ $NODE = llama-0 ]'", "on all '[ $NODE = llama-1 ]'"]
    script = f"TPU=llama ZONE=zone\n{gcloud}{block}sleep 100 >/dev/null & tunnel=$!\n"
    script += "".join(f"{x}; echo $?\n" for x in (*commands, "on all 'echo $NODE'")) + "kill $tunnel"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    codes, nodes, last = done.stdout.split()[:3], done.stdout.split()[3:5], done.stdout.split()[5]
    assert (codes, {*nodes}, last) == (["7", "1", "1"], {"llama-0", "llama-1"}, "0"), done.stderr


def test_other_pages():
    """Commands for a TPU's workers name zone and worker, and run the Python of step 2 of this page."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in pages)
    gcloud = re.findall(r"gcloud compute tpus tpu-vm (?:ssh|scp) [^\n`]*", text)
    assert len(gcloud) > 6 and all("--zone=" in x and "--worker=" in x for x in gcloud)
    others = re.findall(r"\b(?:on (?:all|\d)|tpu_exec \d+ \d+) ['\"b][^\n]*|JAX_PROCESS_ID=0 +[^\n]*", text)
    for command in gcloud + others:
        python = set(re.findall(r"(?<![\w-])(?!-)[\w/~.-]*\bpython3?\b(?! --version)", command))
        assert python <= {"~/llama-env/bin/python"}, command


@pytest.fixture
def published(tmp_path) -> pathlib.Path:
    """Llama 3.1 70B as published, but for its numbers: 141 GB of holes."""
    folder = tmp_path / "llama3.1-70b"
    shutil.copytree(CHECKPOINTS / "tiny-llama3", folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(MODELS["llama3.1-70b"]))
    header, end = {}, 0
    for _, info in named_infos(read_config(MODELS["llama3.1-70b"])):
        shape = layout_of(info, info.stored).shape
        start, end = end, end + 2 * math.prod(shape)
        header[info.stored.name] = dict(dtype="BF16", shape=shape, data_offsets=[start, end])
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)
    assert f"{end / 1e9:.1f} GB" in PAGE
    return folder


@pytest.mark.parametrize("options", ["--dtype bfloat16", "--quantize int8 --rows 128 --max-len 65536"])
def test_what_does_not_fit(options, published):
    """On one host of eight v5e chips; the page has the same figures."""
    ((code, out, err),) = finish(
        start(1, 8, "--checkpoint", published, *options.split(), wrapper=["pod.py", "v5e"])
    )
    assert (code, out) == (1, "") and err.splitlines()[-1] in PAGE, err


def test_disk_too_small(published, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=50e9)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError) as error:
        convert(str(published), str(tmp_path / "llama3.1-70b-int8"), INT8, "bfloat16")
    assert f"error: {error.value}".replace(str(tmp_path), "/models") in PAGE


def test_missing_worker():
    """One of four does not come."""

    def come(index: int, seconds: int) -> str:
        with pytest.raises(UserError) as error:
            call_roll(address, index, 4, f"t1v-{index}", seconds)
        return f"error: {error.value}"

    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(come, index, 60) for index in (1, 3)]
        assert come(0, 1).replace("in 1 s", "in 60 s") in PAGE
    assert all(x.result().startswith("error: process 2 of 4 did not come") for x in others)


def test_no_tpu():
    """As the page's JAX_PLATFORMS has it, a process without a TPU ends, and does not go on with a CPU."""
    environment = os.environ | {"JAX_PLATFORMS": "tpu,cpu"}
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    (line,) = errors(done.stderr)
    assert re.sub(r"'tpu': .*\);", "'tpu': ...);", line) in PAGE and done.returncode == 1 and not done.stdout
