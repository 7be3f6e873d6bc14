"""Every wait of the slot, the stash, the server and the schedule is needed: without it some order gives other numbers.

Each mutation takes one wait out of the source of a function, in this process alone, and must be caught by one of the
scenarios under one of the orders.

Waits that nothing can notice are not here. Kernels run on one queue, so a writer of an activation comes after its
readers anyway, and an activation that goes out after those that came in before its kernel; loads run on one queue, so
they come after the gradients' seeds. Between devices, which have queues of their own, the chain of a micro-batch is
the reason: each visit here reads what the one before it wrote. A value that comes from another device was computed
after all visits that used what it replaces, so it need not wait for them, neither on the device that fetches it nor,
for those who fetched, on the host. A device that writes a value again may do so while the one before still goes out
only if no other device has waited for that one, and then it is sent anew. Stash and schedule have these waits all the
same: whoever gives kernels or loads a second queue, or has values with other uses, must not have to remember them.
"""

import __future__

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

import relay.eps.server
import relay.eps.updates.updater
from hal.slot import device_slot
from relay.runtime import run_step, schedule
from relay.runtime.stash import memory as stash
from tests.relay.runtime.test_adversaries import ORDERS, UNIFIED
from tests.support.scenarios import differences


@dataclass(frozen=True)
class Mutation:
    """`owner.function` (or a module's, where there is no owner) with `text` replaced, and the scenario that notices, on
    a device with a link, `several` of them, or `unified`."""

    module: ModuleType
    owner: str
    function: str
    text: str
    without: str
    scenario: str = "activations on the host, one slot"
    unified: bool = False
    several: int = 1


