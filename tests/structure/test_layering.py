"""Which file may import which: relay -> hal <- backends, and one order of folders inside relay.

Every rule is a function of a checkout's root, so that the same function that passes on the project is shown to fail on
a small tree with one import the wrong way.
"""

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.command_line import load_script

ROOT = Path(__file__).parents[2]
VENDOR = ("cupy", "pyopencl", "onnxruntime")
TORCH_VENDOR = ("torch.cuda", "torch.xpu", "torch.mps", "torch.hip")
"""Parts of torch that name a vendor's hardware."""

TRACING = (
    "torch._functorch", "torch._subclasses", "torch._dynamo", "torch._inductor", "torch._export", "torch._guards",
    "torch._decomp", "torch._higher_order_ops", "torch._logging", "torch.fx.experimental", "torch.fx._symbolic_trace",
    "torch._C._functorch", "torch._dispatch",
)  # fmt: skip
"""torch's private tracing interfaces."""

LAYERS = (
    {"option_schema", "errors", "metrics", "precision", "interrupts"},
    {"options", "adapter_options"},
    {"graph", "processes"},
    {"optim", "capture"},
    {"eps", "data"},
    {"checkpoint"},
    {"models"},
    {"partition"},
    {"runtime"},
    {"distributed"},
    {"simulation", "trainer_arguments"},
    {"build_run"},
    {"run_state"},
    {"verification"},
    {"trainer"},
    {"checkpoint_manager", "fitting", "hf"},
    {"conformance", "authoring", "finetuning"},
    {"cli"},
    {"__main__"},
)
"""The files and folders of relay, lowest first. Each imports from those before it; `__init__` gives public names."""

PUBLIC = {"relay/cli", "relay/conformance", "relay/checkpoint_manager.py"}
"""Parts of relay that may use its public names, as a user does."""

MOST_FILES = 16


DRAWING = load_script(ROOT / "docs" / "draw_architecture.py")
"""The script that reads the imports and draws them."""


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def statements(root: Path, *folders: str) -> Iterator[tuple[str, str, int, bool]]:
    """(file, imported name, line, lazy) for every import of the packages' files, or of those in some folders."""
    for file in DRAWING.files(root):
        if not folders or any(file.startswith(f"{folder}/") for folder in folders):
            for entry in DRAWING.imports(DRAWING.tree_of((root / file).read_text(encoding="utf-8"), file)):
                yield file, entry.module, entry.line, entry.lazy


