"""The instruction bundles of a kernel's loops, from what the TPU's compiler writes down about it.

    export LIBTPU_INIT_ARGS="--xla_jf_dump_to=/tmp/llo --xla_jf_dump_llo_text=true"
    python3 plan.py --model llama3.1-70b --layers 1 --topology v5e:2x4 --batch 8 --context 8192
    python3 -m planner.bundles /tmp/llo ragged_decode

A bundle takes one cycle, so bundles x trips is a lower bound on the cycles that the kernel computes; waiting
for memory is left out.
"""

import pathlib
import re
import sys


def loop_bundles(folder: pathlib.Path, kernel: str) -> list[int]:
    """Bundles of the loops of the kernel's first call in a program that was dumped into the folder.

    The loops are in the order in which they begin, each without its inner loops.
    """
    files = sorted(folder.glob(f"*-{kernel}*final_bundles.txt"))
    counts, inside = [], []  # the numbers of the loops that a bundle is in
    for line in next(x for x in files if "schedule-analysis" not in x.name).read_text().splitlines():
        bundle = re.match(r"\s*(?:0x[0-9a-f]+|0)\s*(LB)?[A-Z ]*:\s*(>*)\s*\{(\}?)", line)
        if not bundle:
            continue
        begins, depth, empty = bundle[1], len(bundle[2]), bundle[3]
        if not empty:  # an empty bundle does not say how deep it is
            del inside[depth - 1 if begins else depth :]
        if begins:
            inside.append(len(counts))
            counts.append(0)
        if inside:
            counts[inside[-1]] += 1
    return counts


if __name__ == "__main__":
    folder, kernel = sys.argv[1:]
    print(*loop_bundles(pathlib.Path(folder), kernel))
