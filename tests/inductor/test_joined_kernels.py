"""Inductor's C++ kernels of a graph share files, and are what they are by themselves."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import async_compile, config

from dynamo_backends._torch_private import joined_kernels as joined_kernels_module
from dynamo_backends._torch_private.joined_kernels import (
    KernelSource,
    group_by_length,
    join_sources,
    joining_kernels,
)
from tests.inductor.checking import EXACT, check

SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <c10/util/Unroll.h>

template <bool accum> inline void kernel_part(float* x) {}
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    #pragma omp parallel
    kernel_part<true>(out_ptr0);
}
"""


def kernel(length: int = 0) -> KernelSource:
    made = KernelSource.parse([], SOURCE + "/" * length)
    assert made is not None
    return made


def test_a_kernel_is_in_a_namespace_of_its_own():
    text = join_sources([kernel(), kernel()])
    assert text.count("#include <c10/util/Unroll.h>") == 1
    assert 'extern "C"' not in text.partition("namespace bindings")[0]
    for number in range(2):
        assert f"namespace part{number} {{\n" in text
        assert f'{{"kernel{number}", ' in text
    assert text.index("#include <torch/") < text.index("namespace part0")


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.replace("template", "#define ACCUMULATES\ntemplate"),
        lambda s: s.replace("template", "struct Other;\n#include <cmath>\ntemplate"),
        lambda s: s.replace("template", 'extern "C" void other();\ntemplate'),
        lambda s: s.replace("kernel(", "run("),
        lambda s: s.replace('extern "C"', ""),
    ],
    ids=["macros", "a late header", "two entries", "another name", "no entry"],
)
def test_what_would_not_be_the_same_in_a_namespace_stays_alone(change: Callable[[str], str]):
    assert KernelSource.parse([], SOURCE) is not None
    assert KernelSource.parse([], change(SOURCE)) is None


def test_groups_have_about_the_same_amount_of_text():
    sizes = [100, 900, 300, 200, 500, 400]
    groups = group_by_length([kernel(size) for size in sizes], 2)
    assert sorted(len(k.body) for group in groups for k in group) == sorted(
        len(kernel(size).body) for size in sizes
    )
    first, second = (sum(len(k.body) for k in group) for group in groups)
    assert abs(first - second) <= 200
    assert group_by_length([kernel()], 2) == []
    assert len(group_by_length([kernel() for _ in range(3)], 8)) == 3


class Layers(nn.Module):
    """Kernels between products, none of which can be fused with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.products
        return third(second(first(x).softmax(-1)).cumsum(0).tanh()).double().sigmoid()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """The libraries that Inductor has compiled, of kernels alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def found() -> list[Path]:
        return [p for p in tmp_path.rglob("*.main.cpp") if "PyInit_kernel" in p.read_text()]

    return found


def test_kernels_share_as_many_files_as_threads_compile(files: Callable[[], list[Path]]):
    check(Layers(), torch.randn(32, 64), EXACT)
    made = files()
    assert 1 <= len(made) <= async_compile.get_compile_threads()
    assert sum(p.read_text().count("METH_FASTCALL") for p in made) >= 3
    torch._dynamo.reset()
    check(Layers(), torch.randn(32, 64), EXACT)
    assert files() == made, "another model with that graph compiles nothing"


def test_a_joined_file_that_cannot_be_compiled(
    files: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends._torch_private import joined_kernels as module

    monkeypatch.setattr(module, "_BINDINGS", "#error planted\nFUNCTIONS")
    check(Layers(), torch.randn(32, 64), EXACT)
    alone = [p for p in files() if "#error planted" not in p.read_text()]
    assert len(alone) >= 3


def test_wrong_arguments_are_an_error_of_python(files: Callable[[], list[Path]]):
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    numbers = KernelSource.parse(
        [],
        "#include <torch/csrc/inductor/cpp_prefix.h>\n"
        'extern "C" void kernel(float* out, const int64_t n, const double x) { out[n] = x; }',
    )
    assert numbers is not None
    load: Any = CppPythonBindingsCodeCache.load_async
    function = load(join_sources([numbers]))().kernel0
    out = torch.zeros(4)
    function(out, 2, 1.5)
    assert out.tolist() == [0, 0, 1.5, 0]
    for wrong in [(out,), (out, "2", 1.5), (out, 2, "x"), (out, 1 << 80, 1.0)]:
        with pytest.raises(RuntimeError, match=r"arguments|expected"):
            function(*wrong)


def test_outside_inductor_is_as_it_was():
    before = async_compile.AsyncCompile
    with joining_kernels():
        inner = async_compile.AsyncCompile
        with joining_kernels():
            assert async_compile.AsyncCompile is inner
        assert async_compile.AsyncCompile is inner is not before
    assert async_compile.AsyncCompile is before


def test_a_second_process_loads_what_the_first_one_compiled(files: Callable[[], list[Path]]):
    program = (
        "import torch; from tests.inductor.test_joined_kernels import Layers;"
        "from tests.inductor.checking import EXACT, check;"
        "torch.manual_seed(0); check(Layers(), torch.randn(32, 64), EXACT)"
    )

    def compiled() -> dict[Path, int]:
        subprocess.run([sys.executable, "-c", program], check=True)
        return {p: p.with_suffix(".so").stat().st_mtime_ns for p in files()}

    first = compiled()
    assert first
    assert compiled() == first


def test_a_header_is_precompiled_for_many_graphs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joined_kernels_module, "_compilations", itertools.count())
    settings = []
    for _ in range(6):
        with joined_kernels_module.defer_precompiled_header():
            settings.append(config.cpp_cache_precompile_headers)
    own = config.cpp_cache_precompile_headers
    assert settings == [False] * 4 + [own] * 2
