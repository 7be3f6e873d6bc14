"""`relay sweep`: a table that is continued where it was, its figures beside those of single runs, and heat maps."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import relay
from relay.cli import main
from relay.simulation.sweeping.points import Sweep

MODEL = ["--layers", "2", "--hidden", "64", "--vocab", "100", "--seq", "32"]
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "vocabulary": 100, "seq": 32}


def sweep(out: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *MODEL, *words, "--out", str(out)])


def rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# relay sweep {")
    return list(csv.DictReader(lines[1:]))


def test_every_point_has_the_speed_the_energy_and_the_memory_of_a_run_of_its_own(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    result = sweep(table, "--over", "batch=2,4", "--over", "device=t4,rtx-4090", "--tokens", "1e9", "--no-maps")
    assert result.exit_code == 0, result.output
    found = rows(table)
    assert [(row["batch"], row["device"]) for row in found] == [
        ("2", "t4"), ("2", "rtx-4090"), ("4", "t4"), ("4", "rtx-4090"),
    ]  # fmt: skip
    for row in found:
        batch = int(row["batch"])
        alone = relay.simulate(**SIZES, batch=batch, microbatches=batch, device=row["device"])
        assert int(row["device_bytes"]) == alone.memory.device_total
        assert int(row["host_bytes"]) == alone.memory.host_total
        for figure, expected in (
            ("speed", alone.speed), ("joules_per_unit", alone.joules_per_token), ("days", alone.days(1e9)),
        ):  # fmt: skip
            for end in ("low", "middle", "high"):
                assert float(row[f"{figure}_{end}"]) == pytest.approx(getattr(expected, end), rel=1e-5)


def test_a_sweep_that_was_ended_goes_on_and_makes_no_point_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--over", "batch=1,2,4", "--over", "slots=1,2", "--no-maps"]
    whole = tmp_path / "whole.csv"
    assert sweep(whole, *words).exit_code == 0
    made: list[tuple[str, ...]] = []
    point = Sweep.point

    def counted(self: Sweep, texts: tuple[str, ...]) -> Any:
        made.append(texts)
        if len(made) == 3:
            raise KeyboardInterrupt
        return point(self, texts)

    monkeypatch.setattr(Sweep, "point", counted)
    table = tmp_path / "found.csv"
    assert sweep(table, *words).exit_code == 1
    with table.open("a") as file:
        file.write("4,1,fits,cut sh")  # as a process leaves it that ends while it writes
    assert sweep(table, *words).exit_code == 0
    assert table.read_text() == whole.read_text()
    assert len(made) == 7
    assert sweep(table, "--over", "batch=1,2,8", *words[2:]).exit_code == 0
    assert len(made) == 9
    assert len(rows(table)) == 8


def test_a_table_of_other_settings_or_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    words = ["--over", "batch=1,2", "--no-maps"]
    assert sweep(table, *words).exit_code == 0
    before = table.read_text()
    other = sweep(table, *words, "--slots", "1")
    assert other.exit_code == 2
    assert "slots is 2 there and 1 here" in other.stderr
    assert "swept is" in sweep(table, "--over", "slots=1,2", "--no-maps").stderr
    assert table.read_text() == before
    mine = tmp_path / "mine.csv"
    mine.write_text("a,b\n1,2\n")
    assert "is not the table of a sweep" in sweep(mine, *words).stderr
    assert mine.read_text() == "a,b\n1,2\n"


def test_a_description_in_a_file_is_among_the_settings(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    lines = ['kind = "device"', 'memory = "8GB"', 'bandwidth = "100GB/s"', 'peak_fp32 = "5TFLOPS"']
    lines += ['power_idle = "10W"', 'power_busy = "100W"', 'link = "pcie-4-x16"', 'host = "generic"']
    mine.write_text("\n".join(lines))
    table = tmp_path / "found.csv"
    words = ["--over", f"device={mine},t4", "--precision", "fp32", "--no-maps"]
    assert sweep(table, *words).exit_code == 0
    mine.write_text(mine.read_text().replace("5TFLOPS", "6TFLOPS"))
    assert "files is" in sweep(table, *words).stderr


def test_combinations_that_cannot_be_have_their_reason(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    words = ["--over", "precision=bf16,fp16", "--over", "device=v100-sxm2-16gb,rtx-4090", "--no-maps"]
    result = sweep(table, *words, "--json")
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["points"]
    assert [point["verdict"] for point in points] == ["impossible", "fits", "fits", "fits"]
    assert "does not compute in bf16" in points[0]["reason"]
    assert points[0]["speed"] is None
    small = sweep(tmp_path / "small.csv", "--over", "host-memory=1MB,1GB", "--over", "device=t4", "--no-maps")
    assert "host-memory=1MB, device=t4: does not fit: The host needs" in small.stdout
    none = sweep(tmp_path / "none.csv", "--over", "heads=3,5", "--no-maps")
    assert none.exit_code == 2
    assert "None of these combinations is possible" in none.stderr
    assert not (tmp_path / "none.csv").exists()


def test_maps_show_speed_energy_and_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = tmp_path / "found.csv"
    result = sweep(table, "--over", "batch=1,2", "--over", "slots=1,2", "--over", "stash=device,host", "--json")
    assert result.exit_code == 0, result.output
    maps = json.loads(result.stdout)["maps"]
    assert [Path(path).name for path in maps] == [
        f"found-{figure}.png" for figure in ("speed", "energy", "device-memory", "host-memory")
    ]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in maps)


def test_without_matplotlib_the_table_is_written_and_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    table = tmp_path / "found.csv"
    result = sweep(table, "--over", "batch=1,2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["maps"] == []
    assert len(rows(table)) == 2
    assert "pip install" in result.stderr


def test_a_figure_of_the_machine_is_swept_and_its_achieved_rates_follow(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    words = ["--device", "t4", "--stash", "host", "--over", "link.peak=2GB/s,16GB/s,64GB/s", "--no-maps"]
    assert sweep(table, *words).exit_code == 0
    speeds = [float(row["speed_middle"]) for row in rows(table)]
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--over", "colour=red"], "should be OPTION=A,B,..."),
        (["--over", "batch="], "should be OPTION=A,B,..."),
        (["--over", "batch=1,,2"], "should be OPTION=A,B,..."),
        (["--over", "batch=1,1"], "has a value twice"),
        (["--over", "batch=1", "--over", "batch=2"], "different options"),
        (["--over", "batch=1,2", "--batch", "4"], "batch: given as an option and swept too"),
        (["--over", "batch=0,1"], "0 is not in the range"),
        (["--over", "device=t4,rtx-9999"], "no device preset 'rtx-9999'"),
        (["--over", "link.down=5GB"], "is in bytes"),
        (["--over", "link.down=5B/s"], "out of bounds"),
        (["--device", "t4", "--over", "device.power_busy=1W"], "W while it is busy"),
        (["--over", "tokens=1,2"], "should be OPTION=A,B,..."),
        (["--over", f"batch={','.join(map(str, range(1, 400)))}", "--over",
          f"microbatches={','.join(map(str, range(1, 400)))}"], "a sweep takes at most"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_refused_before_anything_is_written(
    tmp_path: Path, words: list[str], message: str
) -> None:
    table = tmp_path / "found.csv"
    result = sweep(table, *words)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert not table.exists()
