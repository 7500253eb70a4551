"""From the prompt forms of the API to token ids.

Texts that cannot fit are refused before they are tokenised, and large ones are tokenised
on threads, so that no request holds up the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from text.asked import AskedError, Template, adds_special_tokens, of_chat, of_tokenize
from text.chat_messages import ChatTemplateError
from text.detokenizer import TokenBytes
from worker.api.errors import ApiError, require, show
from worker.api.inputs import checked_text, prompt_forms, text_of
from worker.api.params import ModelLimits, check_prompt_length
from worker.api.protocol import MAX_CHOICES, ChatRequest, CompletionRequest, TokenizeRequest

T = TypeVar("T")

INLINE_LENGTH = 4096  # characters; more go to a thread, which costs about as much as these


class Tokenizer(TokenBytes, Protocol):
    """What the server needs of a tokenizer; see text/ for those there are."""

    vocab_size: int  # one more than the largest token id
    eos_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token(self, token_id: int) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str: ...


class Prompt(NamedTuple):
    """One prompt, ready for the engine."""

    token_ids: list[int]
    echo: str | None  # the text that its answers begin with, if the client wants that


class PromptReader:
    """Tokenises the prompts of requests."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tokenizer")
        longest = max(len(tokenizer.token_bytes(i)) for i in range(limits.vocab_size))
        self._max_characters = longest * limits.max_model_len

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of_completion(self, request: CompletionRequest) -> list[Prompt]:
        """The prompts in their order, each with at least one token.

        Raises:
            ApiError: a prompt is empty, too long, or not made of this model's tokens; or the
                request wants too many answers.
        """
        forms = prompt_forms(request.prompt)
        choices = len(forms) * request.num_choices
        require(choices <= MAX_CHOICES, "prompt", f"for at most {MAX_CHOICES} choices", choices)
        texts = [form for form in forms if isinstance(form, str)]
        for text in texts:
            self._check_text(text)
        specials = adds_special_tokens(request.add_special_tokens)
        size = sum(map(len, texts))
        encoded = iter(await self._run(size, self._encode_all, texts, specials))
        prompts = []
        for form in forms:
            ids = next(encoded) if isinstance(form, str) else form
            self._check_ids(ids)
            prompts.append(Prompt(ids, self._echo(form) if request.echo else None))
        return prompts

    async def of_chat(self, request: ChatRequest) -> Prompt:
        """The chat in the model's own form, as one prompt.

        Raises:
            ApiError: the messages are malformed or too long, or the template refuses them.
        """
        ids = await self._chat_ids(request.messages, _read(of_chat, request))
        self._check_ids(ids)
        last = request.messages[-1]
        echoes = request.echo and last["role"] == request.response_role
        return Prompt(ids, text_of(last) if echoes else None)

    async def of_tokenize(self, request: TokenizeRequest) -> list[int]:
        """Token ids of a prompt or of messages; they may be more than the model can take."""
        if request.messages is not None:
            return await self._chat_ids(request.messages, _read(of_tokenize, request))
        if request.prompt is None:
            raise ApiError("prompt: this field is required, or messages", param="prompt")
        self._check_text(request.prompt)
        specials = adds_special_tokens(request.add_special_tokens)
        (ids,) = await self._run(len(request.prompt), self._encode_all, [request.prompt], specials)
        return ids

    async def text_of(self, ids: list[int]) -> str:
        """The text of tokens.

        Raises:
            ApiError: there are more than any text that can be tokenised here has, or they are
                not tokens of this model.
        """
        count = len(ids)
        rule = f"at most {self._max_characters} ids"
        require(count <= self._max_characters, "tokens", rule, count)
        self.check_vocabulary(ids)
        return await self._run(count, self._tokenizer.decode, ids)

    async def strings_of(self, ids: list[int]) -> list[str]:
        """Each token as the vocabulary writes it."""
        return await self._run(len(ids), lambda: list(map(self._tokenizer.token, ids)))

    def check_vocabulary(self, ids: list[int]) -> None:
        """Raise a 400 unless all `ids` are tokens of the model."""
        if ids and not 0 <= min(ids) <= max(ids) < self._limits.vocab_size:
            outside = next(i for i in ids if not 0 <= i < self._limits.vocab_size)
            raise ApiError(
                f"Token id {show(outside)} is out of vocabulary: "
                f"ids are 0 to {self._limits.vocab_size - 1}",
                param="prompt",
            )

    async def _chat_ids(self, messages: list[dict[str, Any]], template: Template) -> list[int]:
        if not self._tokenizer.has_chat_template:
            raise ApiError("This model has no chat template: use /v1/completions")
        size = self._check_messages(messages)

        def encode() -> list[int]:
            text = template.render(self._tokenizer, messages)
            self._check_text(text)
            return self._tokenizer.encode(text, template.add_special_tokens)

        # How long a template takes over tools and variables of its own, nobody knows.
        try:
            return await self._run(size if template.is_plain else INLINE_LENGTH, encode)
        except ChatTemplateError as error:
            raise ApiError(str(error), param="messages") from None
        except RecursionError:
            raise ApiError("tools or chat_template_kwargs are nested too deeply") from None

    def _check_messages(self, messages: list[dict[str, Any]]) -> int:
        """Raise a 400 unless these are messages of text; returns about how many characters."""
        if not messages:
            raise ApiError("messages must not be empty", param="messages")
        count = len(messages)
        most = self._limits.max_model_len  # a message takes a token at least
        require(count <= most, "messages", f"at most {most}", count)
        size = 0
        large = False  # tool calls and the like, which are not looked into
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            if not isinstance(message.get("role"), str):
                raise ApiError(f"{where}.role: this field is required", param="messages")
            size += len(checked_text(message, where))
            if message.keys() - {"role", "content"}:
                large = True
        if size > self._max_characters:
            self._refuse_text(size)
        size += 16 * count  # what a template writes around each
        return max(size, INLINE_LENGTH) if large else size

    def _check_text(self, text: str) -> None:
        if len(text) > self._max_characters:
            self._refuse_text(len(text))

    def _refuse_text(self, length: int) -> None:
        limit = self._limits.max_model_len
        raise ApiError(
            f"This model's maximum context length is {limit} tokens. However, your prompt "
            f"contains {length} characters (more than {self._max_characters} characters, which "
            f"is the upper bound for {limit} input tokens). Please reduce the length of the "
            f"input prompt. (parameter=input_text, value={length})",
            param="input_text",
        )

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise ApiError("The prompt must not be empty.", param="prompt")
        check_prompt_length(len(ids), self._limits.max_model_len)
        self.check_vocabulary(ids)

    def _echo(self, form: str | list[int]) -> str:
        return form if isinstance(form, str) else self._tokenizer.decode(form)

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens) for text in texts]

    async def _run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Call `function`, on a thread if `size` characters take long."""
        if size < INLINE_LENGTH:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)


def _read(of: Callable[[T], Template], request: T) -> Template:
    """What a request asks of the chat template, or a 400."""
    try:
        return of(request)
    except AskedError as error:
        raise ApiError(str(error), param=error.param) from None
