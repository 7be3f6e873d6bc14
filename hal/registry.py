"""Finding backends and opening devices by name.

Backends register under the entry point group `relay.backends`; no backend is named here. Probing is in `hal.probing`.
Invariant: a device that was chosen and cannot be opened is an error with its reason; no other device replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from hal import probing
from hal.device import Backend, Device, Probe
from hal.errors import HalError, Unavailable
from hal.probing import GROUP
from hal.spec.timeline import VirtualBackend


def backends() -> tuple[dict[str, Backend], dict[str, str]]:
    """The registered backends by name, and the reasons of those that cannot be used, by name."""
    found: dict[str, Backend] = {}
    broken: dict[str, str] = {}
    for name, points in _points().items():
        try:
            found[name] = _backend(name, points)
        except HalError as failure:
            broken[name] = str(failure)
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
    points = _points()
    if family not in points:
        known = ", ".join(points) or "none: is the distribution installed?"
        raise Unavailable(f"There is no device {name!r}: no backend is called {family!r}. Backends here: {known}.")
    if name.rstrip(" ,").endswith(":"):
        raise Unavailable(f"{name!r} names no device after its last colon: name one, or leave the colon out.")
    opener = _backend(family, points[family])
    try:
        device = opener.open(selector, capacity)
    except HalError:
        raise
    except (Exception, SystemExit) as failure:  # a third party's backend may let a native error out
        raise Unavailable(f"Opening {name!r} failed: {type(failure).__name__}: {failure}") from failure
    if not isinstance(device, Device):
        raise Unavailable(f"Opening {name!r} gave {device!r}. The backend {family!r} must give a hal.device.Device.")
    if device.info.name.partition(":")[0] != family:
        device.close()
        raise Unavailable(f"Opening {name!r} gave a device called {device.info.name!r}, which is another backend's.")
    return device


def open_together(names: Sequence[str], capacity: int | None = None) -> list[Device]:
    """Open devices that work together, each with that capacity. Devices on a virtual clock share one.

    Raises Unavailable for one that is not here; the others are closed then.
    """
    families = {name.partition(":")[0] for name in names}
    family = families.pop() if len(families) == 1 else ""
    if len(names) > 1 and family in _points():
        virtual = backend(family)
        if isinstance(virtual, VirtualBackend):
            return list(virtual.open_together([name.partition(":")[2] for name in names], capacity))
    opened: list[Device] = []
    try:
        for name in names:
            opened.append(open(name, capacity))
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened


def names_in(text: str) -> list[str]:
    """The device strings in a text that joins them by commas, such as `cuda:0,cuda:1`.

    A device string may have commas of its own (`sim:t4,order=late`): a new one begins with the name of a backend.
    """
    families = _points()
    names: list[str] = []
    for word in text.split(","):
        if names and word.strip().partition(":")[0] not in families:
            names[-1] += f",{word}"
        else:
            names.append(word.strip())
    return names


def backend(family: str) -> Backend:
    """The backend of that name. Raises Unavailable if there is none."""
    points = _points()
    if family not in points:
        raise Unavailable(f"No backend is called {family!r} here: is the distribution installed?")
    return _backend(family, points[family])


def devices(timeout: float = probing.TIMEOUT) -> list[Probe]:
    """The probes of all backends, sorted by name: each device with its self-test, or the reason why it is missing.

    Args:
        timeout: seconds after which a backend that does not answer is reported so.
    """
    return sorted((probe for probes in probe_each(timeout) for probe in probes), key=lambda probe: probe.name)


def probe_each(timeout: float = probing.TIMEOUT) -> Iterator[list[Probe]]:
    """The probes of one backend after the other, as they answer; see `devices`."""
    here: dict[str, probing.Load] = {}
    elsewhere: dict[str, str] = {}
    for name, points in _points().items():
        if len(points) > 1:
            yield [Probe(name, False, _duplicates(name, points))]
        elif _is_probed_here(points[0]):
            here[name] = partial(probing.load, points[0])
        else:
            elsewhere[name] = points[0].value
    yield from probing.probe_all(here, elsewhere, timeout)


def _points() -> dict[str, list[EntryPoint]]:
    """All entry points, by name and sorted; more than one for a name if packages collide."""
    points: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        same = points.setdefault(point.name, [])
        if point.value not in [other.value for other in same]:  # one package, found in two folders of sys.path
            same.append(point)
    return points


def _backend(name: str, points: list[EntryPoint]) -> Backend:
    if len(points) > 1:
        raise Unavailable(f"The backend {name!r} cannot be used: {_duplicates(name, points)}.")
    try:
        return probing.load(points[0])
    except (Exception, SystemExit) as failure:  # a third party's package may fail in any way; the others still work
        raise Unavailable(f"The backend {name!r} does not load: {type(failure).__name__}: {failure}") from failure


def _duplicates(name: str, points: list[EntryPoint]) -> str:
    packages = [f"{point.value} (package {point.dist.name})" if point.dist else point.value for point in points]
    return f"{len(points)} packages register a backend called {name!r}: {', '.join(packages)}. Uninstall all but one"


def _is_probed_here(point: EntryPoint) -> bool:
    """Whether it comes with this distribution and keeps contract 10, or no other process could load it."""
    return point.value.partition(":")[0].partition(".")[0] in ("backends", "__main__")
