"""``python -m kernels.bench``: what the CPU kernels cost, against torch and against memory. See ``__main__``."""
