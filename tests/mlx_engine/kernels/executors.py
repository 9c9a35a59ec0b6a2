"""Runs the GPU kernels on the host: their common text in the host's dialect, and the very text that Metal would get.

Both stand in for what `mx.fast.metal_kernel` or `mx.fast.cuda_kernel` returns: called with arrays, constants and a
grid, they return the outputs. They run at once, and write to the inputs' memory as a GPU would.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.attention.kernels import texts

_KERNELS = Path(texts.__file__).parent
_HERE = Path(__file__).parent
_LIBRARIES = tempfile.TemporaryDirectory(prefix="quire-kernels-")

_COMMON_TYPES = {mx.float32: "float", mx.int32: "int", mx.int8: "int8_t", mx.uint32: "uint32_t"}
_TYPES: dict[str, dict[mx.Dtype, str]] = {
    "host": _COMMON_TYPES | {mx.float16: "quire::float16", mx.bfloat16: "quire::bfloat16"},
    "cuda": _COMMON_TYPES | {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"},
}

_COMPILER = ("g++", "-std=c++20", "-O1", "-fPIC", "-w")

Template = Sequence[tuple[str, Any]]


class KernelFault(Exception):
    """Lanes of a threadgroup waited for others that had gone elsewhere."""


class _Executor:
    def __init__(self, name: str, shared_memory: int = 0) -> None:
        self._name = name
        _, self._inputs, self._outputs = texts.KERNELS[name]

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Template,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        # Poisoned: an element that no lane writes shows.
        outputs = [
            mx.full(shape, float("nan"), dtype)
            if mx.issubdtype(dtype, mx.floating)
            else mx.full(shape, -7, mx.int32).view(dtype)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        mx.eval(inputs, outputs)
        arrays = [*inputs, *outputs]
        run = _library(self.source(inputs, template, grid, threadgroup, output_shapes, output_dtypes))
        buffers = (ctypes.c_void_p * len(arrays))(*map(_address, arrays))
        shapes = [(ctypes.c_int * max(array.ndim, 1))(*array.shape) for array in arrays]
        strides = [(ctypes.c_int64 * max(array.ndim, 1))(*_strides(array)) for array in arrays]
        if not run(buffers, _pointers(shapes), _pointers(strides), *grid, threadgroup[0]):
            raise KernelFault(f"{self._name}: lanes don't meet")
        return outputs

    def source(self, *call: Any) -> str:
        raise NotImplementedError


class HostKernel(_Executor):
    """The common text in the host's dialect."""

    def source(
        self, inputs: Any, template: Template, grid: Any, threadgroup: Any, output_shapes: Any, output_dtypes: Any
    ) -> str:
        function, arguments = _function(self._name, "host", inputs, template, output_dtypes)
        return function + _entry("kernel", arguments)


class CudaTextKernel:
    """The text in CUDA's dialect, compiled by nvcc and not run: outputs are zeros."""

    def __init__(self, name: str, shared_memory: int = 0) -> None:
        self._name = name

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Template,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        **_: Any,
    ) -> list[mx.array]:
        function, _arguments = _function(self._name, "cuda", inputs, template, output_dtypes)
        text = Path(_LIBRARIES.name, "kernel.cu")
        text.write_text(f"#include <cstdint>\n{function}")
        command = ["nvcc", "-std=c++17", "-arch=sm_90a", "-cubin", str(text), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{self._name} {template}\n{done.stderr}"
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]


def _function(
    name: str, dialect: texts.Dialect, inputs: Any, template: Template, output_dtypes: Sequence[mx.Dtype]
) -> tuple[str, list[str]]:
    """The kernel as a function called `kernel`, and the arguments with which `run` calls it."""
    _, input_names, output_names = texts.KERNELS[name]
    text, types = texts.kernel_text(name, dialect), _TYPES[dialect]
    parameters, arguments = [], []
    for i, (word, array) in enumerate(zip(input_names, inputs, strict=True)):
        kind = f"const {types[array.dtype]}*"
        parameters.append(f"{kind} {word}")
        arguments.append(f"({kind})buffers[{i}]")
        if f"{word}_shape" in text:
            parameters.append(f"const int* {word}_shape")
            arguments.append(f"shapes[{i}]")
        if f"{word}_strides" in text:
            parameters.append(f"const int64_t* {word}_strides")
            arguments.append(f"strides[{i}]")
    for i, (word, dtype) in enumerate(zip(output_names, output_dtypes, strict=True), start=len(inputs)):
        parameters.append(f"{types[dtype]}* {word}")
        arguments.append(f"({types[dtype]}*)buffers[{i}]")
    constants = "".join(
        f"using {word} = {types[value]};\n"
        if isinstance(value, mx.Dtype)
        else f"constexpr {'bool' if isinstance(value, bool) else 'int'} {word} = {int(value)};\n"
        for word, value in template
    )
    kind = "__global__ void" if dialect == "cuda" else "void"
    header = texts.kernel_header(name, dialect)
    return f"{header}\n{kind} kernel({', '.join(parameters)}) {{\n{constants}{text}\n}}\n", arguments


