"""The backend `sim`: described hardware behind the HAL, on a virtual clock.

`sim` is a generic device that computes numbers; `sim:PRESET` is a device of the catalogue (`hal/spec/presets`, or a
file that ends in `.toml`). Options follow, separated by commas: `sim:v100-sxm2-16gb,order=late,poison=on`. They are
`order` (eager, late or random), `seed`, `poison` (on or off), `numerics` (on or off), `link`, `host` and `software`.
Here live the clock, the orders, the cost model and the device; the relay and its parameter server run on it unchanged,
and nothing of them is imitated here.

The registry imports it, by entry point, and tests may.
"""

from __future__ import annotations

from dataclasses import replace

from backends.simulator import known_gaps
from backends.simulator.calls import Options
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
        preset, parts, options = _parse(selector)
        try:
            machine = spec.machine(preset, parts.get("link"), parts.get("host"), parts.get("software", "eager"))
        except spec.SpecError as wrong:
            raise Unavailable(f"'sim:{selector}' cannot be opened: {wrong}") from wrong
        return SimulatedDevice(f"sim:{selector}" if selector else "sim", machine, capacity, options)

    def open_machine(self, machine: Machine, numerics: bool = True) -> VirtualDevice:
        return SimulatedDevice(f"sim:{machine.device.name}", machine, None, Options(numerics=numerics))


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
