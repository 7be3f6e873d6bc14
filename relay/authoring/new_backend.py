"""A new backend's package, written from the template under the author's own name.

The template is `examples/backend_template`, which a wheel carries beside this file; so does the guide. Not here: its
installation (`relay/cli/new_backend`). Invariant: the folder appears whole or not at all, and no file is overwritten.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from relay.errors import RelayError

TEMPLATE_NAME = "toychip"
LONGEST_NAME = 40


class CannotWriteBackend(RelayError):
    """The package cannot be written under that name or in that place."""


def write_backend(name: str, parent: Path, taken: frozenset[str] = frozenset()) -> Path:
    """Write the package of a new backend.

    Args:
        name: what the device is called on every command line: small letters, digits and underscores.
        parent: the folder that the package's folder, `NAME`, is made in.
        taken: names that other backends have.

    Returns:
        The folder of the package, ready for `pip install`.

    Raises:
        CannotWriteBackend: the name cannot be a backend's, or the folder exists.

    Example:
        >>> write_backend("mychip", Path("."))  # doctest: +SKIP
        PosixPath('mychip')
    """
    _check(name, taken)
    target = parent / name
    if target.exists():
        raise CannotWriteBackend(f"{target} exists. Remove it, or choose another name or another folder (--into).")
    if not parent.is_dir():
        raise CannotWriteBackend(f"There is no folder {parent}. Make it first.")
    template, guide = _shipped("examples/backend_template"), _shipped("docs/new-backend.md")
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as scratch:
        folder = Path(scratch) / name
        for file in sorted(template.rglob("*")):
            relative = file.relative_to(template)
            if file.suffix in (".md", ".py", ".toml") and not {"build", "__pycache__"} & set(relative.parts):
                copy = folder / _renamed(str(relative), name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(_renamed(file.read_text(encoding="utf-8"), name), encoding="utf-8")
        (folder / "GUIDE.md").write_text(_without_links(guide.read_text(encoding="utf-8")), encoding="utf-8")
        os.rename(folder, target)
    return target


def _check(name: str, taken: frozenset[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or len(name) > LONGEST_NAME:
        raise CannotWriteBackend(
            f"{name!r} cannot be a backend's name: it is the part of a device string before the colon, and the name of "
            f"a Python package. Use small letters, digits and underscores, a letter first, at most {LONGEST_NAME}."
        )
    if name in taken:
        raise CannotWriteBackend(f"A backend called {name!r} is installed already. Choose another name.")
    if f"{name}_backend" in sys.stdlib_module_names or name in ("hal", "backends", "relay"):
        raise CannotWriteBackend(f"{name!r} is the name of a package that Relay or Python has. Choose another name.")


def _shipped(path: str) -> Path:
    """A file or folder of the checkout: the wheel's copy of it, or itself where Relay runs from a checkout."""
    for root in (Path(__file__).parent / "shipped", Path(__file__).parents[2]):
        if (root / path).exists():
            return root / path
    raise CannotWriteBackend(f"This installation of Relay lacks {path}. Install the wheel or a checkout again.")


def _renamed(text: str, name: str) -> str:
    """The template's text, with the new backend's name in place of the toy's."""
    title = "".join(part.capitalize() for part in name.split("_"))
    for old, new in (
        ("an accelerator that does not exist: copy it, and make it yours", f"the accelerator {name}"),
        ("# A backend to copy", f"# The backend {name}"),
        ("the toy chip", f"the accelerator {name}"),
        ("The toy chip", f"The accelerator {name}"),
        ('"a toy"', f'"{name}, simulated in host memory"'),
        ("./examples/backend_template", f"./{name}"),
        ("[docs/new-backend.md](../../docs/new-backend.md)", "[GUIDE.md](GUIDE.md)"),
        (TEMPLATE_NAME, name),
    ):
        text = text.replace(old, new)
    return re.sub(r"\bToy(?=[A-Z])", title, text)


def _without_links(text: str) -> str:
    """The guide without links into the checkout, which a wheel does not have: their text alone."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", text)