class MetalTextKernel(_Executor):
    """The text that MLX hands to Apple's compiler, signature included, compiled against a shim of the language."""

    def source(
        self, inputs: Any, template: Template, grid: Any, threadgroup: Any, output_shapes: Any, output_dtypes: Any
    ) -> str:
        text = _metal_text(
            self._name,
            tuple((a.shape, a.dtype) for a in inputs),
            tuple(template),
            tuple(output_shapes),
            tuple(output_dtypes),
        )
        name = re.search(r"\[\[kernel\]\] void (\w+)\(", text)
        instance = re.search(r"decltype\((\w+<[^;]*>)\)", text)
        assert name is not None
        assert instance is not None
        # Explicit instantiation with attributes is Metal's own.
        definition = text[: text.index("template [[host_name")]
        signature = definition[name.end() : definition.index(") {", name.end())]
        arguments, buffer = [], 0
        places = {n: i for i, n in enumerate((*self._inputs, *self._outputs))}
        for parameter in re.split(r",\s*\n", signature.strip()):
            declared = re.fullmatch(r"\s*(.*?)\s*(\w+) \[\[(\w+)(?:\((\d+)\))?\]\]", parameter)
            assert declared is not None, parameter
            kind, word, attribute, index = declared.groups()
            if attribute != "buffer":
                arguments.append(f"{attribute}_value")
                continue
            assert int(index) == buffer, "buffers are numbered in order"
            buffer += 1
            if word in places:
                assert "constant" not in kind, f"{word} is in the constant address space: the text expects `device`"
                arguments.append(f"({kind})buffers[{places[word]}]")
            else:
                array, what = word.rsplit("_", 1)
                arguments.append(f"({kind}){ {'shape': 'shapes', 'strides': 'strides'}[what] }[{places[array]}]")
        return f'#include "metal_shim.h"\n{definition}\n' + _entry(instance[1], arguments)


def _entry(function: str, arguments: Sequence[str]) -> str:
    parameters = (
        "void* const* buffers, const int* const* shapes, const int64_t* const* strides, "
        "unsigned x, unsigned y, unsigned z, unsigned threads"
    )
    call = f"[&] {{ {function}({', '.join(arguments)}); }}"
    return f'extern "C" int run({parameters}) {{\n  return simt::launch({{x, y, z}}, {{threads, 1, 1}}, {call});\n}}\n'


@functools.cache
def _standard_headers() -> str:
    """The C++ library's headers, compiled beforehand: half of the time that a kernel takes to compile."""
    header = Path(_LIBRARIES.name, "standard.h")
    names = ("cmath", "cstdint", "cstring", "deque", "setjmp.h", "ucontext.h", "vector")
    header.write_text("#pragma once\n" + "".join(f"#include <{name}>\n" for name in names))
    command = [*_COMPILER, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(command, check=True, timeout=120)
    return str(header)


@functools.cache
def _fibers() -> str:
    """What runs threadgroups, compiled."""
    target = Path(_LIBRARIES.name, "simt.o")
    command = [*_COMPILER, "-c", str(_KERNELS / "simt.cpp"), "-o", str(target)]
    subprocess.run(command, check=True, timeout=120)
    return str(target)


@functools.cache
def _library(source: str) -> Callable[..., int]:
    stem = hashlib.sha256(source.encode()).hexdigest()[:16]
    text, library = Path(_LIBRARIES.name, f"{stem}.cpp"), Path(_LIBRARIES.name, f"{stem}.so")
    text.write_text(source)
    options = ["-shared", "-include", _standard_headers(), f"-I{_KERNELS}", f"-I{_HERE}"]
    subprocess.run([*_COMPILER, *options, str(text), _fibers(), "-o", str(library)], check=True, timeout=120)
    run: Callable[..., int] = ctypes.CDLL(str(library)).run
    return run


def on_host(array: mx.array) -> np.ndarray:
    """The array's own memory."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _address(array: mx.array) -> int:
    return int(on_host(array).ctypes.data)


def _strides(array: mx.array) -> list[int]:
    """In elements."""
    return [stride // array.dtype.size for stride in on_host(array).strides]


def _pointers(arrays: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*[ctypes.addressof(array) for array in arrays])


@functools.cache
def _metal_text(name: str, inputs: Any, template: Any, output_shapes: Any, output_dtypes: Any) -> str:
    """What MLX prints as the generated source when a function that calls the kernel is exported, Metal or not."""
    _, input_names, output_names = texts.KERNELS[name]
    kernel = mx.fast.metal_kernel(
        name=f"quire_{name}",
        input_names=list(input_names),
        output_names=list(output_names),
        source=texts.kernel_text(name, "metal"),
        header=texts.kernel_header(name, "metal"),
    )

    def call(*arrays: mx.array) -> Any:
        return kernel(
            inputs=list(arrays),
            template=list(template),
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
            verbose=True,
        )

    with tempfile.TemporaryFile() as captured, tempfile.NamedTemporaryFile(suffix=".mlxfn") as exported:
        sys.stdout.flush()
        saved = os.dup(1)
        try:
            # MLX prints from C++.
            os.dup2(captured.fileno(), 1)
            mx.export_function(exported.name, call, *[mx.zeros(shape, dtype) for shape, dtype in inputs])
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        captured.seek(0)
        printed = captured.read().decode()
    return printed.split("```")[1].strip("\n")
