"""The page of decisions: numbered by area, each with its cost and with a file that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
AREAS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
ENTRY = re.compile(r"^\*\*(?P<area>[A-Z][\w -]*?) (?P<number>\d+)\. .+\*\*$")


def entries(area: str) -> list[list[str]]:
    """The entries of an area, each as its lines."""
    return [block.splitlines() for block in area.split("\n\n")[1:] if block.strip()]


def test_entries_are_numbered_from_one_within_their_area() -> None:
    assert len(AREAS) > 5
    for area in AREAS:
        name = area.splitlines()[0]
        titles = [ENTRY.match(lines[0]) for lines in entries(area)]
        assert all(titles), f"an entry of {name} does not begin with **{name} NUMBER. Title**"
        found = [(title["area"], int(title["number"])) for title in titles if title]
        assert found == [(name, number) for number in range(1, len(found) + 1)]


def test_each_entry_has_three_lines_and_names_its_cost_and_a_file_that_exists() -> None:
    for area in AREAS:
        for lines in entries(area):
            assert len(lines) == 3, lines[0]
            cost = re.fullmatch(r"Cost: .+ \(`(.+)`\)", lines[2])
            assert cost, f"{lines[0]}: the last line is Cost: ... (`file`)"
            assert (ROOT / cost[1]).is_file(), f"{lines[0]}: there is no {cost[1]}"
