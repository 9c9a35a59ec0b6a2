"""Policies, and what finds, checks, builds and simulates them."""

# First of all: it puts OpenBLAS in front of the reference BLAS before any module here imports MLX.
import mlx_engine  # noqa: F401
