"""The guide for writers of backends does what it says: its blocks are run in order, and its links lead somewhere.

A block whose fence names a file is that file; `change` puts the block in place of the line that it begins with.
"""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.processes import packages

GUIDE = packages.ROOT / "docs" / "new-backend.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\S*) ?(.*)\n((?:.*\n)*?)^```$", TEXT, flags=re.MULTILINE)


def change(text: str, block: str) -> str:
    """Put a block in place of the line with the same beginning: all of it, or what comes before an equals sign."""
    start = block.splitlines()[0].partition(" = ")[0]
    found = [line for line in text.splitlines() if line.partition(" = ")[0] == start]
    assert len(found) == 1, f"{start!r} is there {len(found)} times"
    return text.replace(found[0], block.rstrip("\n"))


TESTED_AT_THE_END = (
    'relay conformance mychip --only "test_opening or test_memory"',
    'relay conformance mychip --only "test_transfers or test_order or test_ownership"',
    'relay conformance mychip --only "test_dtypes or test_programs or test_randomness or test_together"',
    "relay conformance mychip --only test_training",
)
"""Lines of the guide that `make test` leaves out, since one run at the end tests some of the same files."""
WHOLE_SUITE = "relay conformance mychip"
A_PART = [*shlex.split(WHOLE_SUITE), "--only", "test_memory or test_order or test_programs or (test_training and gpt)"]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_guide_can_be_followed_from_the_first_block_to_the_last(tmp_path: Path, whole: bool) -> None:
    """`make test` runs a part of the suite once instead of all its parts and the whole."""
    site, script = tmp_path / "site", ""
    for language, title, content in BLOCKS:
        if title:
            file = tmp_path / title.removeprefix("change ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(change(file.read_text(), content) if title.startswith("change ") else content)
        elif language == "sh":
            for line in content.splitlines():
                if not whole and line in TESTED_AT_THE_END:
                    continue
                words = A_PART if line == WHOLE_SUITE and not whole else shlex.split(line)
                assert packages.run(words, tmp_path, site) or line.startswith("pip ")
        else:
            assert language == "python"
            script += content
    printed = packages.run([sys.executable, "-c", script], tmp_path, site)
    assert "aten.native_layer_norm.default" in printed
    assert printed.endswith("as PyTorch has it, in float64\n")


def test_every_block_is_one_that_the_test_knows() -> None:
    assert set(TESTED_AT_THE_END) | {WHOLE_SUITE} <= set(TEXT.splitlines())
    assert TEXT.count("```") == 2 * len(BLOCKS)
    assert {language for language, _, _ in BLOCKS} == {"python", "sh", "toml"}
    assert all(title for language, title, _ in BLOCKS if language == "toml")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (GUIDE.parent / link).exists()
