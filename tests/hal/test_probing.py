"""Whatever a backend's probe does, it is one line of the list, and all other devices are listed."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from click.testing import CliRunner

import backends.cpu
from hal import probing, registry
from hal.errors import Unavailable
from relay import cli
from tests.support.stubs import misbehaving

CPU = EntryPoint("cpu", "backends.cpu:CpuBackend", probing.GROUP)
MODULE = misbehaving.__name__
TIMEOUT = 120.0  # of seconds; a process must import torch within it on a loaded machine
IN_THE_SAMPLE = ("ProbeEndsTheProcess", "ProbeCrashes", "ProbePrints", "WrittenForTheNext")
NEEDS_A_PROCESS = ("ProbeEndsTheProcess", "ProbeCrashes", "ProbeIsKilled", "ProbePrints")
SELF_TESTS = ("KernelDoesNothing", "HalfTheBits", "HalfTheElements", "RunRaises", "CompileRaises", "AllocationRaises")


def register(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points)


def list_beside_the_cpu(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> dict[str, str]:
    """The reasons in the list of devices by name, after checking that the CPU is in it."""
    register(monkeypatch, CPU, *points)
    probes = {probe.name: probe for probe in registry.devices(TIMEOUT)}
    assert probes["cpu"].available
    assert probes["cpu:discrete"].available
    return {name: probe.reason for name, probe in probes.items()}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=() if fault in IN_THE_SAMPLE else pytest.mark.exhaustive)
        for fault in misbehaving.PROBES
        if fault != "ProbeHangs"
    ],
)
@pytest.mark.sample("ProbeCrashes")
def test_a_third_partys_backend_that_misbehaves_is_one_line(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    reasons = list_beside_the_cpu(monkeypatch, EntryPoint(fault, f"{MODULE}:{fault}", probing.GROUP))
    assert misbehaving.PROBES[fault][1] in reasons[fault]


@pytest.mark.parametrize(
    "fault", [fault for fault in misbehaving.PROBES if fault not in (*NEEDS_A_PROCESS, "ProbeHangs")]
)
def test_a_backend_of_our_own_that_misbehaves_is_one_line(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(backends.cpu, fault, misbehaving.PROBES[fault][0], raising=False)
    point = EntryPoint(fault, f"backends.cpu:{fault}", probing.GROUP)
    reasons = list_beside_the_cpu(monkeypatch, point)
    assert misbehaving.PROBES[fault][1] in reasons[fault]


def test_a_backend_that_hangs_is_ended_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, which is probed in a thread, and a third party's. Nothing else is probed, which might take as long."""
    monkeypatch.setattr(backends.cpu, "ProbeHangs", misbehaving.PROBES["ProbeHangs"][0], raising=False)
    points = [
        EntryPoint("ours", "backends.cpu:ProbeHangs", probing.GROUP),
        EntryPoint("theirs", f"{MODULE}:ProbeHangs", probing.GROUP),
    ]
    register(monkeypatch, *points)
    found = {probe.name: probe.reason for probe in registry.devices(1.0)}
    assert found == dict.fromkeys(("ours", "theirs"), "its probe did not answer within 1 seconds")


def test_a_healthy_backend_of_a_third_party_is_listed_with_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, EntryPoint("healthy", f"{MODULE}:Healthy", probing.GROUP))
    (probe,) = registry.devices()
    assert (probe.name, probe.available, probe.reason) == ("healthy", True, "")
    assert probe.description == backends.cpu.describe_processor()
    assert probe.tags == {"native"}


@pytest.mark.parametrize("fault", SELF_TESTS)
def test_the_self_test_notices_a_device_that_computes_nothing_or_half(fault: str) -> None:
    backend = misbehaving.RUNS[fault][0]
    (probe,) = backend().probe()
    assert not probe.available
    assert misbehaving.RUNS[fault][1] in probe.reason


def test_two_packages_under_one_name_are_an_error_that_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("backends.numpy_device:NumpyBackend", f"{MODULE}:Healthy")
    twice = [EntryPoint("numpy", name, probing.GROUP) for name in names]
    reasons = list_beside_the_cpu(monkeypatch, *twice)
    assert all(name in reasons["numpy"] for name in names)
    for ask in (registry.open, registry.backend):
        with pytest.raises(Unavailable, match="2 packages register a backend called 'numpy'") as refused:
            ask("numpy")
        assert all(name in str(refused.value) for name in names)
    assert "numpy" in registry.backends()[1]


def test_one_package_found_twice_is_no_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cpu" in list_beside_the_cpu(monkeypatch, CPU)


def test_the_command_prints_the_others_and_exits_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, EntryPoint("ProbeCrashes", f"{MODULE}:ProbeCrashes", probing.GROUP), CPU)
    result = CliRunner().invoke(cli.main, ["devices", "--timeout", str(TIMEOUT)])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any(line.startswith("✓ cpu ") for line in lines)
    assert any(line.startswith("✗ ProbeCrashes") and "signal 11" in line for line in lines)
