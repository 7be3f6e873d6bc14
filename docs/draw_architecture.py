"""Draws the folders of the project and the imports between them, as the Mermaid diagram in docs/architecture.md.

`python docs/draw_architecture.py` writes the diagram anew between its markers; `--check` writes nothing and exits with
1 if the page shows another one. It reads imports as text, those inside functions included, and runs nothing of the
project. Invariant: an arrow is drawn if and only if a file of one folder imports from a file of the other.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("hal", "backends", "relay")
PAGE = "docs/architecture.md"
BEGIN, END = "<!-- drawing: begin -->", "<!-- drawing: end -->"


class Import(NamedTuple):
    """One import statement: the module or name it takes, its line, and whether it stands inside a function."""

    module: str
    line: int
    lazy: bool


def imports(tree: ast.AST, lazy: bool = False) -> Iterator[Import]:
    """Every import below a node. `from a import b` counts as an import of `a.b`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(f"{node.module or ''}.{alias.name}", node.lineno, lazy) for alias in node.names)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, lazy or inside)


@functools.cache
def tree_of(text: str, file: str) -> ast.Module:
    """A file's syntax tree, which each rule about imports looks at."""
    return ast.parse(text, file)


def files(root: Path) -> list[str]:
    """The Python files of the three packages, relative to the root, in order."""
    return [
        path.relative_to(root).as_posix() for package in PACKAGES for path in sorted((root / package).rglob("*.py"))
    ]


def modules(root: Path) -> dict[str, str]:
    """Each module's dotted name and its file."""
    return {file[:-3].replace("/", ".").removesuffix(".__init__"): file for file in files(root)}


def module_of(name: str, known: Mapping[str, str]) -> str | None:
    """The module that an imported name belongs to, or None for one that is not the project's."""
    parts = name.split(".")
    found = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((module for module in found if module in known), None)


def imported_files(root: Path) -> Iterator[tuple[str, str, Import]]:
    """Every import of one file of the project by another: the importing file, the imported file, the statement."""
    known = modules(root)
    for file in known.values():
        tree = tree_of((root / file).read_text(encoding="utf-8"), file)
        for statement in imports(tree):
            module = module_of(statement.module, known)
            if module is not None and known[module] != file:
                yield file, known[module], statement


def folder_of(file: str) -> str:
    """What a file is drawn as: its folder, two levels at most (relay/runtime); a file beside relay's folders itself."""
    parts = file.split("/")
    return file if parts[0] == "relay" and len(parts) == 2 else "/".join(parts[:-1][:2])


def arrows(root: Path) -> dict[tuple[str, str], int]:
    """How many imports lead from one folder to another."""
    counted: dict[tuple[str, str], int] = {}
    for importer, imported, _ in imported_files(root):
        pair = folder_of(importer), folder_of(imported)
        # relay/__init__ gives public names and imports each where it is used; it is no part of the layers.
        if pair[0] != pair[1] and "relay/__init__.py" not in (importer, imported):
            counted[pair] = counted.get(pair, 0) + 1
    return counted


def drawing(root: Path) -> str:
    """The Mermaid text: a box a package, a node a folder, an arrow for imports.

    Inside relay an arrow that follows from others (a to b, b to c, so a to c) is left out.
    """
    nodes = sorted({folder_of(file) for file in files(root)} - {"relay/__init__.py"})
    counted = arrows(root)
    lines = ["```mermaid", "flowchart TD"]
    for package in PACKAGES:
        lines.append(f"  subgraph {package}_package [{package}]")
        for node in nodes:
            if node.split("/")[0] == package:
                lines.append(f'    {_name(node)}["{node if node.endswith(".py") else node + "/"}"]')
        lines.append("  end")
    within = {(source, target) for source, target in counted if source.split("/")[0] == target.split("/")[0]}
    direct = {pair for pair in within if not pair[0].startswith("relay") or not _indirect(pair, within)}
    lines += [f"  {_name(source)} --> {_name(target)}" for source, target in sorted(direct)]
    return "\n".join([*lines, "  relay_package ==> hal_package", "  backends_package ==> hal_package", "```"])


def _indirect(pair: tuple[str, str], among: set[tuple[str, str]]) -> bool:
    """Whether other arrows lead from the first to the second as well."""
    source, target = pair
    seen: set[str] = set()
    waiting = [after for before, after in among if before == source and after != target]
    while waiting:
        node = waiting.pop()
        if node == target:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [after for before, after in among if before == node]
    return False


def _name(node: str) -> str:
    return node.removesuffix(".py").replace("/", "_")


def page_with(text: str, picture: str) -> str:
    """The page with that picture between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{picture}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the drawing, or check it. Returns the exit code."""
    root = Path(__file__).resolve().parents[1]
    page = root / PAGE
    text = page.read_text(encoding="utf-8")
    drawn = page_with(text, drawing(root))
    if "--check" in arguments:
        if drawn != text:
            print(f"{PAGE} shows another structure than the imports: run python docs/draw_architecture.py")
        return int(drawn != text)
    page.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
