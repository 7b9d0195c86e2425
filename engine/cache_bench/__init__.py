"""``python -m engine.cache_bench``: what the cache promises, measured row by row; the last line is JSON.

A row is a file in ``rows/`` with ``KEYS``, the JSON keys that it yields, and ``run(context)``, which returns their
values.
"""
