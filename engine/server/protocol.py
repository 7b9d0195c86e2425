"""What clients may send: one model per endpoint, checked strictly where we act on it and ignored where we do not.

``null`` means the default everywhere, as OpenAI's clients assume. A field that asks for something we cannot do is
refused rather than ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from engine.server.api_model import ApiModel, Unsupported
from engine.server.cache_fields import CacheFields, refuse_misspelt
from engine.server.errors import BadRequest

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_LOGPROBS = 20


Stop = str | list[str] | None
PositiveInt = Annotated[int, Field(ge=1)]

_M = TypeVar("_M", bound="ApiModel")


class StreamOptions(ApiModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(CacheFields):
    """What completions and chat share, beside what a request may say about its KV."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None
    # Not offered beyond their defaults.
    n: int | None = None
    best_of: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, Any] | None = None

    def stop_list(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @model_validator(mode="after")
    def _offered(self) -> Self:
        if self.n not in (None, 1):
            raise Unsupported("n", "only n=1 is offered: send a request per answer")
        if self.best_of not in (None, 1):
            raise Unsupported("best_of", "only best_of=1 is offered")
        if self.min_p:
            raise Unsupported("min_p", "min_p is not offered")
        if self.min_tokens and not self.ignore_eos:
            raise Unsupported("min_tokens", "min_tokens is not offered without ignore_eos")
        if self.logit_bias:
            raise Unsupported("logit_bias", "logit_bias is not offered")
        if self.stream_options is not None and not self.stream:
            raise Unsupported("stream_options", "stream_options is only allowed with stream=true")
        stops = self.stop_list()
        if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
            raise Unsupported("stop", f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_LENGTH} characters")
        return self


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _completion(self) -> Self:
        if self.suffix:
            raise Unsupported("suffix", "suffix is not offered")
        if self.max_tokens == 0 and not self.echo:
            raise Unsupported("max_tokens", "max_tokens must be at least 1 (0 only with echo)")
        return self

    def prompt_value(self) -> str | list[int]:
        """The one prompt: text or token ids. Raises BadRequest for none, several, or an empty one."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise BadRequest(f"one prompt per request, got {len(prompt)}: send a request for each", "prompt")
            prompt = prompt[0]
        if not prompt:
            raise BadRequest("the prompt is empty", "prompt", "empty_prompt")
        return prompt  # type: ignore[no-any-return]


class ContentPart(ApiModel):
    type: str
    text: str | None = None


class ChatMessage(ApiModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def rendered(self) -> dict[str, str]:
        """As chat templates take it. Raises BadRequest for content that is no text."""
        content = self.content
        if isinstance(content, list):
            if any(part.type != "text" or part.text is None for part in content):
                raise BadRequest("only text content is offered", "messages")
            content = "".join(part.text or "" for part in content)
        return {"role": self.role, "content": content or ""} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationFields):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _chat(self) -> Self:
        if self.tools:
            raise Unsupported("tools", "tools are not offered")
        if self.response_format and self.response_format.get("type") != "text":
            raise Unsupported("response_format", "only the text response format is offered")
        if self.top_logprobs and not self.logprobs:
            raise Unsupported("top_logprobs", "top_logprobs needs logprobs=true")
        return self


class TokenizeRequest(ApiModel):
    """``POST /tokenize``: a prompt or messages, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class FeedbackRequest(ApiModel):
    """``POST /v1/feedback``: how content a user was with one answer."""

    request_id: str = Field(min_length=1, max_length=256)
    score: float = Field(ge=0, le=1)


def parse(model: type[_M], document: object) -> _M:
    """Validate a decoded JSON document. Raises BadRequest naming the first field that is wrong."""
    if not isinstance(document, dict):
        raise BadRequest("the request body must be a JSON object")
    if issubclass(model, CacheFields):
        refuse_misspelt(document, model.model_fields)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, Unsupported):
            raise BadRequest(str(cause), cause.param) from error
        field = ".".join(str(part) for part in details["loc"]) or None
        why = str(cause) if isinstance(cause, ValueError) else details["msg"]  # pydantic begins it with "Value error"
        # A union reports one error per alternative; the field is what the client needs to know.
        name = str(details["loc"][0]) if details["loc"] else None
        raise BadRequest(f"{field}: {why}" if field else why, name) from error
