"""A step of the build: a wheel carries the guide and the template of a backend, which stand outside the packages.

Not used at run time. setuptools reads this file by its path (`tool.setuptools.cmdclass` in pyproject.toml), so it
imports setuptools alone. Invariant: the copies in a wheel are the files of the checkout.
"""

import os
import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

ROOT = Path(__file__).parents[2]
SHIPPED = ("docs/new-backend.md", "examples/backend_template")


class BuildWithTemplate(build_py):  # type: ignore[misc]  # setuptools has no types
    """Builds the packages, and copies what `relay new-backend` needs beside this file."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "relay", "authoring", "shipped")
        for file in self.shipped_files():
            copy = target / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, copy)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self.shipped_files()]

    @staticmethod
    def shipped_files() -> list[str]:
        """The files to ship, relative to the checkout."""
        found = []
        for name in SHIPPED:
            path = ROOT / name
            files = [path] if path.is_file() else sorted(path.rglob("*"))
            found += [os.path.relpath(file, ROOT) for file in files if file.suffix in (".md", ".py", ".toml")]
        return found
