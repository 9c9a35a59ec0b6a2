"""The engine's configuration: one validated, frozen model, shared by the server, the benches and the tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

EMBEDDED_MODEL = "embedded"


class EngineConfig(BaseModel):
    """What an engine is built from. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        EMBEDDED_MODEL,
        min_length=1,
        description="'embedded' (SmolLM2-135M-Instruct), a folder, a .gguf file or a Hugging Face id",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="type of weights, of K/V too by default; auto is float32 on CPU, the model's own on a GPU"
    )
    kv_cache_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="type of K/V in the pool; auto: that of `dtype`; int8: 8 bits and a scale for each token and K/V "
        "head, about half of the memory of 16 bits, not quite the same tokens",
    )
    max_model_len: int | None = Field(None, ge=2, description="longest sequence in tokens; the model's own if null")
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV block")
    num_blocks: int | None = Field(None, ge=1, description="KV blocks; from memory if null")
    kv_memory_fraction: float = Field(
        0.5, gt=0, le=1, description="share of the memory left after weights and activations that KV may take"
    )
    memory_limit_gib: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="most GiB that MLX may hold on its device: weights, K/V, recordings, activations and freed memory "
        "that it keeps; if null what is free at start, on a Mac what Metal recommends, on a CPU no limit",
    )
    max_num_seqs: int = Field(64, ge=1, description="requests that run at once")
    # A GPU's grid has no more threadgroups in the direction that some kernels count a step's tokens in.
    max_num_batched_tokens: int = Field(
        512, ge=1, le=65535, description="tokens in a step, prefill and decode together"
    )
    max_prefill_chunk: int | None = Field(
        None, ge=1, description="most prefill tokens of one request in a step; the token budget if null"
    )
    chunk_halving_context: int | Literal["auto"] | None = Field(
        "auto",
        description="context in tokens at which a prefill chunk is half as long, so that steps late in a prompt take "
        "no longer than the first; auto: from the model's shape, null: chunks stay whole",
    )
    scheduler: str = Field("fcfs", description="scheduler policy, by entry-point name")
    scheduler_options: dict[str, Any] = Field(default_factory=dict, description="the policy's own arguments")
    kv_manager: str = Field("paged", description="KV manager, by entry-point name")
    kv_manager_options: dict[str, Any] = Field(default_factory=dict, description="the manager's own arguments")
    prefix_cache: str = Field("radix", description="prefix cache, by entry-point name; 'none' turns it off")
    prefix_cache_options: dict[str, Any] = Field(default_factory=dict, description="the cache's own arguments")
    attention_backend: str = Field(
        "auto",
        description="attention backend, by entry-point name; auto: `fused` on a GPU that its kernels run on, else "
        "`gather`",
    )
    attention_backend_options: dict[str, Any] = Field(default_factory=dict, description="the backend's own arguments")
    drafter: str = Field(
        "none",
        description="guesses greedy requests' next tokens, which a step then checks together; by entry-point name, "
        "'none' turns it off",
    )
    drafter_options: dict[str, Any] = Field(default_factory=dict, description="the drafter's own arguments")
    cpu_backend: Literal["auto", "native", "blas"] = Field(
        "auto",
        description="what linear layers run on where MLX runs on the CPU: `native`, our own library, compiled at first "
        "start; `blas`, OpenBLAS; auto: native where there is a C++ compiler",
    )
    compile_decode: bool = Field(
        True, description="run steps of decode rows as compiled functions where the attention backend allows it"
    )
    record_decode: bool = Field(
        True, description="on CUDA, launch small steps as recorded graphs; takes memory for each size"
    )
    overlap: bool = Field(True, description="build the next step while this one runs")
    seed: int = Field(0, description="seed of the sampling of requests that bring none")

    @field_validator("chunk_halving_context")
    @classmethod
    def _positive(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"chunk_halving_context must be at least 1, 'auto' or null, not {value}")
        return value

    @model_validator(mode="after")
    def _sizes_agree(self) -> EngineConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token a step"
            )
        return self
