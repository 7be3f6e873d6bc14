"""Opening the devices of a run, which work together if they are several.

What one device is opened by is in `hal.registry`. Invariant: devices that cannot work together are refused, with the
reason, before any memory is taken; those that were opened by then are closed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hal import registry
from hal.device import Device, DeviceInfo
from hal.errors import HalError, Unavailable
from relay.capture import Lowering, graphs_for

logger = logging.getLogger("relay")


def names_of(devices: str | Sequence[str]) -> list[str]:
    """The device strings of the option `device`."""
    return [devices] if isinstance(devices, str) else list(devices)


def open_devices(devices: str | Sequence[str], capacity: int | None) -> list[Device]:
    """Open the devices of a run, each with that capacity.

    Raises ValueError for devices that cannot work together, and Unavailable for one that is not here.
    """
    names = names_of(devices)
    for name in names:
        if names.count(name) > 1 and name != "cpu:discrete" and name.partition(":")[0] != "sim":
            raise ValueError(
                f"device={names!r} names {name!r} {names.count(name)} times, and there is one of it. Name it once, or "
                "name other devices beside it."
            )
    opened = [registry.open(names[0], capacity)] if len(names) == 1 else registry.open_together(names, capacity)
    try:
        refuse_unified(names, [device.info for device in opened])
    except ValueError:
        for device in opened:
            device.close()
        raise
    return opened


def open_again(devices: str | Sequence[str], capacity: int | None) -> tuple[list[Device], list[int]]:
    """Open the devices of a run again after one was lost. Of several, one that cannot be opened is left out.

    Returns those that are open, and their numbers among `devices`. Raises Unavailable if none can be opened.
    """
    names = names_of(devices)
    try:
        return open_devices(names, capacity), list(range(len(names)))
    except HalError:
        if len(names) == 1:
            raise
    kept = []
    for number, name in enumerate(names):
        try:
            registry.open(name, capacity).close()
            kept.append(number)
        except HalError as failure:
            logger.warning("Device %d (%s) cannot be opened again and is left out: %s", number, name, failure)
    if not kept:
        raise Unavailable(f"None of the devices {names!r} can be opened again. Load the last checkpoint elsewhere.")
    return open_devices([names[number] for number in kept], capacity), kept


def refuse_unified(names: Sequence[str], infos: Sequence[DeviceInfo]) -> None:
    """Raise ValueError for a device that works in host memory beside others."""
    unified = next((name for name, info in zip(names, infos, strict=True) if info.unified), None)
    if len(names) > 1 and unified is not None:
        alone = "" if unified != "cpu" else " ('cpu:discrete' is the CPU behind a link)"
        raise ValueError(
            f"device={list(names)!r}: {unified!r} works in host memory, so it cannot take layers in turn with other "
            f"devices: there is no link that a second one would relieve. Leave it out, or use it alone{alone}."
        )


def common_graphs(infos: Sequence[DeviceInfo]) -> tuple[Lowering, torch.device]:
    """The lowering that all of these devices take, and the device that its graphs are traced for.

    Devices of several kinds take core graphs, unless PyTorch runs the same native ones on all of them.
    """
    wanted = [graphs_for(info) for info in infos]
    first = wanted[0]
    if all(graphs == first for graphs in wanted):
        return first
    core = next((graphs for graphs in wanted if graphs[0] is Lowering.CORE), None)
    return core or (Lowering.CORE, torch.device("cpu"))
