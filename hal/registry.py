"""Finding backends and opening devices by name.

Backends register under the entry point group `relay.backends`; no backend is named here. Invariant: a device that was
chosen and cannot be opened is an error with its reason, and never replaced by another device.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from hal.device import Backend, Device, Probe
from hal.errors import HalError, Unavailable

GROUP = "relay.backends"


def backends() -> tuple[dict[str, Backend], dict[str, str]]:
    """The registered backends by name, and the reasons of those that cannot be imported, by name."""
    found: dict[str, Backend] = {}
    broken: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            found[point.name] = _load(point)
        except Exception as failure:  # a third party's package may fail in any way; the others still work
            broken[point.name] = f"its package does not load: {type(failure).__name__}: {failure}"
    return found, broken


def open(name: str, capacity: int | None = None) -> Device:
    """Open a device.

    Args:
        name: the device string, such as `cpu`, `cuda:0` or `sim:t4`: a backend, and after a colon its selector.
        capacity: the limit of the device's memory in bytes; None for no limit.

    Raises:
        Unavailable: there is no such backend or device; the message lists those that there are.
    """
    family, _, selector = name.partition(":")
    points = {point.name: point for point in entry_points(group=GROUP)}
    if family not in points:
        known = ", ".join(sorted(points)) or "none: is the distribution installed?"
        raise Unavailable(f"There is no device {name!r}: no backend is called {family!r}. Backends here: {known}.")
    if name.rstrip(" ,").endswith(":"):
        raise Unavailable(f"{name!r} names no device after its last colon: name one, or leave the colon out.")
    try:
        backend = _load(points[family])
    except Exception as failure:
        raise Unavailable(f"The backend {family!r} does not load: {type(failure).__name__}: {failure}") from failure
    try:
        return backend.open(selector, capacity)
    except HalError:
        raise
    except Exception as failure:  # a third party's backend may let a native error out
        raise Unavailable(f"Opening {name!r} failed: {type(failure).__name__}: {failure}") from failure


def backend(family: str) -> Backend:
    """The backend of that name. Raises Unavailable if there is none."""
    for point in entry_points(group=GROUP):
        if point.name == family:
            return _load(point)
    raise Unavailable(f"No backend is called {family!r} here: is the distribution installed?")


def devices() -> list[Probe]:
    """The probes of all backends, sorted by name: each device with its self-test, or the reason why it is missing."""
    found, broken = backends()
    probes = [Probe(name, False, reason) for name, reason in broken.items()]
    for name, backend in found.items():
        try:
            probes += backend.probe()
        except Exception as failure:  # contract 10 forbids it; a third party's backend may break it
            probes.append(Probe(name, False, f"its probe raised {type(failure).__name__}: {failure}"))
    return sorted(probes, key=lambda probe: probe.name)


def _load(point: EntryPoint) -> Backend:
    backend = point.load()()
    if not isinstance(backend, Backend):
        raise HalError(f"entry point {point.name!r} gives a {type(backend).__name__}, not a hal.device.Backend")
    return backend
