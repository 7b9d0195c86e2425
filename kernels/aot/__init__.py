"""``python -m kernels.aot``: every kernel compiled for real GPUs without one. See ``__main__``."""
