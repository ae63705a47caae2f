"""A model in one object: `load` a checkpoint, `generate` or `stream` text, `score` a text.

    llm = load("tests/checkpoints/tiny-llama3")
    print(llm.generate("Who are you?"))
    for text in llm.stream("Who are you?"):
        print(text, end="", flush=True)

It has the parts that main.py has: the checkpoint, the mesh and the number formats are chosen in deploy.py,
requests are answered by the Engine, and text is decoded by TextStream.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import numpy as np

from checkpoints.names import FLOATS
from checkpoints.threads import no_garbage_collection
from conversation.messages import has_surrogate, read_messages
from conversation.streams import TextStream, answer_stream
from conversation.text import encode, load_tokenizer, stop_tokens
from conversation.tools import choose_tool_format
from deployment.ahead import ProgramsOnShapes
from deployment.compilation_cache import enable_compilation_cache
from deployment.deploy import (
    ModelOptions,
    load_while_compiling,
    make_programs,
    open_models,
    programs_on_shapes,
)
from deployment.memory import CPU_ROWS, DEFAULT_ROWS, Deployment, fit_cache
from feedback.errors import UserError
from model import Config, Weights
from quantize import FORMATS
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import (
    OPTION_SETS,
    SAMPLING_OPTIONS,
    Answer,
    Request,
    choose_sampling,
    options_in_use,
)
from serving.speculation import check_n_draft
from sharding.sampling import MAX_TOP_LOGPROBS

MAX_LEN = 4096  # the default number of positions of a row, if the model has as many
NEW_TOKENS = 256  # the default max_new_tokens

Messages = list[dict[str, Any]]  # the messages of a chat, see conversation.messages.read_messages
Prompt = str | Messages | Sequence[int]  # a text, a chat, or token ids


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer. str() gives its text.

    prompt_tokens, tokens: token ids; `tokens` ends with the stop token, if there is one.
    logprobs: natural logs of the tokens' probabilities by the model's own logits, before any sampling option.
    finish_reason: "stop" (a stop token or a stop text), "length" (max_new_tokens), or "error".
    top_logprobs: for each token, the most probable tokens in its place with their log-probabilities, if they
    were asked for.
    error: why the answer failed, else None.
    reasoning: what the model wrote before the text, for itself, if its format separates the two.
    """

    text: str
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    top_logprobs: list[dict[int, float]]
    error: str | None = None
    reasoning: str = ""

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Score:
    """How probable a text is.

    tokens: its token ids. logprobs: natural logs of the probabilities of all tokens but the first.
    """

    tokens: list[int]
    logprobs: list[float]

    @property
    def log_likelihood(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(-self.log_likelihood / len(self.logprobs))


@no_garbage_collection()
def load(
    checkpoint: str,
    *,
    quantize: str | None = None,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    dp: int | None = None,
    ep: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    n_devices: int | None = None,
    rows: int | None = None,
    max_len: int | None = None,
    draft: str | None = None,
    lookup: bool = False,
    guesses: int = 4,
    show: bool = False,
) -> "LLM":
    """Load a model: a converted or Hugging Face folder, a GGUF file, or a hub id.

    Options that are left out have the defaults of main.py. The batch has `rows` rows of `max_len` positions:
    by default 8 on a CPU, elsewhere as many as fit into memory, up to 32; and 4096, or the model's limit if
    that is lower. n_devices: how many of jax.devices() to use; default: all. show: progress, on stderr.
    While the weights are read, the programs of a first prompt are compiled. Compiled programs are kept for
    later processes, see compilation_cache.enable_compilation_cache.

    Raises UserError, a ValueError, if the options do not suit the model or the devices, or if the model does
    not fit into memory.
    """
    options = ModelOptions(
        checkpoint=str(checkpoint),
        dtype=dtype,
        quantize=quantize,
        kv_cache_dtype=kv_cache_dtype,
        dp=dp,
        ep=ep,
        tp=tp,
        pp=pp,
        draft=draft,
        lookup=lookup,
        guesses=guesses,
    )
    sizes = dict(dp=dp, ep=ep, tp=tp, pp=pp, n_devices=n_devices, rows=rows, max_len=max_len)
    for name, value in sizes.items():
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise UserError(f"{name} {value!r} is not a number of at least 1")
    choices = dict(quantize=FORMATS, dtype=FLOATS, kv_cache_dtype=("int8", *FLOATS))
    for name, known in choices.items():
        if (value := getattr(options, name)) is not None and value not in known:
            raise UserError(f"{name} {value!r} is not one of {', '.join(known)}")
    if draft and lookup:
        raise UserError("draft and lookup exclude each other")
    check_n_draft(guesses)
    enable_compilation_cache()
    models = open_models(options, n_devices or jax.device_count(), lambda message: None)
    limit = min(x.cfg.max_positions for x in models)
    if max_len is not None and max_len > limit:
        raise UserError(f"max_len {max_len}: the model's limit is {limit} positions")
    limit = max_len or min(limit, MAX_LEN)
    wanted = rows or (CPU_ROWS if jax.default_backend() == "cpu" else DEFAULT_ROWS)
    rows, max_len = fit_cache(models, [limit] * wanted, rows, limit)
    shapes = programs_on_shapes(options, models, rows, max_len)
    first = [Request([0], 1, choose_sampling(dict(seed=0), models[0].checkpoint.folder, where=""))]

    def compile_first() -> None:
        Engine(shapes, first, *kinds(shapes, first), active=1)

    weights = load_while_compiling(models, shapes, compile_first, show)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a CPU takes a second to allocate 1.5 GB
        programs = pool.submit(make_programs, options, models, weights, rows, max_len)
        return LLM(models[0], shapes, programs.result)


class LLM:
    """A model with its tokenizer, and a batch of rows in which prompts are answered side by side.

    Made by `load`, which compiles the programs of one prompt with the default options. Others are compiled
    when they are first needed: for a first prompt of more than 65 or 257 tokens, for the first request that
    has other options or is scored; on a CPU also for the first 2, 3 to 4, 5 to 8 and so on answers at a time.
    Later requests of a kind that was seen compile nothing. For one thread at a time. If jax runs as several
    processes, each must make the same calls.
    """

    def __init__(self, deployment: Deployment, shapes: ProgramsOnShapes, programs: Callable[[], Programs]):
        """shapes: the same programs, to compile them. programs: called when all else is loaded."""
        self.deployment, self.shapes, self.folder = deployment, shapes, deployment.checkpoint.folder
        self.tokenizer = load_tokenizer(self.folder)
        self.stop_tokens = stop_tokens(self.folder, self.tokenizer)
        self.tool_format = choose_tool_format(self.tokenizer, deployment.checkpoint.family.tools)
        self.programs = programs()
        self.engine: Engine | None = None
        self.open: dict[Answer, TextStream] = {}

    @property
    def cfg(self) -> Config:
        return self.deployment.cfg

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.deployment.mesh

    @property
    def weights(self) -> Weights:
        """The weights, for the functions of model.py."""
        return self.programs.weights

    def encode(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        chat_template: bool = True,
        special_tokens_in_messages: bool = False,
    ) -> list[int]:
        """The token ids of a prompt: a text is a user's message, if the tokenizer has a chat template.

        The messages of a chat are those of OpenAI's API, see messages.read_messages. Token ids are
        returned as they are.

        chat_template: False continues the text itself. system: a first message of this role.
        special_tokens_in_messages: whether a special token that a message spells is that token; by default it
        is read as text. In a text without chat template it always is that token.
        """
        if not isinstance(prompt, str) and all(isinstance(token, (int, np.integer)) for token in prompt):
            return [int(token) for token in prompt]
        texts = [prompt if isinstance(prompt, str) else "-", system or "-"]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError("an empty prompt, or one that is not a text")
        if any(map(has_surrogate, texts)):
            raise UserError("not valid text, but half a surrogate pair")
        if not isinstance(prompt, str):
            prompt = read_messages(list(prompt))
        if isinstance(prompt, str) and chat_template and self.tokenizer.chat_template:
            prompt = [{"role": "user", "content": prompt}]
        if system is not None:
            if isinstance(prompt, str):
                raise UserError("system: it needs a chat template")
            prompt = [{"role": "system", "content": system}, *prompt]
        spelled, max_len = special_tokens_in_messages, self.programs.max_len
        return encode(self.tokenizer, prompt, self.cfg.V, max_len, spelled, self.tool_format)

    @overload
    def generate(self, prompts: str | Messages, **options) -> Completion: ...

    @overload
    def generate(self, prompts: Sequence[Prompt], **options) -> list[Completion]: ...

    def generate(self, prompts, **options):
        """Answer a prompt, or all prompts of a list: -> a Completion, or a list of them in the same order.

        A prompt is a text, a chat (a list of messages, see `encode`) or, in a list of prompts, a list of
        token ids. There are as many answers at a time as there are rows; when an answer ends, its row takes
        the next prompt (continuous batching).

        Options, each a value for all prompts or a list with a value for each:
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed: see
        sharding.sampling.Sampling. Default: as in the checkpoint's generation_config.json, else greedy.
        max_new_tokens: default: 256, or what max_len leaves.
        top_logprobs: how many of the most probable tokens to report for each token, up to 20.

        Options for all prompts together:
        stop: texts that end an answer. ignore_eos: continue after the model's end tokens.
        system, chat_template, special_tokens_in_messages: see `encode`.

        Raises UserError before anything is computed if an option is wrong or a prompt does not fit. An answer
        that fails later, because the model computes NaN, has an `error`; a single one raises it.
        """
        if is_single(prompts):
            (completion,) = self.generate([prompts], **options)
            if completion.error is not None:
                raise UserError(completion.error)
            return completion
        started = self._start(list(prompts), **options)
        try:
            for answer, _ in started:
                while answer.finish_reason is None:
                    self._advance()
        finally:
            self._cancel(started)
        return [self._completion(answer, stream) for answer, stream in started]

    def stream(self, prompt: str | Messages | Sequence[int], **options) -> Iterator[str]:
        """Answer one prompt and yield the text while it grows. options: those of `generate`.

        Text that was yielded never changes: half a character is held back, and so is what may be the
        beginning of a stop text. To stop early, leave the loop.
        """
        (started,) = self._start([prompt], **options)
        return self._stream(*started)

    def score(self, texts: str | Sequence[str | Sequence[int]]) -> "Score | list[Score]":
        """The log-probabilities of a text, or of all texts of a list, itself and without a chat template."""
        if isinstance(texts, str):
            (score,) = self.score([texts])
            return score
        tokens = [self._located(i, self.encode, text, chat_template=False) for i, text in enumerate(texts)]
        requests = [Request(np.array(x, np.int32), 0, score=True) for x in tokens]
        started = self._add(requests, ())
        try:
            for answer, _ in started:
                while answer.finish_reason is None:
                    self._advance()
                if answer.error is not None:
                    raise UserError(answer.error)
        finally:
            self._cancel(started)
        return [Score(x, answer.prompt_logprobs) for x, (answer, _) in zip(tokens, started, strict=True)]

    def _located(self, index: int, function, *arguments, **options) -> Any:
        """Call the function; a UserError gets the number of the prompt in front."""
        try:
            return function(*arguments, **options)
        except UserError as e:
            raise UserError(f"prompt {index}: {e}") from None

    def _start(
        self,
        prompts: list[Prompt],
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        system: str | None = None,
        chat_template: bool = True,
        special_tokens_in_messages: bool = False,
        **options,
    ) -> list[tuple[Answer, TextStream]]:
        """Queue the prompts: -> the answer of each, and its text."""
        known = {*SAMPLING_OPTIONS, "max_new_tokens", "top_logprobs"}
        if unknown := sorted(set(options) - known):
            of_all = {"stop", "ignore_eos", "system", "chat_template", "special_tokens_in_messages"}
            both = ", ".join(sorted(known | of_all))
            raise UserError(f"unknown option {unknown[0]!r}; known: {both}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise UserError("stop: a text or a list of texts, none of them empty")
        for name, value in options.items():
            if isinstance(value, (list, tuple, range)) and len(value) != len(prompts):
                raise UserError(f"{name}: {len(value)} values for {len(prompts)} prompts")
        reading = dict(
            system=system, chat_template=chat_template, special_tokens_in_messages=special_tokens_in_messages
        )
        requests = []
        for i, prompt in enumerate(prompts):
            own = {k: v[i] if isinstance(v, (list, tuple, range)) else v for k, v in options.items()}
            tokens = self._located(i, self.encode, prompt, **reading)
            requests.append(self._located(i, self._request, tokens, ignore_eos, **own))
        return self._add(requests, stop)

    def _request(
        self,
        tokens: list[int],
        ignore_eos: bool,
        max_new_tokens: int | None = None,
        top_logprobs: int | None = None,
        **sampling,
    ) -> Request:
        left = self.programs.max_len - len(tokens)
        new = min(NEW_TOKENS, max(left, 1)) if max_new_tokens is None else max_new_tokens
        if not isinstance(new, int) or isinstance(new, bool) or new < 1:
            raise UserError(f"max_new_tokens {new!r} is not a number of at least 1")
        if top_logprobs is not None and not (
            isinstance(top_logprobs, int) and 0 <= top_logprobs <= MAX_TOP_LOGPROBS
        ):
            raise UserError(f"top_logprobs {top_logprobs!r} is not between 0 and {MAX_TOP_LOGPROBS}")
        chosen = choose_sampling(dict(seed=0) | sampling, self.folder, where="")
        chosen = dataclasses.replace(chosen, top_logprobs=top_logprobs or None)
        stop = frozenset() if ignore_eos else self.stop_tokens
        return Request(np.array(tokens, np.int32), new, chosen, stop)

    def _add(self, requests: list[Request], stop: tuple[str, ...]) -> list[tuple[Answer, TextStream]]:
        for i, request in enumerate(requests):
            self._located(i, request.validated, self.cfg.V)
            if request.positions > self.programs.max_len:
                what = f"{len(request.prompt)} tokens and {request.max_new_tokens} new ones"
                raise UserError(f"prompt {i}: {what} exceed max_len {self.programs.max_len}")
        if not requests:
            return []
        engine, started = self._engine(requests), []
        channels = self.deployment.checkpoint.family.channels
        for request in requests:
            stream = answer_stream(self.tokenizer, request.prompt, request.stop, stop, channels)
            answer = engine.add(request)
            self.open[answer] = stream
            started.append((answer, stream))
        return started

    def _engine(self, requests: list[Request]) -> Engine:
        """The engine, with programs for requests of these kinds and of all earlier ones."""
        longest, sets = kinds(self.programs, requests)
        scores, active, old = {x.scoring for x in requests}, len(self.open) + len(requests), self.engine
        if old and longest <= old.longest and scores <= old.scores and set(sets) <= set(old.option_sets):
            old.compile_for(active)
            return old
        while old and old.busy:  # answers that are still read from `stream`
            self._advance()
        if old:
            longest, scores, sets = max(longest, old.longest), scores | old.scores, sets + old.option_sets
        like = [Request([0], 1, score=score is not None) for score in scores]
        ordered = [options for options in OPTION_SETS if options in sets]
        with no_garbage_collection():
            self.engine = Engine(
                self.programs, like, longest, ordered, active=active, ahead=self.shapes, warm=False
            )
        return self.engine

    def _advance(self) -> None:
        """One step of the engine: the answers that it changes get their text."""
        for answer in self.engine.advance():
            if (stream := self.open.get(answer)) is not None:
                stream.add(answer.tokens[stream.used :])
                if stream.stopped:
                    self.engine.cancel(answer)
                if answer.finish_reason is not None:
                    stream.finish()
                    del self.open[answer]

    def _cancel(self, started: list[tuple[Answer, TextStream]]) -> None:
        """End those that have not ended."""
        for answer, _ in started:
            if answer.finish_reason is None:
                self.engine.cancel(answer)
                del self.open[answer]

    def _stream(self, answer: Answer, stream: TextStream) -> Iterator[str]:
        shown = 0
        try:
            while True:
                done, text = answer.finish_reason is not None, stream.text
                if text[shown:]:
                    yield text[shown:]
                    shown = len(text)
                if done:
                    break
                self._advance()
        finally:
            self._cancel([(answer, stream)])
        if answer.error is not None:
            raise UserError(answer.error)

    def _completion(self, answer: Answer, stream: TextStream) -> Completion:
        used = stream.used
        return Completion(
            stream.text,
            answer.prompt.tolist(),
            answer.tokens[:used],
            answer.logprobs[:used],
            "stop" if stream.stopped else answer.finish_reason,
            answer.top_logprobs[:used],
            answer.error,
            stream.reasoning,
        )


def kinds(programs: Programs, requests: list[Request]) -> tuple[int, list[frozenset[str]]]:
    """The kinds of these requests, which are compiled together: -> (`longest`, `option_sets`) of an Engine.

    longest: the longest prompt that needs no more shapes of prefill chunks than the longest of the requests.
    """
    length = max(len(request.prompt) for request in requests)
    widths = sorted({shape.width for shape in programs.chunk_shapes})
    limits = [*(width // 2 + 1 for width in widths[1:]), programs.max_len]
    longest = min(next(n for n in limits if length <= n), programs.max_len)
    if programs.stages > 1:  # the engine then has one decode program
        return longest, [OPTION_SETS[-1]]
    needed = map(options_in_use, ([request] for request in requests))
    return longest, [next(options for options in OPTION_SETS if x <= options) for x in needed]


def is_single(prompts) -> bool:
    """Whether this is one prompt, a text or a chat, and not a list of prompts."""
    return isinstance(prompts, str) or (bool(prompts) and all(isinstance(x, dict) for x in prompts))
