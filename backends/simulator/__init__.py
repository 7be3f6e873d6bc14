"""The backend `sim`: described hardware behind the HAL, on a virtual clock.

`sim` is a generic device that computes numbers; `sim:PRESET` is a device of the catalogue (`hal/spec/presets`, or a
file that ends in `.toml`). Options follow, separated by commas: `sim:v100-sxm2-16gb,order=late,poison=on`. They are
`order` (eager, late or random), `seed`, `poison` (on or off), `numerics` (on or off), `link`, `host` and `software`.
Here live the clock, the orders, the cost model and the device; the relay and its parameter server run on it unchanged,
and nothing of them is imitated here.

The registry imports it, by entry point, and tests may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from backends.simulator import known_gaps
from backends.simulator.calls import Options, SimulatedCalls
from backends.simulator.device import SimulatedDevice
from hal import spec
from hal.device import Device, Probe
from hal.errors import Unavailable
from hal.kit.self_test import self_test
from hal.known_gaps import KnownGap
from hal.spec import Machine
from hal.spec.timeline import VirtualBackend, VirtualDevice

DEFAULT = "generic"
_SWITCH = {"on": True, "off": False}


class SimulatorBackend(VirtualBackend):
    """`sim` and `sim:PRESET[,option=value...]`."""

    name = "sim"

    @property
    def known_gaps(self) -> tuple[KnownGap, ...]:  # type: ignore[override]
        """Of the presets; read from the catalogue when they are asked for."""
        return known_gaps.all_known_gaps()

    def probe(self) -> list[Probe]:
        tested = self_test(self, "sim")
        names = ", ".join(name for name in spec.presets("device") if name != DEFAULT)
        note = f"sim:PRESET, with one of {names}"
        return [replace(tested, notes=(note,)) if tested.available else tested]

    def open(self, selector: str, capacity: int | None = None) -> Device:
        machine, options = _machine(selector)
        return SimulatedDevice(f"sim:{selector}" if selector else "sim", machine, capacity, options)

    def open_together(self, selectors: Sequence[str], capacity: int | None = None) -> list[VirtualDevice]:
        parsed = [_machine(selector) for selector in selectors]
        for selector, (_, options) in zip(selectors, parsed, strict=True):
            if options != parsed[0][1]:
                raise Unavailable(
                    f"'sim:{selector}' and 'sim:{selectors[0]}' cannot work together: devices on one clock need the "
                    "same order, seed, poison and numerics. Give all of them the same."
                )
        names = [f"sim:{selector}" if selector else "sim" for selector in selectors]
        return _together(names, [machine for machine, _ in parsed], capacity, parsed[0][1], False)

    def open_machines(
        self, machines: Sequence[Machine], numerics: bool = True, one_link: bool = False
    ) -> list[VirtualDevice]:
        names = [f"sim:{machine.device.name}" for machine in machines]
        return _together(names, machines, None, Options(numerics=numerics), one_link)


def _together(
    names: Sequence[str], machines: Sequence[Machine], capacity: int | None, options: Options, one_link: bool
) -> list[VirtualDevice]:
    """Devices on the host of the first one, with one clock."""
    calls = SimulatedCalls(names, machines, options, one_link)
    return [
        SimulatedDevice(name, machine, capacity, options, calls, number)
        for number, (name, machine) in enumerate(zip(names, machines, strict=True))
    ]


def _machine(selector: str) -> tuple[Machine, Options]:
    """The machine and the options of a selector. Raises Unavailable."""
    preset, parts, options = _parse(selector)
    try:
        machine = spec.machine(preset, parts.get("link"), parts.get("host"), parts.get("software", "eager"))
    except spec.SpecError as wrong:
        raise Unavailable(f"'sim:{selector}' cannot be opened: {wrong}") from wrong
    return machine, options


def _parse(selector: str) -> tuple[str, dict[str, str], Options]:
    """The preset, the names of other parts, and the options of a selector."""
    preset = DEFAULT
    parts: dict[str, str] = {}
    chosen: dict[str, str] = {}
    for position, word in enumerate(filter(None, selector.split(","))):
        key, equals, value = word.partition("=")
        if not equals and position == 0:
            preset = word
        elif key in ("link", "host", "software") and value:
            parts[key] = value
        elif key in ("order", "seed", "poison", "numerics") and value:
            chosen[key] = value
        else:
            raise Unavailable(
                f"'sim:{selector}': {word!r} is no option. Expected order=, seed=, poison=, numerics=, link=, host= or "
                "software=, each with a value, after the preset."
            )
    try:
        options = Options(
            numerics=_SWITCH[chosen.get("numerics", "on")],
            order=chosen.get("order", "eager"),
            seed=int(chosen.get("seed", "0")),
            poison=_SWITCH[chosen.get("poison", "off")],
        )
        if options.order not in ("eager", "late", "random"):
            raise ValueError(options.order)
    except (KeyError, ValueError) as wrong:
        raise Unavailable(
            f"'sim:{selector}': {wrong} is not a value there. order is eager, late or random; seed a whole number; "
            "poison and numerics are on or off."
        ) from wrong
    return preset, parts, options
