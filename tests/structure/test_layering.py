"""Who may know whom: relay -> hal <- backends, read from the imports of every file."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
VENDOR = ("cupy", "pyopencl", "onnxruntime")
# Parts of torch that name a vendor's hardware.
TORCH_VENDOR = ("torch.cuda", "torch.xpu", "torch.mps", "torch.hip")
FILES = [
    file.relative_to(ROOT).as_posix()
    for package in ("hal", "backends", "relay")
    for file in sorted((ROOT / package).rglob("*.py"))
]


class Import(NamedTuple):
    module: str
    line: int
    lazy: bool  # inside a function: the file can be imported without the module


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            # `from torch import cuda` imports torch.cuda as much as the long form does.
            yield from (Import(f"{module}.{alias.name}", node.lineno, lazy) for alias in node.names)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, lazy or inside)


def attributes(tree: ast.AST) -> Iterator[Import]:
    """Dotted uses such as torch.cuda.synchronize(), which need no import of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield Import(ast.unparse(node), node.lineno, False)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file)


def where(file: str, found: list[Import]) -> str:
    return ", ".join(f"{file}:{entry.line} uses {entry.module}" for entry in found)


@pytest.mark.parametrize("file", FILES)
def test_arrows_point_one_way(file: str) -> None:
    package = file.split("/")[0]
    others = {"hal": ("backends", "relay"), "relay": ("backends",), "backends": ("relay",)}[package]
    wrong = [entry for entry in imports(parsed(file)) if within(entry.module, others)]
    assert not wrong, f"{package} may not import {' or '.join(others)}: {where(file, wrong)}"


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("backends/")])
def test_vendor_libraries_are_used_in_backends_only(file: str) -> None:
    tree = parsed(file)
    wrong = [entry for entry in imports(tree) if within(entry.module, VENDOR + TORCH_VENDOR)]
    wrong += [entry for entry in attributes(tree) if within(entry.module, TORCH_VENDOR)]
    assert not wrong, f"only backends/ may use a vendor's library: {where(file, wrong)}"


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("backends/")])
def test_backends_import_vendor_libraries_inside_functions(file: str) -> None:
    wrong = [entry for entry in imports(parsed(file)) if within(entry.module, VENDOR) and not entry.lazy]
    assert not wrong, f"import it where it is used, for it may not be installed: {where(file, wrong)}"


def test_this_test_would_notice() -> None:
    source = "import relay.eps\nfrom torch import cuda\ndef late():\n    import cupy\ntorch.cuda.synchronize()\n"
    tree = ast.parse(source)
    assert list(imports(tree)) == [
        Import("relay.eps", 1, False),
        Import("torch.cuda", 2, False),
        Import("cupy", 4, True),
    ]
    assert any(within(entry.module, TORCH_VENDOR) for entry in attributes(tree))
    assert {file.split("/")[0] for file in FILES} == {"hal", "backends", "relay"}


def test_no_benchmark_or_example_hides_a_package_from_the_scripts_beside_it() -> None:
    root = Path(__file__).resolve().parents[2]
    scripts = {path.stem for folder in ("benchmarks", "examples") for path in (root / folder).glob("*.py")}
    assert scripts
    assert not scripts & {"hal", "backends", "relay", "torch", "numpy", *sys.stdlib_module_names}