@functools.cache
def uses_in(text: str, file: str) -> list[tuple[str, int]]:
    """Dotted uses such as torch.cuda.synchronize(), which need no import of their own, and their lines."""
    tree = DRAWING.tree_of(text, file)
    return [(ast.unparse(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


def uses(root: Path, file: str) -> list[tuple[str, int]]:
    return uses_in((root / file).read_text(encoding="utf-8"), file)


def wrong_between_packages(root: Path) -> list[str]:
    others = {"hal": ("backends", "relay"), "relay": ("backends",), "backends": ("relay",)}
    return [
        f"{file}:{line} imports {module}"
        for file, module, line, _ in statements(root)
        if within(module, others[file.split("/")[0]])
    ]


def wrong_vendors(root: Path) -> list[str]:
    """Vendors' libraries outside backends/, or imported there before they are used."""
    wrong = [
        f"{file}:{line} imports {module}"
        for file, module, line, lazy in statements(root)
        if within(module, VENDOR + TORCH_VENDOR)
        and not (file.startswith("backends/") and (lazy or within(module, TORCH_VENDOR)))
    ]
    for file in DRAWING.files(root):
        if not file.startswith("backends/"):
            wrong += [f"{file}:{line} uses {name}" for name, line in uses(root, file) if within(name, TORCH_VENDOR)]
    return wrong


def part_of(file: str) -> str:
    """The folder of relay, or the file beside them, that a file belongs to."""
    return file.split("/")[1].removesuffix(".py")


def wrong_in_relay(root: Path) -> list[str]:
    """Imports of relay that lead upwards, or between two parts of one layer."""
    layer = {part: number for number, parts in enumerate(LAYERS) for part in parts}
    wrong = []
    for file, target, entry in DRAWING.imported_files(root):
        if not (file.startswith("relay/") and target.startswith("relay/")) or file == "relay/__init__.py":
            continue
        if target == "relay/__init__.py":
            if not any(file == public or file.startswith(f"{public}/") for public in PUBLIC):
                wrong.append(f"{file}:{entry.line} imports the public names of relay")
        elif part_of(file) != part_of(target) and layer[part_of(target)] >= layer[part_of(file)]:
            wrong.append(f"{file}:{entry.line} imports {target}")
    return wrong


def circles(root: Path) -> list[list[str]]:
    """Files that import each other, in circles of any length."""
    graph: dict[str, set[str]] = {}
    for file, target, _ in DRAWING.imported_files(root):
        # A package's __init__ is imported with every module of it; that alone is no circle.
        if file != "relay/__init__.py" and not (target.endswith("__init__.py") and file.startswith(target[:-11])):
            graph.setdefault(file, set()).add(target)
    found, state, path = [], {}, []

    def visit(file: str) -> None:
        state[file] = "open"
        path.append(file)
        for target in sorted(graph.get(file, ())):
            if state.get(target) == "open":
                found.append(path[path.index(target) :])
            elif target not in state:
                visit(target)
        path.pop()
        state[file] = "done"

    for file in sorted(graph):
        if file not in state:
            visit(file)
    return found


def wrong_tracing(root: Path) -> list[str]:
    """torch's private tracing interfaces outside relay/capture."""
    wrong = [
        f"{file}:{line} imports {module}"
        for file, module, line, _ in statements(root)
        if within(module, TRACING) and not file.startswith("relay/capture/")
    ]
    for file in DRAWING.files(root):
        if not file.startswith("relay/capture/"):
            wrong += [f"{file}:{line} uses {name}" for name, line in uses(root, file) if within(name, TRACING)]
    return wrong


def wrong_conformance(root: Path) -> list[str]:
    """Imports of the conformance suite by anything but the suite and what runs it."""
    allowed = ("hal/conformance/", "relay/conformance/", "relay/cli/conformance.py")
    return [
        f"{file}:{line} imports {module}"
        for file, module, line, _ in statements(root)
        if within(module, ("hal.conformance", "relay.conformance")) and not file.startswith(allowed)
    ]


def crowded(root: Path) -> list[str]:
    """Folders with more Python files than anyone finds their way in."""
    counts: dict[str, int] = {}
    for top in (*DRAWING.PACKAGES, "tests", "benchmarks", "examples"):
        for path in (root / top).rglob("*.py"):
            if path.name != "__init__.py":
                folder = path.parent.relative_to(root).as_posix()
                counts[folder] = counts.get(folder, 0) + 1
    return [f"{folder} has {count} files" for folder, count in sorted(counts.items()) if count > MOST_FILES]


def unexplained(root: Path) -> list[str]:
    """Folders whose `__init__` does not say what lives there, what does not, and who may import it."""
    wrong = []
    for file in DRAWING.files(root):
        if file.endswith("/__init__.py"):
            text = ast.get_docstring(ast.parse((root / file).read_text(encoding="utf-8"))) or ""
            lines = [line for line in text.splitlines() if line.strip()]
            if len(lines) < 3 or "import" not in text.lower():
                wrong.append(f"{file} says {len(lines)} lines")
    return wrong


RULES: dict[Callable[[Path], object], dict[str, str]] = {
    wrong_between_packages: {"hal/device.py": "from relay.eps import store\n"},
    wrong_vendors: {"relay/runtime/stash.py": "from torch import cuda\n"},
    wrong_in_relay: {"relay/eps/store.py": "def late():\n    from relay.runtime import stash\n"},
    circles: {"hal/a.py": "from hal import b\n", "hal/b.py": "from hal.a import c\n"},
    wrong_tracing: {"relay/partition/segments.py": "from torch._functorch import aot_autograd\n"},
    wrong_conformance: {"backends/cpu.py": "from hal.conformance.gate import Gate\n"},
    crowded: {f"relay/runtime/file_{number}.py": "" for number in range(MOST_FILES + 1)},
    unexplained: {"relay/runtime/__init__.py": '"""What runs."""\n'},
}
"""Each rule, with a file that breaks it."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_its_rules_of_structure(rule: Callable[[Path], object]) -> None:
    assert rule(ROOT) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_notices_one_file_that_breaks_it(rule: Callable[[Path], object], tmp_path: Path) -> None:
    whole = {"relay/__init__.py", "relay/eps/__init__.py", "relay/runtime/__init__.py", "relay/runtime/stash.py"}
    whole |= {"relay/partition/__init__.py", "hal/__init__.py", "backends/__init__.py", "relay/eps/store.py"}
    for file in whole:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        text = '"""What lives here.\n\nWhat does not.\nWho may import it.\n"""\n' if path.name == "__init__.py" else ""
        path.write_text(text, encoding="utf-8")
    assert rule(tmp_path) == []
    for file, text in RULES[rule].items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    assert rule(tmp_path) != []


def test_the_rules_see_lazy_imports_and_dotted_uses() -> None:
    source = "import relay.eps\nfrom torch import cuda\ndef late():\n    import cupy\ntorch.cuda.synchronize()\n"
    assert [tuple(entry) for entry in DRAWING.imports(ast.parse(source))] == [
        ("relay.eps", 1, False),
        ("torch.cuda", 2, False),
        ("cupy", 4, True),
    ]
    assert {file.split("/")[0] for file in DRAWING.files(ROOT)} == {"hal", "backends", "relay"}


def test_every_part_of_relay_has_its_layer() -> None:
    parts = {part_of(file) for file in DRAWING.files(ROOT) if file.startswith("relay/")} - {"__init__"}
    named = [part for parts in LAYERS for part in parts]
    assert sorted(named) == sorted(parts)


def test_no_benchmark_or_example_hides_a_package_from_the_scripts_beside_it() -> None:
    scripts = {path.stem for folder in ("benchmarks", "examples", "docs") for path in (ROOT / folder).glob("*.py")}
    assert scripts
    assert not scripts & {"hal", "backends", "relay", "torch", "numpy", *sys.stdlib_module_names}


def test_the_page_on_architecture_draws_the_imports_as_they_are() -> None:
    assert DRAWING.main(["--check"]) == 0
