"""What a request must be to be queued at all. No torch."""

from __future__ import annotations

from engine.cache_manager import CacheManager
from engine.formats import lossiness_of
from engine.prefix_pins import MAX_TTL_S
from engine.queues import Queues
from engine.request import Request


class AdmissionError(Exception):
    """A request refused at once. ``kind``: queue_full (429), too_long (400), can_never_fit (400), invalid (400)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def check_request(
    request: Request, queues: Queues, cache: CacheManager, *, max_model_len: int, max_waiting: int
) -> None:
    """Raises AdmissionError for a request that could never run, or that finds the queue full."""
    prompt, most = len(request.prompt_ids), request.params.max_tokens
    if request.request_id in queues.requests:
        raise AdmissionError("invalid", f"request id {request.request_id!r} is in use")
    if prompt < 1:
        raise AdmissionError("invalid", "the prompt has no tokens; send at least one")
    if most < 0:
        raise AdmissionError("invalid", f"max_tokens must be >= 0, got {most}")
    try:
        lossiness_of(request.cache.kv_format_floor)
    except ValueError as error:
        raise AdmissionError("invalid", str(error).replace("kv_format ", "kv_format_floor ", 1)) from error
    ttl_s = request.cache.prefix_ttl_s
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise AdmissionError("invalid", f"prefix_ttl_s is in seconds, above 0 and up to {MAX_TTL_S:g}, got {ttl_s}")
    if ttl_s is not None and not request.cache.use_prefix_cache:
        raise AdmissionError("invalid", "prefix_ttl_s keeps a prefix cached; it needs use_prefix_cache")
    if prompt + min(most, 1) > max_model_len:
        raise AdmissionError(
            "too_long", f"the prompt has {prompt} tokens; with output at most {max_model_len} fit the model"
        )
    needed = most_tokens(request, max_model_len)
    if not cache.can_ever_fit(needed):
        raise AdmissionError(
            "can_never_fit",
            f"prompt and max_tokens need KV of {needed} tokens; the pool holds "
            f"{cache.max_sequence_tokens()}: send less, or start the engine with a larger --kv-pool-bytes",
        )
    if len(queues.waiting) >= max_waiting:
        raise AdmissionError("queue_full", f"{len(queues.waiting)} requests are waiting already; try again later")


def most_tokens(request: Request, max_model_len: int) -> int:
    """Most tokens whose KV the request will need: the last output token's is never computed."""
    total = min(len(request.prompt_ids) + request.params.max_tokens, max_model_len)
    return max(total - 1, len(request.prompt_ids))
