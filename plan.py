"""Does a model fit on these TPUs or GPUs, and how fast would it be? Compiled for them here, on a CPU.

    python3 plan.py --model llama3.1-70b --topology v5e:4x4 --batch 8 --context 8192

The compilers are `pip install -e '.[tpu]'`, for Linux on x86, and `pip install -e '.[cuda-compiler]'`, for
Linux. Memory and collectives are the compiler's own figures, HBM traffic is counted in the program that it
made, and times are estimates: see planner/.
"""
# ruff: noqa: E402  signals and the environment come before the first import of jax

import os

from terminal.command_line import exit_on_signals, run

if __name__ == "__main__":
    exit_on_signals()
os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}  # the second: no messages of XLA

from planner.command import main

if __name__ == "__main__":
    run(main)
