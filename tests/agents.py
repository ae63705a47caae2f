"""Run coding agents against the server: python3 tests/agents.py FOLDER.

FOLDER has the agents: npm install --prefix FOLDER @openai/codex @anthropic-ai/claude-code opencode-ai
@qwen-code/qwen-code. Each is told to say hi, and to run a command. A random model answers; what it says is
written by a script, as a grammar that has one text.
"""

import contextlib
import json
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
SHELL = {"command": COMMAND, "description": "a sum"}
ARGUMENTS = {  # {the tool by which an agent runs commands: the arguments of a call}
    "exec_command": {"cmd": COMMAND}, "Bash": SHELL, "bash": SHELL,
    "run_shell_command": SHELL | {"is_background": False},
}  # fmt: skip
SAY_HI, RUN = "say hi", "run the command of the agents test"
SECONDS = 300
CODEX = """model = "local"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""
OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "models": {"local": {"limit": {"context": MAX_LEN, "output": 99}}},
}


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


def commands(url: str, home: pathlib.Path) -> dict[str, list[str]]:
    """{an agent: its command, which a prompt ends}. Writes the files that configure the agents."""
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX.format(url=url))
    local = OPENCODE | {"options": {"baseURL": f"{url}/v1", "apiKey": "none"}}
    (home / "opencode.json").write_text(json.dumps({"provider": {"local": local}, "permission": "allow"}))
    qwen = f"--auth-type openai --openai-api-key none --openai-base-url {url}/v1 --model local --yolo"
    return {
        "codex": "exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox".split(),
        "claude": "--allowedTools Bash -p".split(),
        "opencode": "run --model local/local --title a".split(),
        "qwen": qwen.split(),
    }


def run_agents(programs: pathlib.Path, url: str, home: pathlib.Path) -> None:
    """Run the agents in an empty home. Prints what they print."""
    own = dict(
        HOME=str(home), OPENCODE_CONFIG=str(home / "opencode.json"), ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="local", ANTHROPIC_DEFAULT_HAIKU_MODEL="local",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    for name, arguments in commands(url, home).items():
        program = programs / "node_modules" / ".bin" / name
        version = subprocess.run([program, "--version"], capture_output=True, text=True, env=os.environ | own)
        print(f"{name} {version.stdout.strip()}", flush=True)
        for prompt, expected in ((SAY_HI, "hi"), (RUN, FINAL)):
            done = subprocess.run(
                [program, *arguments, prompt], cwd=home, env=os.environ | own, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=SECONDS,
            )  # fmt: skip
            print(f"    {prompt}: {done.stdout.strip()}", flush=True)
            assert done.returncode == 0 and done.stdout.strip().endswith(expected), done.stderr


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(api_requests, "make_tool_grammar", scripted_grammar)
        checkpoint, sizes = make_model(pathlib.Path(folder) / "local"), f"--rows 1 --max-len {MAX_LEN}"
        server = started("--checkpoint", str(checkpoint), *sizes.split(), width=256)
        stack.callback(server.end)
        home = pathlib.Path(folder) / "home"
        home.mkdir()
        run_agents(pathlib.Path(sys.argv[1]).resolve(), server.url, home)


if __name__ == "__main__":
    main()
