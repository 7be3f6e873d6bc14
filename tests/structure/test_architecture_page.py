"""The questions at the end of the page on architecture lead to files that exist, and to names that these define."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ANSWERS = re.findall(r"^\| (.+\?) \| (.+) \|$", PAGE.partition("## Where is")[2], flags=re.MULTILINE)


def test_it_answers_where_things_are_and_where_new_ones_would_go() -> None:
    asked = " ".join(question for question, _ in ANSWERS)
    for what in ("checkpoint's format", "is loaded", "frees a slot", "loss weighed", "waits for whom at the turn"):
        assert what in asked
    for new in ("optimizer", "op", "device", "option", "command"):
        assert f"would a new {new} go" in asked


@pytest.mark.parametrize(("question", "answer"), ANSWERS, ids=[question for question, _ in ANSWERS])
def test_an_answer_names_files_that_exist_and_what_they_define(question: str, answer: str) -> None:
    files: list[Path] = []
    names: list[str] = []
    for word in re.findall(r"`([^`]+)`", answer):
        beside = files[-1].parent / word if files else ROOT / word
        found = [path for path in (ROOT / word, beside) if path.exists()]
        assert found or re.fullmatch(r"[A-Za-z_.]+", word), f"{question} There is no {word}"
        assert found or not word.endswith(".py"), f"{question} There is no {word}"
        (files.append(found[0]) if found else names.append(word))
    assert files
    code = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix == ".py")
    for name in (part for word in names for part in word.split(".")):
        assert re.search(rf"\b(class|def) {name}\b", code), f"{question} None of these files defines {name}"
