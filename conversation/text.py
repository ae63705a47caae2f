"""Text to tokens: tokenizers, the token ids of texts and of chats, and the tokens that end an answer."""

import functools
import inspect
import os
import pathlib
from typing import Any

from checkpoints.folders import read_json
from conversation.control_tokens import control_tokens
from conversation.templates import in_words_of, template_text
from conversation.tool_calls import describe_tools
from conversation.tools import renders_tools
from families.tool_formats import LLAMA_JSON, MessageToolFormat, ToolFormat
from feedback.errors import UserError

# Parameters of apply_chat_template that a chat may set; those left out decide how it tokenizes.
TEMPLATE_OPTIONS = {"tools", "documents", "add_generation_prompt", "continue_final_message"}
# Classes of tokenizer_config.json with which AutoTokenizer of transformers changes what tokenizer.json says.
SPACE_PREFIXING = ("GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")
TOKENIZER_FILES = """tokenizer.json tokenizer_config.json tokenizer.model vocab.json merges.txt
    added_tokens.json""".split()
CHARS_PER_TOKEN = 8  # few texts have as many characters per token, see _exceeds


def load_tokenizer(folder: pathlib.Path):
    """The tokenizer of a folder. Raises UserError if there is none, or if its files cannot be read.

    transformers' AutoTokenizer is not used: it also reads config.json, and refuses that of Llama 4 Scout.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it advises PyTorch on import
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast.from_pretrained
    loaders = {"tokenizer.json": fast, "tokenizer.model": _load_sentencepiece, "merges.txt": _load_gpt2}
    name = next((name for name in loaders if (folder / name).exists()), None)
    if name is None:
        known = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
        raise UserError(f"{folder}: no tokenizer in it; download {known}")
    try:
        tokenizer = loaders[name](folder, local_files_only=True)
    except Exception as e:  # files that are not a tokenizer's raise exceptions of many types
        raise UserError(f"{folder}: no tokenizer could be loaded from its {name} ({e})") from None
    settings = _tokenizer_config(folder)
    if settings.get("add_prefix_space") and settings.get("tokenizer_class") in SPACE_PREFIXING:
        if b'"add_prefix_space":true' not in tokenizer.backend_tokenizer.pre_tokenizer.__getstate__():
            raise UserError(
                f"{folder}: tokenizer_config.json says add_prefix_space, and {name} does not; set it in the "
                "pre_tokenizer of tokenizer.json, or to false in tokenizer_config.json"
            )
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer.json may ask for truncation or padding
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def has_vocabulary(folder: pathlib.Path, tokenizer, of: pathlib.Path) -> bool:
    """Whether a folder's tokenizer has the vocabulary of this one, which was loaded from the folder `of`.

    A tokenizer with the same files is not loaded.
    """
    files = [[x / name for name in TOKENIZER_FILES if (x / name).exists()] for x in (folder, of)]
    ours, theirs = ({file.name: file.read_bytes() for file in found} for found in files)
    return ours == theirs or load_tokenizer(folder).get_vocab() == tokenizer.get_vocab()


def _tokenizer_config(folder: pathlib.Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def _load_sentencepiece(folder: pathlib.Path, **options):
    """A tokenizer.model without a tokenizer.json: transformers reads its pieces but not its rules for spaces,
    which are added here.
    """
    from tokenizers import Regex, decoders, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    try:
        spec = SentencePieceExtractor(str(folder / "tokenizer.model")).proto.normalizer_spec
    except ImportError:
        raise ImportError("two packages are missing: pip install sentencepiece protobuf") from None
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, **options)
    tokenizer.add_bos_token = tokenizer.init_kwargs.get("add_bos_token", True)
    encoding = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.remove_extra_whitespaces:
        encoding.append(normalizers.Replace(Regex(r"\A +| +\z|(?<= ) +"), ""))
    if spec.add_dummy_prefix:
        encoding.append(normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([*encoding, normalizers.Replace(" ", "▁")])
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _load_gpt2(folder: pathlib.Path, **options):
    """vocab.json and merges.txt without a tokenizer.json. These files do not say how a text is split into
    words; it is split in GPT-2's way.
    """
    from transformers import GPT2Tokenizer

    kind = _tokenizer_config(folder).get("tokenizer_class")
    if kind not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise ValueError(f"it is a {kind}'s, which needs a tokenizer.json")
    return GPT2Tokenizer.from_pretrained(folder, **options)


class PromptTooLong(UserError):
    """A prompt has more tokens than fit."""


def encode(
    tokenizer, text: str | list[dict], vocabulary: int, max_tokens: int | None = None,
    special_tokens_in_messages: bool = False, tool_format: ToolFormat | MessageToolFormat = LLAMA_JSON, /,
    **options,
) -> list[int]:  # fmt: skip
    """The token ids of a text, or of a chat: its messages, as messages.read_messages returns them,
    and the generation prompt.

    Where a text spells a special token, it is that token. Where a message of a chat spells one, it is read as
    its characters, see conversation.control_tokens, unless special_tokens_in_messages is true.

    max_tokens: None: a prompt of any length. tool_format: how the model writes calls of tools, for a chat
    template that does not render tools: tools, calls and results become texts, see
    tool_calls.describe_tools. options: of a chat, what apply_chat_template of transformers takes beside
    the messages: tools, add_generation_prompt, continue_final_message, and variables of the chat template.

    Raises UserError if the tokenizer or its chat template fails, or a token is outside the vocabulary, and
    PromptTooLong if the text is found to be much longer than max_tokens before all of it is tokenized. The
    token ids of a text that is a little too long are returned.
    """
    if not isinstance(text, str) and not tokenizer.chat_template:
        raise UserError("the checkpoint's tokenizer has no chat template; give a text instead of turns")
    try:
        if isinstance(text, str):
            ids = tokenize(tokenizer.backend_tokenizer, text, max_tokens, add_special_tokens=True)
        else:
            options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
            tools, messages = options.pop("tools", None) or [], text
            if not renders_tools(tokenizer):
                messages = describe_tools(messages, tools, tool_format)
            elif tools:
                options["tools"] = tools
            messages = in_words_of(template_text(tokenizer), messages)
            ids = _encode_chat(tokenizer, messages, max_tokens, special_tokens_in_messages, options)
    except UserError:
        raise
    except Exception as e:  # a chat template is a program, which may raise any exception
        raise UserError(f"the checkpoint's tokenizer or chat template failed: {e}") from None
    if not ids or max(ids) >= vocabulary:
        raise UserError(
            f"the checkpoint's tokenizer makes {ids} of {text!r}; config.json has {vocabulary} tokens"
        )
    return ids


def _encode_chat(
    tokenizer, messages: list[dict], max_tokens: int | None, special_tokens_in_messages: bool, options: dict
) -> list[int]:
    parameters = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if wrong := sorted((parameters - TEMPLATE_OPTIONS).intersection(options)):
        raise UserError(f"{wrong[0]!r} is not a variable of chat templates")
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    rendered = render(messages, **options)
    read = functools.partial(tokenize, max_tokens=max_tokens)
    if not special_tokens_in_messages:
        control = control_tokens(tokenizer, tokenizer.get_chat_template(tools=options.get("tools")))
        marked, marked_options = control.mark(messages), control.mark(options)
        if (marked, marked_options) != (messages, options):
            return control.encode(render(marked, **marked_options), rendered, read)
    return read(tokenizer.backend_tokenizer, rendered)


def tokenize(
    backend, text: str, max_tokens: int | None = None, add_special_tokens: bool = False
) -> list[int]:
    """The token ids that a tokenizers.Tokenizer makes of a text. Raises PromptTooLong, see `encode`.

    encode_batch_fast of tokenizers makes the same ids as its `encode`. It does not compute where in the text
    each token stands, which would be most of the work, and it lets other threads of Python run.
    """
    if max_tokens is not None and _exceeds(backend, text, max_tokens):
        raise PromptTooLong(f"the prompt has more than the {max_tokens} tokens that a row can hold")
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return encoding.ids


def _exceeds(backend, text: str, max_tokens: int) -> bool:
    """Whether a text certainly has more than max_tokens tokens. Most such texts are tokenized only in part.

    The text is cut into parts, whose tokens are counted until there are more than twice as many as allowed.
    Each cut adds no more than a few tokens, so twice as many is certain. A text of no more than
    CHARS_PER_TOKEN characters per allowed token may well fit: its tokens are not counted.
    """
    size, count = CHARS_PER_TOKEN * max_tokens, 0
    if len(text) <= size:
        return False
    for start in range(0, len(text), size):
        count += len(tokenize(backend, text[start : start + size]))
        if count > 2 * max_tokens:
            return True
    return False


def generation_config(folder: pathlib.Path) -> dict[str, Any]:
    """The content of generation_config.json; empty if there is none."""
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def stop_tokens(folder: pathlib.Path, tokenizer) -> frozenset[int]:
    """Token ids that end an answer: generation_config.json's, else config.json's, else the tokenizer's."""
    config = read_json(folder / "config.json")
    for source in (generation_config(folder), config, config.get("text_config") or {}):
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
                raise UserError(f"{folder}: eos_token_id = {ids!r} in its configuration is no list of tokens")
            return frozenset(ids)
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])
