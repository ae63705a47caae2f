"""What knows argparse, stdin, stdout and exit codes."""

import importlib.util
import sys

if importlib.util.find_spec("jax") is None:  # every command imports this package first
    raise SystemExit(
        f"error: jax is not installed for {sys.executable}; activate the environment of this repository "
        "(source .venv/bin/activate), or install it: pip install -e ."
    )
