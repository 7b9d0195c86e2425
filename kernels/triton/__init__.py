"""Triton kernels for NVIDIA GPUs, one file per operation; nothing here imports triton until an operation is used.

Each file has private ``_x_kernel`` functions, an ``x_launcher`` that allocates nothing, and a public ``x`` with the
signature of ``kernels.ops``. Where the bytes lie comes from ``kernels.layout`` at compile time (``tiles.py``).

So far checked under Triton's interpreter and compiled for real targets (``kernels.aot``); not measured on a GPU.
``kernels.gpu_check`` checks and times them on one.
"""
