"""From a parsed API request to an engine request: prompt to ids, fields to sampling parameters, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.detokenizer import Detokenizer
from engine.request import CachePolicy, Request, SamplingParams
from engine.server.errors import ApiError, BadRequest
from engine.server.protocol import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from engine.tokenizer import ChatTemplateError, ModelTokenizer

_DEFAULT_COMPLETION_TOKENS = 16
# Longer texts are tokenised on another thread, so that other requests' tokens keep flowing meanwhile.
_INLINE_CHARACTERS = 4096
# What chat templates get from us; ``self`` is no name that a call could pass on.
_RESERVED_VARIABLES = frozenset({"messages", "bos_token", "eos_token", "unk_token", "pad_token", "self"})


@dataclass(frozen=True)
class ServedModel:
    """The one model that is served. ``new_detokenizer`` is given the ids that come before the text."""

    name: str
    tokenizer: ModelTokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    new_detokenizer: Callable[[Sequence[int]], Detokenizer]
    created_s: int = 0

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 for any other model; the name goes nowhere else (case I.35)."""
        if name is not None and name != self.name:
            message = f"The model {name[:100]!r} does not exist; this engine serves {self.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True)
class Ask:
    """A request ready for the engine, and how its answer is to be shown."""

    request: Request
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    echo_text: str | None = None


class Intake:
    """Makes engine requests. Errors are BadRequest."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served

    async def completion(self, body: CompletionRequest, request_id: str, arrival_ns: int) -> Ask:
        prompt = body.prompt_value()
        if isinstance(prompt, str):
            ids = await self.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        else:
            ids = prompt
        self._check_ids(ids)
        room = max(1, self._served.max_model_len - len(ids))
        wanted = min(_DEFAULT_COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        echo_text = None
        if body.echo:
            echo_text = prompt if isinstance(prompt, str) else self._served.tokenizer.decode(ids)
        request = self._request(body, request_id, arrival_ns, ids, wanted, body.logprobs, prompt_logprobs)
        return self._ask(
            body,
            request,
            num_logprobs=body.logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            echo_text=echo_text,
        )

    async def chat(self, body: ChatRequest, request_id: str, arrival_ns: int) -> Ask:
        text = self.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
        )
        ids = await self.encode(text, add_special_tokens=body.add_special_tokens is True)
        self._check_ids(ids)
        wanted = body.max_completion_tokens or body.max_tokens or max(1, self._served.max_model_len - len(ids))
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        request = self._request(body, request_id, arrival_ns, ids, wanted, num_logprobs, body.prompt_logprobs)
        return self._ask(body, request, num_logprobs=num_logprobs, num_prompt_logprobs=body.prompt_logprobs)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises BadRequest when the model's template does not accept it."""
        rendered = [message.rendered() for message in messages]
        extra = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        reserved = _RESERVED_VARIABLES & extra.keys()
        if reserved:
            raise BadRequest(f"chat_template_kwargs may not set {', '.join(sorted(reserved))}", "chat_template_kwargs")
        try:
            return self._served.tokenizer.render_chat(rendered, **extra)
        except ChatTemplateError as error:
            raise BadRequest(str(error), "messages") from error

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text, long ones on another thread. Raises BadRequest for text that is not Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest("the text holds lone surrogates, which are no characters", "prompt") from error
        tokenizer = self._served.tokenizer
        if len(text) <= _INLINE_CHARACTERS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _check_ids(self, ids: list[int]) -> None:
        """Ids of text are checked as well: a tokenizer can know more tokens than the model has rows for."""
        size = self._served.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            bad = next(token_id for token_id in ids if not 0 <= token_id < size)
            raise BadRequest(f"token id {bad} is outside the vocabulary of {size}", "prompt")

    def _request(
        self,
        body: GenerationFields,
        request_id: str,
        arrival_ns: int,
        ids: list[int],
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Request:
        if not ids:
            raise BadRequest("the prompt has no tokens", "prompt", "empty_prompt")
        limit = self._served.max_model_len
        if len(ids) + max_tokens > limit:
            message = (
                f"This model's maximum context length is {limit} tokens, but {len(ids)} prompt tokens and max_tokens "
                f"{max_tokens} were asked for; shorten one of them."
            )
            raise BadRequest(message, "prompt" if len(ids) >= limit else "max_tokens", "context_length_exceeded")
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            seed=body.seed,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        )
        cache = CachePolicy(
            kv_format_floor=body.kv_format_floor,
            allow_eviction=body.allow_eviction is not False,
            use_prefix_cache=body.use_prefix_cache is not False,
            salt=body.cache_salt or "",
            prefix_ttl_s=body.prefix_ttl_s,
        )
        return Request(request_id, ids, params, arrival_ns, cache)

    def _ask(
        self,
        body: GenerationFields,
        request: Request,
        *,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        echo_text: str | None = None,
    ) -> Ask:
        options = body.stream_options
        return Ask(
            request=request,
            stops=tuple(body.stop_list()),
            include_stop=bool(body.include_stop_str_in_output),
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            return_token_ids=bool(body.return_token_ids),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            echo_text=echo_text,
        )
