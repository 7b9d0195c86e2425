"""The literature's claims about KV caches, each measured on this engine, on this machine, in one go.

``python -m autotune.evidence`` (``make evidence``) runs the benchmarks that a claim needs, keeps what they print, and
writes a page of claim, figure, verdict and command. Verdicts are computed: other figures give other ones.
"""
