"""docs/requests.md: what a request may say about its KV, as the server checks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.formats import CHUNK_TOKENS
from engine.server.cache_fields import CacheFields

_HEAD: Final = """# Requests

`/v1/completions` and `/v1/chat/completions` take OpenAI's fields, several of vLLM's, and these, which say what may be
done to the KV of a request. All are optional; `null` is as good as absent. OpenAI's Python client sends them with
`extra_body`:

```python
client.chat.completions.create(model=..., messages=..., extra_body={"kv_format_floor": "int8", "prefix_ttl_s": 600})
```

| field | values | meaning |
|---|---|---|
"""
_TAIL: Final = f"""
A value outside is a 400 that names the field. So is an unknown field that begins with `kv_` or `prefix_`, or looks like
one of these: the answer names the one that was probably meant. Other unknown fields are ignored, as clients send many.

## What became of it

`usage` of every answer (of a stream: in its last chunk, with `stream_options: {{"include_usage": true}}`) has

- `prompt_tokens_details.cached_tokens`: prompt tokens that were found in the prefix cache;
- `evicted_tokens`: tokens of this request whose KV was evicted;
- `pinned_tokens`, only for a request with `prefix_ttl_s`: so many tokens of its prompt are kept, in whole chunks of
  {CHUNK_TOKENS}. 0: the wish was not met, and the request ran all the same. Either the prompt has no whole chunk, or
  all pins together would hold more than `--prefix-pin-share` of the pool; the latter are counted in
  `autotune_engine_prefix_pins_refused_total`. `autotune pins` shows what is kept.
"""


def requests_page() -> str:
    """The page without its header."""
    properties: Mapping[str, Mapping[str, Any]] = CacheFields.model_json_schema()["properties"]
    rows = [
        f"| `{name}` | {_values(field['anyOf'][0])} | {field['description']} |\n" for name, field in properties.items()
    ]
    return _HEAD + "".join(rows) + _TAIL


def _values(schema: Mapping[str, Any]) -> str:
    """The range of one field for people."""
    if "enum" in schema:
        return " · ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "boolean":
        return "`true` · `false`"
    if schema["type"] == "string":
        return f"at most {schema['maxLength']} characters"
    return f"a number above {schema['exclusiveMinimum']:g}, at most {schema['maximum']:,g}"