DEFERRED = "clipped, activations on the host"
ON_DEVICES: dict[str, Any] = {"scenario": "activations on the device"}
MUTATIONS = {
    # the slot
    "a load for the updates of its layer": Mutation(
        device_slot, "DeviceSlot", "load", "[*wait, *self._loaded", "[*self._loaded", DEFERRED
    ),
    "a load for the kernels that read what it overwrites": Mutation(
        device_slot, "DeviceSlot", "load", ", *self._readers]", "]"
    ),
    "a kernel for its layer's load": Mutation(device_slot, "DeviceSlot", "run", "[*self._loaded, *wait]", "[*wait]"),
    "a kernel for what its caller says": Mutation(
        device_slot, "DeviceSlot", "run", "[*self._loaded, *wait]", "[*self._loaded]"
    ),
    "a kernel for the drain of the gradients before": Mutation(
        device_slot, "DeviceSlot", "run", "waits += self.region.drained", "pass"
    ),
    "a drain for the kernels that write the gradients": Mutation(
        device_slot, "DeviceSlot", "drain", "*self.region.writers, *self._readers, ", ""
    ),
    "a drain for what its caller says": Mutation(
        device_slot, "DeviceSlot", "drain", ", *wait]", "]", "one slot, one micro-batch"
    ),
    "buffers sent home for the kernels that change them": Mutation(
        device_slot, "DeviceSlot", "send", "*self._readers", "", "running statistics"
    ),
    "a load for buffers on their way home": Mutation(
        device_slot, "DeviceSlot", "send", "self._readers += sent", "pass", "running statistics"
    ),
    "gradients in place for who reads them": Mutation(
        device_slot, "DeviceSlot", "hold_gradients", "list(events)", "[]", unified=True
    ),
    # the stash
    "a reader of an activation for its writer": Mutation(
        stash, "Stash", "_access_copy", "if writes else copy.written", "if writes else []", "activations on the device"
    ),
    "an activation that comes in for the one that goes out": Mutation(
        stash, "Stash", "access", "[*cell.written, *entry.free_after]", "[*entry.free_after]"
    ),
    "an activation that comes in for whoever has its place": Mutation(
        stash, "Stash", "access", "[*cell.written, *entry.free_after]", "[*cell.written]"
    ),
    "a kernel for the activation to come in": Mutation(stash, "Stash", "access", "[arrived]", "[]"),
    "a kernel for who has the place that it writes to": Mutation(
        stash, "Stash", "access", "waits = entry.free_after", "waits = []"
    ),
    "an activation that goes out for its kernel": Mutation(
        stash, "Access", "_send", "[*after, *cell.written", "[*cell.written"
    ),
    "a place of the ring for the activation that goes out": Mutation(
        stash, "Access", "finish", "free_after = [self._send([event])]", "free_after = [self._send([event])][1:]"
    ),
    "a place of the ring for the kernel that reads it": Mutation(
        stash, "Access", "finish", "free_after = [event]", "free_after = []"
    ),
    "a note of who has written": Mutation(
        stash,
        "Access",
        "finish",
        "copy.written, copy.readers = [event], []",
        "pass",
        "activations on the device",
    ),
    "a note of who has streamed out": Mutation(
        stash, "Access", "_send", "cell.written, cell.readers = [sent], []", "pass"
    ),
    # from device to device
    "a value from another device for what sends it": Mutation(
        stash, "Stash", "_access_copy", "[*cell.written, *copy.written", "[*copy.written", several=3, **ON_DEVICES
    ),
    "a kernel for the value from another device": Mutation(
        stash, "Stash", "_access_copy", "= [arrived], [], True", "= [], [], True", several=3, **ON_DEVICES
    ),
    "a note that another device has written": Mutation(
        stash, "Access", "finish", "other.fresh = lane == self.lane", "pass", several=3, **ON_DEVICES
    ),
    "a value for another device for its kernel": Mutation(
        stash, "Access", "_send", "[*after, *cell.written", "[*cell.written", several=3, **ON_DEVICES
    ),
    "a value that streams in for the device that sends it": Mutation(
        stash, "Stash", "access", "[*cell.written, *entry.free_after]", "[*entry.free_after]", several=3
    ),
    "a value that streams in for who has its place, on several devices": Mutation(
        stash, "Stash", "access", "[*cell.written, *entry.free_after]", "[*cell.written]", several=3
    ),
    # the server
    "an update for its gradients": Mutation(
        relay.eps.server, "ParameterServer", "collect", "[*arrived, verdict]", "[verdict]"
    ),
    "an update for the verdict on the loss": Mutation(
        relay.eps.server,
        "ParameterServer",
        "collect",
        "[*arrived, verdict]",
        "[*arrived]",
        "a spoiled batch is skipped",
    ),
    "a drain for the update that still reads its staging": Mutation(
        relay.eps.server,
        "ParameterServer",
        "collect",
        "self._staging_free[turn] = [done]",
        "pass",
        "one slot, one micro-batch",
    ),
    "gradients in place for their update": Mutation(
        relay.eps.server, "ParameterServer", "collect", "slot.hold_gradients([done])", "pass", unified=True
    ),
    "an update in place for the kernels": Mutation(
        relay.eps.server, "ParameterServer", "collect", "arrived = list(slot.computed)", "arrived = []", unified=True
    ),
    "a note of who updates": Mutation(
        relay.eps.updates.updater,
        "Updater",
        "note",
        "self._store.updated[plan.names[index]] = done",
        "pass",
        DEFERRED,
    ),
    # the schedule and those who read results
    "a load for its layer's update": Mutation(
        schedule, "Scheduler", "_submit_load", "self._store.ready(content)", "[]", DEFERRED
    ),
    "a kernel for its activations": Mutation(
        schedule, "Scheduler", "_run", "waits += access.waits", "pass", "activations on the device"
    ),
    "the losses for the kernels that make them": Mutation(
        run_step, "", "train_step", "submitted.compute[-count:]", "[]"
    ),
    "the verdict for the losses": Mutation(
        run_step, "", "train_step", "check, [read],", "check, [],", "a spoiled batch is skipped"
    ),
    "the losses of an evaluation for the kernels": Mutation(
        run_step, "", "forward", "submitted.compute[-len(weights) :]", "[]", "looked at between steps"
    ),
    "a prediction for the kernels that make it": Mutation(
        run_step, "", "read", "access.view, access.waits", "access.view, []", "looked at between steps"
    ),
}


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mutation], None]:
    def apply(mutation: Mutation) -> None:
        owner = getattr(mutation.module, mutation.owner) if mutation.owner else mutation.module
        function = getattr(owner, mutation.function)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(mutation.text) == 1, f"{mutation.text!r} should be there once, in\n{source}"
        made: dict[str, Any] = {}
        source = source.replace(mutation.text, mutation.without)
        flags = __future__.annotations.compiler_flag
        exec(compile(source, mutation.function, "exec", flags), vars(mutation.module), made)
        monkeypatch.setattr(owner, mutation.function, made[mutation.function])

    return apply


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.sample(2)
def test_without_the_wait_of(mutate: Any, name: str) -> None:
    mutation = MUTATIONS[name]
    machine = UNIFIED if mutation.unified else "generic"
    differences(mutation.scenario, f"sim:{machine},order=eager")  # the scenario's reference, made with the wait
    mutate(mutation)
    devices = [[f"sim:{machine},{order},poison=on"] * mutation.several for order in ORDERS[1:]]
    assert any(noticed(mutation.scenario, row) for row in devices)


def noticed(scenario: str, device: list[str]) -> bool:
    try:
        return bool(differences(scenario, device))
    except (RuntimeError, IndexError):  # poison is out of range as an index
        return True
