"""The engine: scheduling, paged KV memory, the forward pass and sampling, without HTTP.

Importing any part of it puts OpenBLAS in front of MLX's reference BLAS (`mlx_engine.blas`), which only works before
`mlx.core` is imported: import `mlx_engine` first.
"""

from mlx_engine.blas import preload_openblas

preload_openblas()
