"""The literature's claims C1 to C10 and one of its questions: what each rests on, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from autotune.evidence.arithmetic import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_8B
from autotune.evidence.finding import Documents, Finding, MissingFigureError, Verdict, better, figure
from autotune.evidence.sources import CACHE, COST, KERNELS, QUALITY, STATELESS, TIER

_GB: Final = 1e9
_CONTEXT: Final = 4096
_NO_LOSS: Final = 0.95  # of throughput: what may be lost before one speaks of a loss
_USABLE: Final = 0.9  # of a device, as engines take by default
_KEPT: Final = 99.0  # top-1 agreement in percent that counts as accuracy kept


@dataclass(frozen=True)
class Claim:
    """``sources``: benchmarks whose last lines ``judge`` reads; none for arithmetic."""

    name: str
    text: str
    judge: Callable[[Documents], Finding]
    sources: tuple[str, ...] = ()

    def found(self, documents: Documents) -> Finding:
        """The finding; open where a figure is missing."""
        try:
            return self.judge(documents)
        except MissingFigureError as error:
            return Finding(Verdict.OPEN, str(error))


def _fragmentation(documents: Documents) -> Finding:
    ratio = figure(documents, CACHE, "throughput_256_over_128")
    wasted = figure(documents, CACHE, "wasted_pool_pct", "16")
    loss = 100 * (1 - ratio)
    verdict = Verdict.FALSE if ratio >= _NO_LOSS else Verdict.MET if loss >= 37 else Verdict.PARTLY
    return Finding(
        verdict,
        f"256 sequences bring {ratio:.2f} times the tokens per second of 128; {wasted:.1f} % of a full pool in blocks "
        "of 16 holds nothing",
        "What fragments is a cache that reserves or grows in one piece; blocks of one size per slab do not.",
    )


def _size_13b(_: Documents) -> Finding:
    held, shape = LLAMA_2_13B.kv_bytes(_CONTEXT), LLAMA_2_13B.config
    verdict = Verdict.MET if abs(held / 256e6 - 1) < 0.1 else Verdict.FALSE
    return Finding(
        verdict,
        f"{held / _GB:.2f} GB: {shape.num_layers} layers x {shape.num_kv_heads} heads x {shape.head_dim} x 2 x 2 bytes "
        f"x {_CONTEXT} tokens",
        "The formula behind the claim leaves out the layers. What the engine's own pool hands out is checked against "
        "this arithmetic in `make bench-sim` (row capacity).",
    )


def _allocation(documents: Documents) -> Finding:
    cut = figure(documents, CACHE, "alloc_overhead_reduction_pct")
    return Finding(
        better(cut, 62.0), f"{cut:.1f} % less time per token spent on having a place for it, at 1,024 tokens"
    )


def _int4(documents: Documents) -> Finding:
    bits = figure(documents, CACHE, "bits_per_element", "int4")
    held = figure(documents, CACHE, "capacity_ratio_int4_end_to_end")
    loss = {name: figure(documents, QUALITY, "perplexity_increase_pct", name) for name in ("int8", "k8v4", "int4")}
    same = {name: 100 * figure(documents, QUALITY, "perplexity_top1", name) for name in ("k8v4", "int4")}
    small, kept = bits <= 32 / 8 * 1.02, max(same.values()) >= _KEPT
    verdict = Verdict.MET if small and kept else Verdict.PARTLY if small or same["int4"] >= _KEPT - 2 else Verdict.FALSE
    return Finding(
        verdict,
        f"{bits:g} bits per number with its scales, 1/{32 / bits:.1f} of fp32; {held:.2f} times the tokens of 16 bits "
        "end to end; perplexity "
        + ", ".join(f"{value:+.2f} % ({name})" for name, value in loss.items())
        + f"; the same likeliest token for {same['int4']:.1f} % (int4), {same['k8v4']:.1f} % (k8v4)",
        "1/8 would leave nothing for scales. Mixed precision here: keys in 8 bits, values in 4, and recent tokens "
        "native. The figures are the bundled model's, which loses less than large models do.",
    )


def _two_phase(documents: Documents) -> Finding:
    ratio = figure(documents, KERNELS, "decode_ratio_vs_sdpa", "2048")
    best = figure(documents, KERNELS, "decode_ratio_vs_folded", "2048")
    return Finding(
        better(ratio, 1.8),
        f"{ratio:.2f} times as fast as gathering blocks and torch's attention at 2,048 tokens, {best:.2f} times as "
        "torch's fastest form (the worst case of each)",
    )


def _window(documents: Documents) -> Finding:
    window = 100 * figure(documents, QUALITY, "window_quality_ratio")
    passkey = 100 * figure(documents, QUALITY, "window_passkey_ratio")
    chosen = 100 * figure(documents, QUALITY, "heavy_hitter_passkey_ratio")
    running = better(window, 92.0)
    verdict = running if running is Verdict.FALSE or passkey >= 92 else Verdict.PARTLY
    return Finding(
        verdict,
        f"perplexity keeps {window:.1f} % of 2,048 tokens' with the last 512, but {passkey:.0f} % of passkeys are "
        f"found again; with those chosen by attention {chosen:.0f} %",
        "Running text needs its nearest past; what was said once and long ago is lost.",
    )


def _on_host(documents: Documents) -> Finding:
    gap = figure(documents, TIER, "offload_tbt_p50_ratio")
    first = figure(documents, TIER, "offload_ttft_p95_ratio")
    gains = {clients: figure(documents, TIER, "offload_gain", clients) for clients in ("1", "8", "32")}
    saves, chokes = gap <= 1.05 and first <= 1.2, gains["32"] < 1.0
    verdict = Verdict.MET if saves and chokes else Verdict.PARTLY if saves or chokes else Verdict.FALSE
    return Finding(
        verdict,
        f"a pool of 0.6 of the working set (40 % less): {gap:.2f} times the median gap, {first:.2f} times the 95th "
        "percentile of the first token; throughput with a tier over that without: "
        + ", ".join(f"{value:.2f} at {clients}" for clients, value in gains.items())
        + " clients",
        "The link is emulated, at a twentieth of the memory's bandwidth; it carries what is asked for ahead of need.",
    )


def _tiers(documents: Documents) -> Finding:
    gain = max(figure(documents, TIER, "offload_gain", clients) for clients in ("1", "8", "32"))
    share, late = figure(documents, TIER, "tier_share_of_ceiling"), figure(documents, TIER, "tier_ttft_p90_ms")
    fast, quick = better(gain, 3.2), late <= 200
    verdict = Verdict.PARTLY if fast is Verdict.FALSE and quick else fast if quick else Verdict.FALSE
    return Finding(
        verdict,
        f"{gain:.2f} times the throughput at most; {share:.0%} of what a tier without any cost would bring; 90th "
        f"percentile of the first token {late:.0f} ms",
        "What a tier can bring is the prefill that it saves; 3.2 needs a load of which prefill is over two thirds.",
    )


def _cost(documents: Documents) -> Finding:
    cut = figure(documents, COST, "cost_reduction_pct", "value")
    low, high = (figure(documents, COST, "cost_reduction_pct", end) for end in ("low", "high"))
    try:
        ratio = (
            f"{figure(documents, COST, 'goodput_ratio_pressure', 'value'):.2f} times the goodput where memory is short"
        )
    except MissingFigureError:
        ratio = "no workload was short of memory"
    return Finding(
        better(cut, 60.0),
        f"{cut:.0f} % [{low:.0f}, {high:.0f}] less per token at equal attainment; {ratio} (simulated, three held-out "
        "workloads, an *estimated* L4)",
        "With a quality budget of 0.5 %. Without pressure on memory there is nothing to gain.",
    )


def _machine(_: Documents) -> Finding:
    fits = {model: model.sessions(24e9, _CONTEXT, _USABLE) for model in (LLAMA_2_7B, LLAMA_3_8B, LLAMA_2_13B)}
    verdict = Verdict.MET if min(fits.values()) > 0 else Verdict.PARTLY if max(fits.values()) > 0 else Verdict.FALSE
    said = [
        f"{model.name}: {f'{number} sessions' if number > 0 else 'weights alone do not fit'}"
        for model, number in fits.items()
    ]
    return Finding(
        verdict,
        f"24 GB at 4,096 tokens in 16 bits: {'; '.join(said)}",
        "Whether 24 GB do depends on the model. Host memory beyond the weights is only needed for a host tier: as much "
        "as `--host-pool-bytes` says. `autotune plan` answers both for a given model and device.",
    )


def _stateless(documents: Documents) -> Finding:
    shortest = {kind: figure(documents, STATELESS, "stateless_ms", "16", kind) for kind in ("computed", "on_host")}
    longest = {kind: figure(documents, STATELESS, "stateless_ms", "1024", kind) for kind in ("computed", "on_host")}
    try:
        crossover = f"from {figure(documents, STATELESS, 'crossover_tokens'):.0f} tokens on the host is faster"
    except MissingFigureError:
        crossover = "at no length is the host faster"
    verdict = Verdict.MET if shortest["computed"] < shortest["on_host"] else Verdict.FALSE
    return Finding(
        verdict,
        f"16 tokens: computed again in {shortest['computed']:.2f} ms, copied from the host in "
        f"{shortest['on_host']:.2f} ms; 1,024: {longest['computed']:.1f} and {longest['on_host']:.1f} ms; {crossover}",
        "KV that is still on the device always beats computing; what it costs there is room.",
    )


_CLAIMS: Final = (
    Claim("C1", "beyond 128 concurrent sessions fragmentation costs 37 % of throughput", _fragmentation, (CACHE,)),
    Claim("C2", "a 13B model at 4,096 tokens in fp16 holds about 256 MB of KV", _size_13b),
    Claim("C3", "block storage cuts allocation overhead by 62 %", _allocation, (CACHE,)),
    Claim("C4", "int4 shrinks the cache to 1/8 of fp32, accuracy kept by mixed precision", _int4, (CACHE, QUALITY)),
    Claim("C5", "two-phase decode attention is 1.8 times faster", _two_phase, (KERNELS,)),
    Claim("C6", "the most recent 512 tokens keep 92 % of quality in dialogue", _window, (QUALITY,)),
    Claim(
        "C7",
        "management on the CPU saves 40 % of GPU memory at low concurrency, may become the bottleneck at high",
        _on_host,
        (TIER,),
    ),
    Claim("C8", "tiering gives 3.2 times the throughput, 90th percentile of latency within 200 ms", _tiers, (TIER,)),
    Claim("C9", "all together cut the cost of inference by more than 60 %", _cost, (COST,)),
    Claim("C10", "24 GB of GPU memory for contexts of 4K and 64 GB of host memory are the right machine", _machine),
    Claim("stateless", "for short prompts computing again beats caching", _stateless, (STATELESS,)),
)
CLAIMS: Final[Mapping[str, Claim]] = {claim.name: claim for claim in _CLAIMS}
