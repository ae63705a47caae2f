"""A model in one object: `load` a checkpoint, `generate` or `stream` text, `score` a text.

    llm = load("tests/checkpoints/tiny-llama3")
    print(llm.generate("Who are you?"))
    for text in llm.stream("Who are you?"):
        print(text, end="", flush=True)

It has the parts that main.py has: the checkpoint, the mesh and the number formats are chosen by deploy.py,
requests are answered by the Engine, and text is decoded by TextStream.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax

from checkpoints.names import FLOATS
from checkpoints.threads import no_garbage_collection
from deployment.ahead import ProgramsOnShapes, compile_programs
from deployment.compilation_cache import enable_compilation_cache
from deployment.deploy import (
    ModelOptions,
    load_while_compiling,
    make_programs,
    open_models,
    programs_on_shapes,
)
from deployment.memory import CPU_ROWS, DEFAULT_ROWS, ROW_POSITIONS, Deployment, fit_cache
from distributed.exchange import gather, warn
from feedback.errors import UserError, located
from generation.replies import Replies, Reply, Score
from generation.request_builder import (
    Messages,
    Prompt,
    builder_for,
    check_text,
    read_prompt,
    row_length,
)
from model import Config, Weights
from quantize import FORMATS
from serving.engine import Engine
from serving.needed import Demand, demand_of_kinds, needed_programs
from serving.programs import Programs
from serving.requests import SAMPLING_OPTIONS, Request, choose_sampling
from serving.speculation import check_n_draft
from sharding.sampling import Sampling

if TYPE_CHECKING:  # llguidance is optional
    from llguidance import LLTokenizer

    from conversation.grammar import Grammar

# Options of `LLM.generate`: with a value for each prompt, and with one for all of them.
EACH = {*SAMPLING_OPTIONS, "max_new_tokens", "top_logprobs"}
GRAMMARS = dict(schema="json_schema", regex="regex", grammar="lark")  # an option: the kind of its grammar
TOGETHER = {*GRAMMARS, "stop", "ignore_eos", "system", "chat_template", "special_tokens_in_messages"}


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer. str() gives its text.

    prompt_tokens, tokens: token ids; `tokens` ends with the stop token, if there is one.
    logprobs: natural logs of the tokens' probabilities by the model's own logits, before any sampling option;
    nan for tokens that a grammar forces, unless `top_logprobs` are asked for.
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
    kept_states: int = 2,
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
        kept_states=kept_states,
        rows=rows,
        max_len=max_len,
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
    if not (isinstance(kept_states, int) and kept_states >= 0):
        raise UserError(f"kept_states {kept_states!r} is not a number of at least 0")
    enable_compilation_cache()
    models = open_models(options, n_devices or jax.device_count(), lambda message: None)
    limit, _ = row_length(max_len, [x.cfg for x in models], ROW_POSITIONS, "max_len")
    wanted = rows or (CPU_ROWS if jax.default_backend() == "cpu" else DEFAULT_ROWS)
    rows, max_len = fit_cache(models, [limit] * wanted, rows, limit)
    shapes = programs_on_shapes(options, models, rows, max_len)
    first = [Request([0, 0], 1, choose_sampling(dict(seed=0), models[0].checkpoint.folder, where=""))]

    def compile_first() -> None:
        compile_programs(shapes, needed_programs(shapes, demand_of_kinds(shapes, first), active=1))

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
        self.deployment, self.shapes = deployment, shapes
        self.tokenizer = deployment.tokenizer
        self.programs = programs()
        limits = dict(max_len=self.programs.max_len, limit="max_len")
        self.builder = builder_for(deployment.checkpoint, self.tokenizer, dict(seed=0), "", **limits)
        self.stop_tokens = self.builder.stop_tokens
        self.engine: Engine | None = None
        self.replies = Replies(None)
        self.demand: Demand | None = None  # of all requests so far

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
        reasons: bool = True,
    ) -> list[int]:
        """The token ids of a prompt: a text is a user's message, if the tokenizer has a chat template.

        The messages of a chat are those of OpenAI's API, see messages.read_messages. Token ids are
        returned as they are.

        chat_template: False continues the text itself. system: a first message of this role.
        special_tokens_in_messages: whether a special token that a message spells is that token; by default it
        is read as text. In a text without chat template it always is that token. reasons: whether the answer
        to a chat may begin with reasoning.
        """
        if system:
            with located("system"):
                check_text(system)
        builder = dataclasses.replace(
            self.builder,
            system=system,
            chat_template=chat_template,
            special_tokens_in_messages=special_tokens_in_messages,
        )
        return builder.encode(read_prompt(prompt), reasons)

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
        schema, regex, grammar: what the answers must match, of which at most one is given: a JSON schema (an
        object), a regular expression, or a grammar in llguidance's Lark. The model then does not reason
        before it answers. They need the package llguidance.
        stop: texts that end an answer. ignore_eos: continue after the model's end tokens.
        system, chat_template, special_tokens_in_messages: see `encode`.

        Raises UserError before anything is computed if an option is wrong or a prompt does not fit. An answer
        that fails later, because the model computes NaN, has an `error`; a single one raises it.
        """
        if is_single(prompts):
            (only,) = self.generate([prompts], **options)
            if only.error is not None:
                raise UserError(only.error)
            return only
        replies = self._ask(list(prompts), **options)
        for _ in self._turns(replies):
            pass
        return [completion(reply) for reply in replies]

    def stream(self, prompt: str | Messages | Sequence[int], **options) -> Iterator[str]:
        """Answer one prompt and yield the text while it grows. options: those of `generate`.

        Text that was yielded never changes: half a character is held back, and so is what may be the
        beginning of a stop text. To stop early, leave the loop.
        """
        (reply,) = self._ask([prompt], **options)
        return self._stream(reply)

    def score(self, texts: str | Sequence[str | Sequence[int]]) -> "Score | list[Score]":
        """The log-probabilities of a text, or of all texts of a list, itself and without a chat template."""
        if isinstance(texts, str):
            (score,) = self.score([texts])
            return score
        requests = []
        for i, text in enumerate(texts):
            with located(f"prompt {i}"):
                tokens = self.encode(text, chat_template=False)
                requests.append(self.builder.request(tokens, Sampling(), 0, score=True))
        replies = [Reply(request, self.builder.new_stream) for request in requests]
        self._add(replies)
        for _ in self._turns(replies):
            pass
        if errors := [reply.error for reply in replies if reply.error is not None]:
            raise UserError(errors[0])
        return [reply.score for reply in replies]

    def _ask(
        self,
        prompts: list[Prompt],
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        **options,
    ) -> list[Reply]:
        """Queue the prompts: -> the reply to each."""
        if unknown := sorted(options.keys() - EACH - TOGETHER):
            raise UserError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(EACH | TOGETHER))}")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise UserError("stop: a text or a list of texts, none of them empty")
        stop_tokens = frozenset() if ignore_eos else self.builder.stop_tokens
        builder = dataclasses.replace(self.builder, stop=stop, stop_tokens=stop_tokens)
        sources = {name: options.pop(name) for name in GRAMMARS.keys() & options.keys()}
        grammar = self._grammar({name: x for name, x in sources.items() if x is not None})
        reading = {name: options.pop(name) for name in TOGETHER & options.keys()}
        for name, value in options.items():
            if isinstance(value, (list, tuple, range)) and len(value) != len(prompts):
                raise UserError(f"{name}: {len(value)} values for {len(prompts)} prompts")
        replies = []
        for i, prompt in enumerate(prompts):
            own = {k: v[i] if isinstance(v, (list, tuple, range)) else v for k, v in options.items()}
            with located(f"prompt {i}"):
                tokens = self.encode(prompt, reasons=grammar is None, **reading)
                request = builder.request_for(tokens, grammar=grammar, **own)
            replies.append(Reply(request, builder.new_stream))
        self._add(replies)
        return replies

    def _grammar(self, sources: dict[str, Any]) -> "Grammar | None":
        """What answers must match. sources: of GRAMMARS. A schema's keywords that it lacks are in a warning.

        Raises UserError.
        """
        if not sources:
            return None
        if len(sources) > 1:
            raise UserError(f"{' and '.join(sorted(sources))} exclude each other")
        ((name, source),) = sources.items()
        try:
            from conversation.grammar import make_grammar
            from conversation.schemas import keep_expressible
        except ImportError:
            raise UserError(f"{name}: it needs the package llguidance: pip install -e '.[serve]'") from None
        kind = dict if name == "schema" else str
        if not isinstance(source, kind):
            raise UserError(f"{name}: {repr(source)[:40]} is not {'an object' if kind is dict else 'a text'}")
        with located(name):
            if name == "schema":
                source, lost = keep_expressible(source)
                if lost:
                    warn(f"schema: answers may violate {', '.join(sorted(lost))}, which grammars cannot hold")
            return make_grammar(self.grammar_tokenizer, GRAMMARS[name], source)

    @functools.cached_property
    def grammar_tokenizer(self) -> "LLTokenizer":
        from conversation.grammar import grammar_tokenizer

        return grammar_tokenizer(self.tokenizer, self.cfg.V, self.stop_tokens)

    def _add(self, replies: list[Reply]) -> None:
        if replies:
            self.replies.engine = self._prepare([reply.request for reply in replies])
        for reply in replies:
            self.replies.add(reply)

    def _turns(self, replies: list[Reply]) -> Iterator[None]:
        """Advance until these replies have ended, once per iteration. Leaving the loop cancels them."""
        try:
            for reply in replies:
                while not reply.done:
                    self.replies.advance()
                    yield
        finally:
            for reply in replies:
                if not reply.done:
                    self.replies.cancel(reply)

    def _prepare(self, requests: list[Request]) -> Engine:
        """The engine, with all programs that such requests need beside those that are open."""
        demand = demand_of_kinds(self.programs, requests)
        self.demand = self.demand | demand if self.demand else demand
        needed = needed_programs(self.programs, self.demand, active=len(self.replies.open) + len(requests))
        if new := [program for program in needed if not self.engine or program not in self.engine.usable]:
            with no_garbage_collection():
                compile_programs(self.shapes, new)
                gather("compiled")  # else one process could wait in a collective until another has compiled
        if self.engine:
            self.engine.use(new)
        else:
            self.engine = Engine(self.programs, new)
        return self.engine

    def _stream(self, reply: Reply) -> Iterator[str]:
        with contextlib.closing(self._turns([reply])) as turns:
            for _ in turns:
                if text := reply.take().text:
                    yield text
        if text := reply.take().text:  # another stream has read the end
            yield text
        if reply.error is not None:
            raise UserError(reply.error)


def completion(reply: Reply) -> Completion:
    answer, stream, used = reply.answer, reply.stream, reply.stream.used
    return Completion(
        stream.text,
        answer.prompt.tolist(),
        answer.tokens[:used],
        answer.logprobs[:used],
        reply.finish_reason,
        answer.top_logprobs[:used],
        reply.error,
        stream.reasoning,
    )


def is_single(prompts) -> bool:
    """Whether this is one prompt, a text or a chat, and not a list of prompts."""
    return isinstance(prompts, str) or (bool(prompts) and all(isinstance(x, dict) for x in prompts))
