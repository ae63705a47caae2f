"""docs/clusters.md: its commands run, as far as one machine can, and its manifest says what it must."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest
import yaml
from conftest import FAST

import main

ROOT = pathlib.Path(main.__file__).parent
TEXT = (ROOT / "docs" / "clusters.md").read_text()
TWO, MPIRUN = re.findall(r"```bash run\n(.*?)```", TEXT, re.DOTALL)
(TPU_EXEC,) = re.findall(r"```bash tpu_exec\n(.*?)```", TEXT, re.DOTALL)
(MANIFEST,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)

# A network of its own: nobody else can reach what listens there, and any port is free.
ALONE = ["unshare", "-rn", "bash", "-c", 'ip link set lo up && exec bash -c "$0"']
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def shell(command: list[str], program: str, **variables) -> subprocess.CompletedProcess:
    """What a snippet prints; python3 is the one that runs this test."""
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST} | variables
    return subprocess.run(
        [*command, program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.fixture
def network():
    """Skips where there cannot be one."""
    if shutil.which("unshare") is None or shell(ALONE, "true").returncode:
        pytest.skip("unshare -rn and ip are needed, to listen where nobody else can connect")


def answers(program: str, **variables) -> str:
    done = shell(ALONE, program, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
def test_by_hand(network):
    assert answers(TWO) == answers('python3 main.py --prompt "Who are you?"')


@pytest.mark.deep
def test_mpirun(network):
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    alone = MPIRUN[MPIRUN.index("python3") :]
    out = answers(MPIRUN, **OPEN_MPI)
    assert len(out.splitlines()) > 1 and out == answers(alone)


GCLOUD = """#!/usr/bin/env bash
for argument; do
  case $argument in
    --worker=*) export WORKER=${argument#*=} ;;
    --command=*) command=${argument#*=} ;;
  esac
done
[[ $* == "compute tpus tpu-vm ssh pod --zone=here --worker=$WORKER --command=$command -- -tt" ]] || exit 99
exec bash -c "$command"
"""


@pytest.fixture
def tpu_exec(tmp_path):
    """Runs tpu_exec where `gcloud` runs the command here, as worker $WORKER: exit code, sorted lines."""
    (tmp_path / "gcloud").write_text(GCLOUD)
    (tmp_path / "gcloud").chmod(0o755)

    def run(arguments: str) -> tuple[int, list[str]]:
        program = f"PATH={tmp_path}:$PATH TPU=pod ZONE=here\n{TPU_EXEC}\ntpu_exec {arguments}"
        done = shell(["bash", "-c"], program, FOLDER=str(tmp_path))
        assert not done.stderr
        return done.returncode, sorted(done.stdout.splitlines())

    return run


def test_tpu_exec_arguments(tpu_exec):
    """They arrive as they are; lines have the worker's number, the last one too if it does not end."""
    arguments = r"""'<%s>' "a  b" "it's" '$HOME' '*' '' 'a"b\c' '; exit 5'"""
    expected = r"""<a  b><it's><$HOME><*><><a"b\c><; exit 5>"""
    assert tpu_exec(f"1 3 printf {arguments}") == (0, [f"{worker}: {expected}" for worker in (1, 2, 3)])
    assert tpu_exec(r"0 0 printf 'a\r\n b \n\nc'") == (0, ["0: ", "0:  b ", "0: a", "0: c"])


def test_tpu_exec_runs_side_by_side(tpu_exec):
    """Each waits until all are there."""
    wait = "touch $FOLDER/at$WORKER; until [ $(ls $FOLDER/at* | wc -l) = 3 ]; do sleep 0.05; done; echo all"
    assert tpu_exec(f"0 2 timeout 30 bash -c '{wait}'") == (0, ["0: all", "1: all", "2: all"])


def is_running(process: int) -> bool:
    """Not if it has ended and nobody has asked how."""
    try:
        return "(zombie)" not in pathlib.Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_tpu_exec_stops_all(tpu_exec, tmp_path):
    """One fails when the others have begun: they end, and its code and words come back."""
    fail = "until [ -e $FOLDER/of0 -a -e $FOLDER/of2 ]; do sleep 0.05; done; echo no >&2; exit 7"
    hang = "echo $$ >$FOLDER/new$WORKER; mv $FOLDER/new$WORKER $FOLDER/of$WORKER; exec sleep 60"
    assert tpu_exec(f"0 2 bash -c 'if [ $WORKER = 1 ]; then {fail}; fi; {hang}'") == (7, ["1: no"])
    processes = [int((tmp_path / f"of{worker}").read_text()) for worker in (0, 2)]
    end = time.monotonic() + 30
    while any(map(is_running, processes)):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_jobset():
    """All pods run at once, and each finds pod 0 under the name that JobSet gives it."""
    jobset = yaml.safe_load(MANIFEST)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    network, (replicated,) = jobset["spec"]["network"], jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert network["enableDNSHostnames"] and replicated["replicas"] == 1
    assert job["completions"] == job["parallelism"] and job["completionMode"] == "Indexed"
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = job["template"]["spec"]["containers"]
    env = {variable["name"]: variable for variable in container["env"]}
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{network['subdomain']}"
    assert re.fullmatch(rf"{first}:\d+", env["JAX_COORDINATOR_ADDRESS"]["value"])
    assert env["JAX_NUM_PROCESSES"]["value"] == str(job["completions"])
    index = env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
