"""A task for lm-eval of the sums that the tiny models never saw: python3 examples/lm_eval/sums.py FOLDER

Writes a file of 100 questions and two tasks into the folder: `sums_choice`, in which the right sum must be
likelier than three wrong ones, and `sums_written`, in which it must be written. See docs/server.md.
"""

import json
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "checkpoints"))
from questions import examination  # noqa: E402

TURN = "<|start_header_id|>{}<|end_header_id|>\n\n"  # the tiny models' chat template
HEAD = TURN.format("user") + "{{question}}<|eot_id|>" + TURN.format("assistant")
COMMON = dict(dataset_path="json", test_split="test", doc_to_text=HEAD, target_delimiter="")
CHOICE = dict(
    task="sums_choice", output_type="multiple_choice", doc_to_choice="choices", doc_to_target="label",
    metric_list=[dict(metric="acc")],
)  # fmt: skip
WRITTEN = dict(
    task="sums_written", output_type="generate_until", doc_to_target="{{answer}}",
    generation_kwargs=dict(until=["\n"], max_gen_toks=24, temperature=0),
    metric_list=[dict(metric="exact_match")],
)  # fmt: skip


def main(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng, lines = random.Random(0), []
    for question, answer in examination(100):
        equation, _, total = answer.rstrip(".").rpartition(" ")
        wrong = rng.sample([n for n in range(int(total) - 10, int(total) + 11) if n != int(total)], 3)
        choices = rng.sample([f"{equation} {n}." for n in [int(total), *wrong]], 4)
        lines.append(dict(question=question, answer=answer, choices=choices, label=choices.index(answer)))
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for task in (CHOICE, WRITTEN):
        described = COMMON | task | dict(dataset_kwargs=dict(data_files=dict(test=str(data))))
        (folder / f"{task['task']}.yaml").write_text(json.dumps(described, indent=2))  # JSON is YAML


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve())
