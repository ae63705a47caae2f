"""Requests to the engine, and their answers."""

import dataclasses
import numbers
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from conversation.text import PromptTooLong, generation_config
from distributed.exchange import warn
from feedback.errors import UserError
from sharding.sampling import MAX_TOP_LOGPROBS, NEUTRAL, Sampling

if TYPE_CHECKING:  # llguidance is optional
    from conversation.grammar import Constraint, Grammar

FLOAT32_MAX = float(np.finfo(np.float32).max)
# Each option of sampling: its type, lowest and highest value, and these in words. sharding.sampling.Sampling
# says what it does.
SAMPLING_OPTIONS = {
    "temperature": (numbers.Real, 0, FLOAT32_MAX, "a number of at least 0, in float32"),
    "top_k": (numbers.Integral, 0, 2**31 - 1, f"between 0 (no restriction) and {2**31 - 1}"),
    "top_p": (numbers.Real, 0, 1, "above 0 and at most 1"),
    "min_p": (numbers.Real, 0, 1, "at least 0 and at most 1"),
    "repetition_penalty": (numbers.Real, 0, FLOAT32_MAX, "a number above 0, in float32"),
    "presence_penalty": (numbers.Real, -2, 2, "between -2 and 2"),
    "frequency_penalty": (numbers.Real, -2, 2, "between -2 and 2"),
    "seed": (numbers.Integral, 0, 2**32 - 1, f"between 0 and {2**32 - 1}"),
}
RESTRICTIONS = {"top_k", "top_p", "min_p"}  # these imply a temperature of 1, unless one is given
RANDOM_OPTIONS = {"seed", "temperature"} | RESTRICTIONS  # without effect on greedy rows
# A decode program is compiled for each of these sets of options where any may come: greedy, random, all. Each
# has a mask for grammars, which costs too little to be measured: a step of a row of SmolLM2-135M took 16.7 ms
# with it and without.
OPTION_SETS = frozenset({"allowed"}), frozenset(RANDOM_OPTIONS | {"allowed"}), frozenset(vars(NEUTRAL))
ANSWER_PENALTIES = {"presence_penalty", "frequency_penalty", "answer_start"}
NOT_ZERO = ("top_p", "repetition_penalty")


# Fields of generation_config.json that cannot change an answer here, by the reason.
NO_EFFECT = {
    "the length and number of answers, which options and requests say": """max_length max_new_tokens
        num_return_sequences""",
    "the tokenizer's tokens": "bos_token_id decoder_start_token_id pad_token_id",
    "the program that wrote the file": "chat_format transformers_version",
    "the Python classes of transformers": """cache_config cache_implementation compile_config
        continuous_batching_config disable_compile low_memory max_cache_len output_attentions output_logits
        output_hidden_states output_scores prefill_chunk_size return_dict_in_generate use_cache""",
    "drafts, which do not change what is sampled": """assistant_confidence_threshold assistant_early_exit
        assistant_ensemble_weight assistant_lookbehind is_assistant max_matching_ngram_size
        num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens speculation_type
        target_lookbehind use_mtp""",
    "numbers of methods that another field asks for": """diversity_penalty early_stopping length_penalty
        mirostat_eta mirostat_tau num_beam_groups xtc_threshold""",
    "models with an encoder": "encoder_no_repeat_ngram_size encoder_repetition_penalty",
}
NEUTRAL_VALUES = {"num_beams": 1, "typical_p": 1.0}  # besides null, false, 0 and empty lists


def check_sampling(name: str, value, where: str = "") -> None:
    """Raise UserError if the value does not suit this option of sampling. where: precedes the name."""
    kind, low, high, allowed = SAMPLING_OPTIONS[name]
    valid = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
    if not valid or (name in NOT_ZERO and np.float32(value) == 0):
        raise UserError(f"{where}{name.replace('_', '-')} {str(value)[:40]} is not {allowed}")


def choose_sampling(asked: dict, folder: pathlib.Path, where: str = "--") -> Sampling:
    """The options that are asked for, else those of the folder's generation_config.json, else greedy.

    A field of that file that asks for anything else is named in a warning. asked, where: see `override`.
    """
    file, config = folder / "generation_config.json", generation_config(folder)
    known = {"do_sample", "eos_token_id", *SAMPLING_OPTIONS, *" ".join(NO_EFFECT.values()).split()}
    others = {name: value for name, value in config.items() if name not in known and not name.startswith("_")}
    if ignored := [name for name, value in others.items() if value and value != NEUTRAL_VALUES.get(name)]:
        warn(f"{file}: {', '.join(sorted(ignored))}: not supported, answers are made without")
    defaults = {"repetition_penalty": config.get("repetition_penalty")}
    if config.get("do_sample") is True:
        defaults = {name: config.get(name) for name in SAMPLING_OPTIONS if name != "seed"}
        defaults["temperature"] = 1.0 if defaults["temperature"] is None else defaults["temperature"]
    defaults = {name: value for name, value in defaults.items() if asked.get(name) is None}
    return override(override(Sampling(), defaults, f"{file}: "), asked, where)


