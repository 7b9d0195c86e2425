"""``make gpu-check``: the Triton kernels on a GPU, right first, then how fast. See ``__main__``."""
