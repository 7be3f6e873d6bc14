"""Finding devices: what works is listed, what does not keeps its reason, and a choice is never silently changed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest
import torch

from hal import probing, registry
from hal.device import Backend, Device, Probe
from hal.errors import HalError, Unavailable

CPU = EntryPoint("cpu", "backends.cpu:CpuBackend", probing.GROUP)
HERE = __name__


class Shy(Backend):
    """Its probe raises, and opening lets a native error out."""

    name = "shy"

    def probe(self) -> list[Probe]:
        raise OSError("the driver is asleep")

    def open(self, selector: str, capacity: int | None = None) -> Device:
        raise OSError("the driver is asleep")


class Honest(Shy):
    """It knows that it is not here."""

    name = "honest"

    def probe(self) -> list[Probe]:
        return [Probe("honest:0", False, "no such card in this machine")]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        raise Unavailable("no such card in this machine")


class Explosive(Honest):
    def __init__(self) -> None:
        raise RuntimeError("found no licence")


class NoBackend:
    """Something else altogether."""


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, probing.GROUP)


def register(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    def entry_points(*, group: str) -> Sequence[EntryPoint]:
        assert group == "relay.backends"
        return points

    monkeypatch.setattr(registry, "entry_points", entry_points)


BROKEN = {
    "missing": (point("missing", "no_such_package_at_all:Backend"), "No module named 'no_such_package_at_all'"),
    "renamed": (point("renamed", "backends.cpu:GpuBackend"), "GpuBackend"),
    "explosive": (point("explosive", f"{HERE}:Explosive"), "found no licence"),
    "other": (point("other", f"{HERE}:NoBackend"), "not a hal.device.Backend"),
}


@pytest.mark.parametrize("selector", ["", " ", ",", ":", "cpu:"])
@pytest.mark.parametrize("family", sorted(registry.backends()[0]))
def test_a_device_string_that_ends_where_its_device_should_be_named_is_refused(family: str, selector: str) -> None:
    with pytest.raises(Unavailable, match="names no device after its last colon"):
        registry.open(f"{family}:{selector}")


def test_both_cpu_devices_are_listed_as_working() -> None:
    probes = {probe.name: probe for probe in registry.devices()}
    for name in ("cpu", "cpu:discrete"):
        assert probes[name].available
        assert probes[name].reason == ""
        assert probes[name].description
        assert probes[name].memory_bytes is None or probes[name].memory_bytes > 2**27
    assert "unified" in probes["cpu"].tags
    assert "unified" not in probes["cpu:discrete"].tags


def test_every_device_listed_as_working_opens_by_its_name() -> None:
    for probe in registry.devices():
        if probe.available:
            device = registry.open(probe.name)
            assert device.info.name == probe.name
            device.close()


def test_devices_are_listed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, BROKEN["missing"][0], point("honest", f"{HERE}:Honest"), CPU)
    assert [probe.name for probe in registry.devices()] == ["cpu", "cpu:discrete", "honest:0", "missing"]


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.sample("renamed", "other")
def test_a_backend_that_does_not_load_keeps_its_reason_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    broken, reason = BROKEN[name]
    register(monkeypatch, broken, CPU)
    probes = {probe.name: probe for probe in registry.devices()}
    assert not probes[name].available
    assert reason in probes[name].reason
    assert probes["cpu"].available
    device = registry.open("cpu")
    device.alloc(64).free()
    device.close()


@pytest.mark.parametrize("name", BROKEN)
def test_choosing_a_backend_that_does_not_load_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    broken, reason = BROKEN[name]
    register(monkeypatch, broken, CPU)
    with pytest.raises(Unavailable, match="does not load") as caught:
        registry.open(f"{name}:0")
    assert reason in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_probe_that_raises_is_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, point("shy", f"{HERE}:Shy"), CPU)
    probes = {probe.name: probe for probe in registry.devices()}
    assert not probes["shy"].available
    assert "OSError: the driver is asleep" in probes["shy"].reason
    assert probes["cpu"].available


def test_a_reason_found_by_probing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, point("honest", f"{HERE}:Honest"))
    (probe,) = registry.devices()
    assert (probe.available, probe.reason) == (False, "no such card in this machine")
    with pytest.raises(Unavailable, match="no such card"):
        registry.open("honest:0")


def test_a_native_error_in_opening_becomes_unavailable_and_stays_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, point("shy", f"{HERE}:Shy"), CPU)
    with pytest.raises(Unavailable, match=r"shy:1.*the driver is asleep") as caught:
        registry.open("shy:1")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("name", ["gpu", "CPU", "", ":", "tpu:0", " cpu"])
def test_an_unknown_backend_is_an_error_that_says_what_there_is(name: str) -> None:
    with pytest.raises(Unavailable) as caught:
        registry.open(name)
    assert repr(name) in str(caught.value)
    assert "cpu" in str(caught.value).partition("Backends here:")[2]
    assert isinstance(caught.value, HalError)


def test_an_unknown_cpu_is_an_error_that_says_which_there_are() -> None:
    with pytest.raises(Unavailable, match=r"'cpu:7'.*'cpu' or 'cpu:discrete'"):
        registry.open("cpu:7")


def test_with_nothing_installed_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    assert registry.devices() == []
    with pytest.raises(Unavailable, match="is the distribution installed"):
        registry.open("cpu")


def test_the_capacity_reaches_the_device() -> None:
    device = registry.open("cpu", capacity=4096)
    assert device.memory().capacity == 4096
    assert torch.float32 in device.info.storage
    device.close()
