"""The programs in examples/clients: what people point at the server, on a published model."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from processes import serving
from test_real_model import model  # noqa: F401  the fixture

import main

pytestmark = pytest.mark.deep
ROOT = pathlib.Path(main.__file__).parent
CLIENTS = ROOT / "examples" / "clients"
SECONDS = 300  # for one client
PERSON = r"name='[^']*' age=\d+"


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):  # noqa: F811
    """A server of SmolLM2 in a process of its own, with two rows and the options of a laptop."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = "--rows 2 --max-len 2048 --quantize int8 --served-model-name local".split()
    with serving(log, "--checkpoint", model, *options) as address:
        yield f"{address}/v1"


def printed(url: str, program: str, *arguments: str) -> str:
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    runner = "bash" if program.endswith(".sh") else sys.executable
    done = subprocess.run(
        [runner, CLIENTS / program, url, *arguments],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_openai_tools(url):
    call, answer = printed(url, "openai_tools.py").split("\n", 1)
    assert re.fullmatch(r"get_weather (Rome|Paris|Oslo) tool_calls", call)
    assert answer.strip()


def test_openai_responses(url):
    text, person, call, answer = printed(url, "openai_responses.py").split("\n", 3)
    assert "Paris" in text
    assert re.fullmatch(PERSON, person)
    assert re.fullmatch(r"get_weather (Rome|Paris|Oslo)", call)
    assert answer.strip()


def test_langchain(url):
    out = printed(url, "langchain_tools.py")
    assert re.match(r"get_weather \{'city': '(Rome|Paris|Oslo)'\}\n", out)
    assert len(re.findall(PERSON, out)) == 2


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(url, api):
    """Each of five questions makes a call, because it must, and has the tool's answer."""
    *answers, calls = printed(url, "openai_agents.py", api).splitlines()
    assert len(answers) == 5
    said = r"-> '(In (Rome|Paris|Oslo) it is sunny, 21 degrees\.|-?\d+)'$"
    assert all(re.search(said, answer) for answer in answers), answers
    assert len(re.findall(r"get_weather\('(?:Rome|Paris|Oslo)'\)|add\(-?\d+, -?\d+\)", calls)) == 5


def test_instructor(url):
    lines = printed(url, "instructor_person.py").splitlines()
    assert [line.split()[0] for line in lines] == ["TOOLS", "JSON_SCHEMA"]
    assert all(re.fullmatch(rf"\w+ {PERSON}", line) for line in lines)


def test_pydantic_ai(url):
    person, text = printed(url, "pydantic_ai_tools.py").split("\n", 1)
    assert re.fullmatch(PERSON, person)
    assert "Paris" in text


def test_llm(url):
    assert "Paris" in printed(url, "llm_tools.sh")
