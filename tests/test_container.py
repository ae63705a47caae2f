"""Dockerfile and examples/kubernetes: what they install, copy, ask and mount is there. No image is built."""

import ast
import json
import pathlib
import re
import shlex
import tomllib

import kubernetes_validate
import pytest
import yaml
from docker.utils.build import exclude_paths

import main
from server.app import make_app
from server.http import LINGER
from server.loop import EngineLoop
from server.metrics import Metrics
from terminal.options import parse_arguments
from terminal.serve_command import KEY

ROOT = pathlib.Path(main.__file__).parent
TEXT = (ROOT / "Dockerfile").read_text()
STEPS = re.findall(r"^([A-Z]+) (.*)$", re.sub(r"^#.*\n", "", TEXT, flags=re.M).replace("\\\n", ""), re.M)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVER, SLICE = (
    list(yaml.safe_load_all((ROOT / "examples" / "kubernetes" / name).read_text()))
    for name in ("server.yaml", "tpu-slice.yaml")
)


def steps(name: str) -> list[str]:
    return [rest.strip() for step, rest in STEPS if step == name]


def paths() -> set[str]:
    """The server's own."""
    app = make_app(EngineLoop(1, 1, 1.0, Metrics()), None, [], True)
    return {route.path for route in app.routes}


def test_what_is_installed():
    """A Python that the project allows, and extras that it has, here and in the documents."""
    (image,), (argument,) = steps("FROM"), steps("ARG")
    minor = re.fullmatch(r"python:3\.(\d+)-slim", image)[1]
    assert int(minor) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    documents = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    named = re.findall(r"\bEXTRA=([\w,]+)", TEXT + documents) + [argument.removeprefix("EXTRA=")]
    assert len(named) > 3
    for extras in named:
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (pip,) = [step for step in steps("RUN") if "pip" in step]
    assert '".[$EXTRA]"' in pip


def test_what_is_copied():
    """All that main.py imports, and its tiny model; neither tests nor what git ignores."""
    context = {path.replace("\\", "/") for path in exclude_paths(ROOT, ignored())}
    for step in steps("COPY"):
        *sources, _ = step.split()
        assert all(source == "." or source in context for source in sources)
    wanted, seen = ["main.py"], set()
    while wanted:
        file = wanted.pop()
        assert file in context
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found = {f"{name.replace('.', '/')}.py" for name in names}
            wanted += [x for x in found - seen if (ROOT / x).is_file()]
            seen |= found
    assert {"model.py", "server/page/page.html", "tests/checkpoints/tiny-llama3/config.json"} <= context
    assert not [path for path in context if re.match(r"(\.git/|docs|tests/test_|.*__pycache__)", path)]


def ignored() -> list[str]:
    return (ROOT / ".dockerignore").read_text().splitlines()


def test_how_it_runs():
    """Not as root, with the programs in a volume, and with the server's own health."""
    assert steps("USER") == ["1000"] and "--uid 1000" in steps("RUN")[0]
    (variables,), (volumes,) = steps("ENV"), steps("VOLUME")
    for name, value in (x.split("=") for x in shlex.split(variables)):
        assert name and value.startswith(tuple(json.loads(volumes)))
    assert json.loads(steps("ENTRYPOINT")[0]) == ["python3", "main.py"]
    (health,) = steps("HEALTHCHECK")
    port, path = re.search(r"127\.0\.0\.1:(\d+)(/\w+)", health).groups()
    assert path in paths() and port in steps("EXPOSE")[0]
    ast.parse(json.loads(health[health.index("[") :])[2])


PROBES = {"startupProbe": "/live", "livenessProbe": "/live", "readinessProbe": "/health"}
PODS = {
    "server": SERVER[0]["spec"]["template"],
    "leader": SLICE[0]["spec"]["leaderWorkerTemplate"]["leaderTemplate"],
    "worker": SLICE[0]["spec"]["leaderWorkerTemplate"]["workerTemplate"],
}


@pytest.mark.parametrize("resource", [*SERVER, SLICE[1]], ids=lambda x: x["kind"])
def test_schema(resource):
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pods(name):
    """As Kubernetes wants them; the server has these options, and more time to end than it may need."""
    pod = PODS[name] | {"apiVersion": "v1", "kind": "Pod"}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    (container,) = pod["spec"]["containers"]
    args = parse_arguments(container["args"])
    assert args.serve and args.host == "0.0.0.0"
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > args.request_timeout + LINGER + stop
    assert KEY in {variable["name"] for variable in container["env"]}
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in pod["spec"].get("volumes", ())}
    probes = {what: container.get(what, {}).get("httpGet") for what in PROBES}
    if name == "worker":
        assert not any(probes.values()) and "ports" not in container
    else:
        assert {what: probe["path"] for what, probe in probes.items()} == PROBES
        assert set(PROBES.values()) < paths()
        (port,) = container["ports"]
        assert port["containerPort"] == args.port and {x["port"] for x in probes.values()} == {port["name"]}


def test_services():
    """They lead to the pods that answer, and to no others. A slice has as many hosts as its chips need."""
    deployment, slice = SERVER[0], SLICE[0]
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels["server"].items()
    assert SERVER[1]["spec"]["selector"].items() <= labels["server"].items()
    own = {"leaderworkerset.sigs.k8s.io/name": slice["metadata"]["name"]}  # which the controller adds
    selector = SLICE[1]["spec"]["selector"].items()
    assert selector <= (labels["leader"] | own).items() and not selector <= (labels["worker"] | own).items()
    for service, pod in ((SERVER[1], "server"), (SLICE[1], "leader")):
        ports = PODS[pod]["spec"]["containers"][0]["ports"]
        assert [x["targetPort"] for x in service["spec"]["ports"]] == [x["name"] for x in ports]
    leader, worker = (PODS[name]["spec"] for name in ("leader", "worker"))
    assert leader["nodeSelector"] == worker["nodeSelector"]
    for field in ("image", "args", "env", "resources"):
        assert leader["containers"][0][field] == worker["containers"][0][field]
    x, y = leader["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = leader["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert slice["spec"]["leaderWorkerTemplate"]["size"] * chips == int(x) * int(y)