def override(sampling: Sampling, asked: dict, where: str = "") -> Sampling:
    """These options, with those that are asked for in their place. top_k, top_p or min_p imply temperature 1
    where none is asked for and it would be 0.

    asked: value by name; None: not asked for. where: precedes the names in errors.
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        check_sampling(name, value, where)
    if RESTRICTIONS & asked.keys() and not sampling.temperature:
        asked.setdefault("temperature", 1.0)
    return dataclasses.replace(sampling, **asked)


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A prompt, to be continued by up to max_new_tokens tokens, or until one of `stop`.

    prompt: token ids, a list or an array. sampling: fields are numbers. stop: token ids. score: whether to
    compute the log-probabilities of the prompt's tokens. grammar: what the answer must match.
    """

    prompt: list[int] | np.ndarray
    max_new_tokens: int
    sampling: Sampling = Sampling()  # noqa: B008  immutable
    stop: frozenset[int] = frozenset()
    score: bool = False
    grammar: "Grammar | None" = None

    @property
    def scoring(self) -> int | None:
        """How many top log-probabilities to compute at each prompt token; None: the prompt is not scored."""
        return (MAX_TOP_LOGPROBS if self.sampling.top_logprobs else 0) if self.score else None

    @property
    def positions(self) -> int:
        """The positions of a row that it may fill."""
        return len(self.prompt) + self.max_new_tokens

    def check_length(self, most: int, limit: str) -> None:
        """Raise PromptTooLong if prompt and answer exceed `most` positions. limit: what sets this number."""
        if self.positions > most:
            answer = f" with {self.max_new_tokens} new ones" if self.max_new_tokens else ""
            raise PromptTooLong(f"{len(self.prompt)} tokens, which{answer} exceed {limit} of {most}")

    def validated(self, vocabulary: int) -> np.ndarray:
        """The prompt, int32. Raises UserError for tokens outside the vocabulary and numbers out of range."""
        prompt = np.asarray(self.prompt)
        if prompt.ndim != 1 or not prompt.size or prompt.dtype.kind not in "iu":
            raise UserError("a prompt is a list of one or more token ids")
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            wrong = prompt[(prompt < 0) | (prompt >= vocabulary)][0]
            raise UserError(f"token {wrong}: the model has tokens 0 to {vocabulary - 1}")
        if not isinstance(self.max_new_tokens, numbers.Integral) or self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens {self.max_new_tokens} is not at least 0")
        for name, value in vars(self.sampling).items():
            if value is not None and name in SAMPLING_OPTIONS:
                check_sampling(name, value)
        return prompt.astype(np.int32, copy=False)


@dataclasses.dataclass(eq=False)
class Answer:
    """What has been computed of an answer so far.

    prompt: [n] int32. reused: how many of its tokens came from a cached prefix, once the answer has a row.
    tokens: up to and including a stop token; logprobs: of each, from the model's own logits; nan for those
    that a grammar forced and no step chose, of which requests with `score` or `top_logprobs` have none.
    prompt_logprobs: of each prompt token after the first, if the request has `score`. top_logprobs,
    prompt_top_logprobs: for each of these tokens, the most probable tokens in its place and their
    log-probabilities, if the request asks for them. constraint: its state in the request's grammar.
    finish_reason: None, then "stop", "length", "cancelled" or "error", which `error` explains.
    prefix_caching: whether it may start from a prefix that a row has cached.
    """

    request: Request
    prompt: np.ndarray
    reused: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    prompt_top_logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    constraint: "Constraint | None" = None
    finish_reason: str | None = None
    error: str | None = None
    prefix_caching: bool = True


def options_in_use(requests: list[Request]) -> frozenset[str]:
    """The fields of Sampling that any of these requests uses; a program computes no others."""
    used = {
        name
        for request in requests
        for name, value in vars(request.sampling).items()
        if value is not None and (name == "bias" or value != getattr(NEUTRAL, name))
    }
    used = used | {"seed"} if "temperature" in used else used - RANDOM_OPTIONS
    used = used | ANSWER_PENALTIES if used & ANSWER_PENALTIES else used
    return frozenset(used | {"allowed"} if any(request.grammar for request in requests) else used)
