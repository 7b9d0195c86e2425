"""What a request may say about its KV, beside OpenAI's fields. Checks and docs/requests.md derive from here."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from engine.prefix_pins import MAX_TTL_S
from engine.server.api_model import ApiModel, Unsupported
from engine.server.errors import BadRequest
from kernels.layout import FORMAT_BY_NAME

_BEGINNINGS: Final = ("kv_", "prefix_")
"""Names that begin so are this engine's."""
_OF_OTHERS: Final = frozenset({"kv_transfer_params"})  # vLLM's, sent by clients that speak to both
_ALIKE: Final = 0.8  # takes allow_evict and use_prefix_caching for ours, and none of OpenAI's or vLLM's names
_LONGEST_ALIKE: Final = 40
_MOST_LOOKED_AT: Final = 100  # unknown names per request: comparing costs time


def _known_format(name: str) -> str:
    if name not in FORMAT_BY_NAME:
        raise ValueError(f"choose one of {', '.join(FORMAT_BY_NAME)}")
    return name


FormatName = Annotated[
    str, AfterValidator(_known_format), WithJsonSchema({"type": "string", "enum": list(FORMAT_BY_NAME)})
]


class CacheFields(ApiModel):
    """What a request lets be done to its KV."""

    kv_format_floor: FormatName | None = Field(
        None,
        description="The lossiest format that its KV may be stored in; cached prefixes in lossier ones are not used. "
        "If absent, whatever the engine's `kv_format` is.",
    )
    allow_eviction: bool | None = Field(
        None,
        description="`false`: none of its tokens are evicted, whatever the engine's `eviction`. If absent, `true`.",
    )
    use_prefix_cache: bool | None = Field(
        None,
        description="`false`: it takes nothing from the prefix cache and leaves nothing there. If absent, `true`.",
    )
    cache_salt: str | None = Field(
        None,
        max_length=256,
        description="Printable text; only requests with the same salt share cached prefixes. If absent, the empty one.",
    )
    prefix_ttl_s: float | None = Field(
        None,
        gt=0,
        le=MAX_TTL_S,
        description="Keep the prompt's prefix cached until so many seconds after its last use; needs "
        "`use_prefix_cache`. If absent, it stays as long as there is room.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.prefix_ttl_s is not None and self.use_prefix_cache is False:
            raise Unsupported("prefix_ttl_s", "prefix_ttl_s keeps a prefix cached; it needs use_prefix_cache")
        if self.cache_salt and not self.cache_salt.isprintable():
            raise Unsupported("cache_salt", "cache_salt must be printable text")
        return self


def refuse_misspelt(names: Iterable[str], known: Collection[str]) -> None:
    """Unknown fields are tolerated, but what is meant for the KV is not to be ignored because of a letter.

    Raises BadRequest for the first name that is not ``known`` and begins like, or looks like, one of CacheFields.
    """
    ours = list(CacheFields.model_fields)
    unknown = (name for name in names if name not in known and name not in _OF_OTHERS)
    for name in islice(unknown, _MOST_LOOKED_AT):
        plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:100]).lower().replace("-", "_")
        alike = get_close_matches(plain, ours, 1, _ALIKE) if len(plain) <= _LONGEST_ALIKE else []
        if not alike and not plain.startswith(_BEGINNINGS):
            continue
        nearest = (alike or get_close_matches(plain[:_LONGEST_ALIKE], ours, 1, 0.0))[0]
        shown = plain if plain == name else ascii(name[:100])
        message = f"{shown}: unknown field, did you mean {nearest}? Fields for the KV: {', '.join(ours)}"
        raise BadRequest(message, name[:100].encode("utf-8", "replace").decode(), "unknown_field")
