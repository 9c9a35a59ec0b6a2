"""The paged-attention kernels: one text (`*.inc`), and what its words mean in Metal, CUDA and on the host (`*.h`)."""

from mlx_engine.attention.kernels.paged import PagedKernels

__all__ = ["PagedKernels"]
