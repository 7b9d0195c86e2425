"""Kernels over the paged KV arena: Triton, CPU and pure-torch references of the same names.

Import :mod:`kernels.layout` for byte layouts (no torch) and :mod:`kernels.ops` for the operations (torch).
"""

# Hugging Face's package of the same import name has a __version__ too; ours marks which one is installed.
__version__ = "0.1.0"
