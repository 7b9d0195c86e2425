"""Closed loops against other engines, in turn with ours, on the same two processors: ``make bench-peers``.

Each peer is installed from the package registries into an environment of its own, below a work folder, and is
started as its documentation says. All serve one random model in bfloat16 (:data:`engine.bench.shapes.REFERENCE`).
"""
