"""The catalogue is complete, in the right units and within bounds; slips of the pen are errors."""

from pathlib import Path

import pytest

from hal import registry, spec
from hal.spec import COLUMNS, SpecError, load, machine, parse_spec, presets
from hal.spec.units import BYTE_RATE, BYTES, FLOPS, SECONDS, WATTS, parse_quantity

LINK = 'kind = "link"\npeak = "31GB/s"\ndown = "25GB/s"\nup = "25GB/s"\n'


def test_there_are_thirty_devices_and_each_opens_with_its_link_and_host() -> None:
    assert len(presets("device")) >= 30
    for name in presets("device"):
        device = registry.open(f"sim:{name}")
        assert device.info.memory is not None
        assert device.info.memory > 1e9
        device.close()


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_cell_of_the_catalogue_says_where_it_comes_from(kind: str) -> None:
    for described in presets(kind).values():
        for name, cell in described.cells.items():
            assert cell.source, f"{described.name}: {name}"
            assert not (cell.verified and cell.source.startswith("assumed")), f"{described.name}: {name}"


def test_files_are_named_as_what_they_describe() -> None:
    for path in spec.PRESETS.glob("*.toml"):
        described = parse_spec(path.read_text(encoding="utf-8"), path.name)
        assert path.stem == f"{described.kind}-{described.name}"


@pytest.mark.parametrize(
    ("name", "figure", "value"),
    [
        ("v100-sxm2-16gb", "peak_fp16", 125e12),
        ("v100-sxm2-16gb", "memory", 16e9),
        ("h200-sxm", "bandwidth", 4.8e12),
        ("rtx-4090", "peak_bf16", 165.2e12),
        ("t4", "power_busy", 70.0),
        ("tpu-v3", "memory", 32 * 2**30),
        ("mi300x", "achieved_bf16", 668e12),
    ],
)
def test_figures_are_those_of_the_sources_in_si_units(name: str, figure: str, value: float) -> None:
    assert load("device", name)[figure] == value


def test_peaks_are_dense_and_no_device_is_above_four_teraflops_a_watt() -> None:
    for described in presets("device").values():
        peaks = [described[f"peak_{kind}"] for kind in ("fp16", "bf16") if described.has(f"peak_{kind}")]
        if peaks:
            assert max(peaks) / described["power_busy"] <= 4e12


def test_nvlink_c2c_does_not_deliver_both_directions() -> None:
    link = load("link", "nvlink-c2c")
    assert link["both"] < link["down"] + link["up"]
    assert load("link", "pcie-3-x16")["both"] == 24e9


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("16GB", BYTES, 16e9),
        ("16GiB", BYTES, 16 * 2**30),
        ("900GB/s", BYTE_RATE, 9e11),
        ("125TFLOPS", FLOPS, 1.25e14),
        ("3.5us", SECONDS, 3.5e-6),
        ("0.3kW", WATTS, 300.0),
    ],
)
def test_quantities_mean_what_they_say(text: str, dimension: str, value: float) -> None:
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "dimension"),
    [("16GB", BYTE_RATE), ("900GB/s", BYTES), ("16", BYTES), ("3 parsecs", SECONDS), ("1TW", FLOPS)],
)
def test_a_quantity_in_another_unit_is_an_error(text: str, dimension: str) -> None:
    with pytest.raises(ValueError, match="Expected"):
        parse_quantity(text, dimension)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LINK.replace('"31GB/s"', '"31GB"'), "peak: '31GB' is in bytes"),
        (LINK.replace('"25GB/s"', '"25PB/s"'), "out of bounds"),
        (LINK.replace('"25GB/s"', '"32GB/s"'), "is above peak"),
        (LINK.replace("up", "upwards"), "the key 'upwards' is unknown"),
        (LINK.replace('up = "25GB/s"\n', ""), "up: expected a value such as .* but it is missing"),
        (LINK.replace('"link"', '"cable"'), "kind: expected one of device, link, host, received 'cable'"),
        (
            LINK + 'latency = { value = "9us", origin = "x" }\n',
            "latency: the key 'origin' is unknown. Known keys: value, source, verified",
        ),
        ("kind =", "not valid TOML"),
    ],
)
def test_a_file_with_a_slip_in_it_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(text, "mine.toml")


def test_a_file_of_ones_own_takes_a_presets_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(LINK, encoding="utf-8")
    described = machine("rtx-4090", link=str(path))
    assert described.link["down"] == 25e9
    assert described.link.name == "mine"
    with pytest.raises(SpecError, match="describes a link; a host was asked for"):
        machine("rtx-4090", host=str(path))
    with pytest.raises(SpecError, match="cannot be read"):
        load("device", str(tmp_path / "none.toml"))


def test_an_unknown_preset_is_an_error_with_what_was_meant() -> None:
    with pytest.raises(SpecError, match="Did you mean v100-"):
        load("device", "v100-sxm-16gb")
