"""Run coding agents against the server: python3 tests/agents.py FOLDER.

FOLDER has the agents: npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code. Each is told to
say hi, and to run a command. A random model answers; what it says is written by a script, as a grammar that
has one text.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from conftest import CHECKPOINTS
from test_server import started

from conversation.grammar import make_grammar
from conversation.tool_calls import write_calls
from conversation.tool_grammar import lark_text
from server import api_requests

MAX_LEN = 100_000  # positions: the prompts have 25,000 tokens of the tiny model and more
COMMAND, PRINTED, FINAL = "echo agents-$((6 * 7))", "agents-42", "The command was run."
ARGUMENTS = {"exec_command": {"cmd": COMMAND}, "Bash": {"command": COMMAND, "description": "a sum"}}
SAY_HI, RUN = "say hi", "run the command"
SECONDS = 300
CODEX = """model = "local"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""


def make_model(folder: pathlib.Path) -> pathlib.Path:
    """A random model, the smallest there can be, of many positions."""
    shutil.copytree(CHECKPOINTS / "tiny-llama3", folder)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, max_position_embeddings=MAX_LEN)
    heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    config = transformers.AutoConfig.from_pretrained(folder, **sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def scripted_grammar(use, tokenizer, grammar_tokenizer, prompt, form):
    """In the place of make_tool_grammar: a grammar with the one text that the script has for this prompt."""
    told = tokenizer.decode(prompt)
    text = "hi"
    if PRINTED in told:
        text = FINAL
    elif RUN in told:
        (name,) = {tool.name for tool in use.tools} & ARGUMENTS.keys()
        text = write_calls(use.format, [(name, ARGUMENTS[name])])
    return make_grammar(grammar_tokenizer, "lark", f"start: {lark_text(text)}"), set()


def run_agents(programs: pathlib.Path, url: str, home: pathlib.Path) -> None:
    """Run both agents in an empty folder, with an empty home. Prints what they print."""
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=url))
    work = home / "work"
    work.mkdir()
    own = dict(
        HOME=str(home), ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="local",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="local", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    codex = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    for name, arguments in (("codex", codex), ("claude", ("--allowedTools", "Bash", "-p"))):
        program = programs / "node_modules" / ".bin" / name
        print(subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip())
        for prompt, expected in ((SAY_HI, "hi"), (RUN, FINAL)):
            done = subprocess.run(
                [program, *arguments, prompt], cwd=work, env=os.environ | own, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=SECONDS,
            )  # fmt: skip
            print(f"{name}: {prompt}: {done.stdout.strip()}")
            assert done.returncode == 0 and done.stdout.strip().endswith(expected), done.stderr


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(api_requests, "make_tool_grammar", scripted_grammar)
        checkpoint, sizes = make_model(pathlib.Path(folder) / "local"), f"--rows 1 --max-len {MAX_LEN}"
        server = started("--checkpoint", str(checkpoint), *sizes.split(), width=256)
        stack.callback(server.end)
        run_agents(pathlib.Path(sys.argv[1]).resolve(), server.url, pathlib.Path(folder) / "home")


if __name__ == "__main__":
    main()
