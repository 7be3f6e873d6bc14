"""Devices with one fault each, over the numpy device: what the conformance suite must catch.

Run as a script, it holds each of them to the tests named beside it and prints, as JSON, how many failed,
and how the command answers. They are made known to the registry as an installed package's would be, by an entry point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import weakref
from typing import Any, ClassVar

import numpy as np
import torch
from click.testing import CliRunner

from backends.numpy_device import NumpyBackend, NumpyDevice, NumpyKernel, NumpyQueue
from hal.device import Buffer, Device, KernelCall, Probe
from hal.event import Event
from hal.kit.arrays.ops import FUNCTIONS
from hal.kit.host_device import HostBuffer, HostQueue
from hal.known_gaps import KnownGap
from hal.program import Kernel, Program
from hal.worker import Worker
from relay import cli
from relay.cli.conformance import run
from tests.support.stubs import unregistered


class HalfFills(NumpyQueue):
    def fill(self, target: Any, value: float, wait: Any = ()) -> Any:
        part = target.native.view(-1)[: max(1, target.native.numel() // 2)]
        return self.worker.submit(lambda: part.fill_(value), wait, "fill")


class ForgetsToWait(NumpyQueue):
    def _transfer(self, target: Any, source: Any, wait: Any, label: str) -> Any:
        return super()._transfer(target, source, (), label)


class LastErrorWins(NumpyQueue):
    def fill(self, target: Any, value: float, wait: Any = ()) -> Any:
        return super().fill(target, value, list(wait)[::-1])


class NeverAdds(NumpyQueue):
    def prepare(self, call: KernelCall) -> Any:
        return super().prepare(dataclasses.replace(call, accumulate=()))


class OneKeyForAll(NumpyQueue):
    def prepare(self, call: KernelCall) -> Any:
        first = call.kernel.__dict__.setdefault("first_key", call.key)
        return super().prepare(dataclasses.replace(call, key=first))


class BlocksTheCaller(NumpyQueue):
    def fill(self, target: Any, value: float, wait: Any = ()) -> Any:
        event: Any = super().fill(target, value, wait)
        event.settle()
        return event


class WritesEarly(NumpyQueue):
    """A write takes its host memory when the host's events are done, and waits for the device's only then."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._taker = Worker(f"{name} taker")

    def write(self, target: Any, source: torch.Tensor, wait: Any = ()) -> Any:
        of_device = [event for event in wait if isinstance(event, OfTransfer)]
        of_host = [event for event in wait if not isinstance(event, OfTransfer)]
        taken = torch.empty_like(source)
        take = self._taker.submit(lambda: taken.copy_(source), of_host, "take")
        if not of_host:
            take.wait()
        return self._transfer(target.native, taken, [take, *of_device], "write")

    def _transfer(self, target: Any, source: Any, wait: Any, label: str) -> Any:
        return OfTransfer(super()._transfer(target, source, wait, label))


class OfTransfer(Event):
    """An event that is known to be of a transfer of this device."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.done()

    def wait(self) -> None:
        self.event.wait()

    def span(self) -> tuple[float, float]:
        return self.event.span()


class IgnoresIndexErrors(NumpyQueue):
    """A run ends at an index outside of its operand, as if it had ended well."""

    def prepare(self, call: KernelCall) -> Any:
        run = super().prepare(call)

        def run_silently() -> None:
            with contextlib.suppress(IndexError):
                run()

        return run_silently


class AliasesOutputs(NumpyQueue):
    """An output that is an input's own value gets the input's memory instead of a copy."""

    def run(self, call: KernelCall, wait: Any = ()) -> Any:
        nodes = list(call.kernel.program.graph.nodes)
        given = dict(zip(nodes, call.inputs, strict=False))
        for node, view in zip(nodes[-1].args[0], call.outputs, strict=True):
            if node in given:
                view.native = given[node].native
        return super().run(call, wait)


class FreesEarly(HostBuffer):
    """Memory is given to the next buffer once the buffer and its views are gone, whatever is queued on it."""

    class Claim:
        """Held by the buffer and its views, and by no queued call."""

    spare: ClassVar[list[torch.Tensor]] = []

    def __init__(self, account: Any, size: int, what: str) -> None:
        super().__init__(account, size, what)
        for position in reversed(range(len(FreesEarly.spare))):
            if len(FreesEarly.spare[position]) == size:
                self.memory = FreesEarly.spare.pop(position)
                break
        self._claim: FreesEarly.Claim | None = FreesEarly.Claim()
        weakref.finalize(self._claim, FreesEarly.spare.append, self.memory)

    def view(self, offset: int, shape: Any, dtype: torch.dtype) -> Any:
        view = super().view(offset, shape, dtype)
        view.__dict__["claim"] = self._claim
        return view

    def free(self) -> None:
        super().free()
        self._claim = None


class SharesMemory(HostBuffer):
    """Small buffers are all the same memory."""

    shared = torch.empty(4096, dtype=torch.uint8)

    def __init__(self, account: Any, size: int, what: str) -> None:
        super().__init__(account, size, what)
        if size <= 4096:
            self.memory = SharesMemory.shared[:size]


class KeepsTheAccount(HostBuffer):
    """Freeing gives nothing back."""

    def free(self) -> None:
        self.memory = None


QUEUES: dict[str, type[HostQueue]] = {
    "half-fills": HalfFills,
    "forgets-to-wait": ForgetsToWait,
    "last-error-wins": LastErrorWins,
    "never-adds": NeverAdds,
    "one-key-for-all": OneKeyForAll,
    "blocks-the-caller": BlocksTheCaller,
    "writes-early": WritesEarly,
    "aliases-outputs": AliasesOutputs,
    "ignores-index-errors": IgnoresIndexErrors,
}
BUFFERS: dict[str, type[HostBuffer]] = {
    "shares-memory": SharesMemory,
    "keeps-the-account": KeepsTheAccount,
    "frees-early": FreesEarly,
}
OPS: dict[str, tuple[str, Any]] = {
    "wrong-op": ("aten.rsqrt.default", lambda a, x: a.xp.sqrt(x)),
    "wrong-rounding": ("aten.mean.dim", lambda a, x, dims, keep: x.mean(axis=tuple(dims), keepdims=keep) * 1.0001),
}
FAULTS = {
    "none": "test_order or test_ownership",
    "half-fills": "test_filling",
    "forgets-to-wait": "test_a_call_that_waits_on_a_failed_one",
    "last-error-wins": "test_the_first_error",
    "never-adds": "added",
    "one-key-for-all": "taken_anew",
    "blocks-the-caller": "test_a_submission_returns",
    "writes-early": "a_write_takes",
    "aliases-outputs": "memory_of_its_own",
    "ignores-index-errors": "test_an_index_outside_of_its_operand_is_an_error",
    "frees-early": "a_freed_buffer_outlives",
    "shares-memory": "do_not_overlap",
    "keeps-the-account": "freeing_twice",
    "no-capacity": "beyond_the_capacity",
    "any-dtype": "test_a_dtype_that_is_not_promised",
    "boasts-of-float64": "held_in_full",
    "wrong-op": "rsqrt",
    "wrong-rounding": "aten.mean.dim-float32",
    "closed-gap": "test_a_round_trip",
}


class BrokenDevice(NumpyDevice):
    def __init__(self, fault: str, capacity: int | None) -> None:
        super().__init__(f"broken:{fault}", np.float32, None if fault == "no-capacity" else capacity)
        self._fault = fault
        if fault == "boasts-of-float64":
            self.info = dataclasses.replace(self.info, compute=self.info.compute | {torch.float64})

    def make_kernel(self, program: Program) -> Kernel:
        if self._fault == "any-dtype":  # and computes in float32 what is asked for in float64
            return NumpyKernel(program, self._arrays)
        return super().make_kernel(program)

    def make_queue(self, name: str) -> HostQueue:
        return QUEUES.get(self._fault, NumpyQueue)(name)

    def make_buffer(self, size: int, what: str) -> Buffer:
        return BUFFERS.get(self._fault, HostBuffer)(self.account, size, what)


class BrokenBackend(NumpyBackend):
    name = "broken"
    known_gaps = (
        KnownGap("test_transfers.py::test_a_round_trip_keeps_every_bit[torch.float32]", "long ago", "*:closed-gap"),
    )

    def probe(self) -> list[Probe]:
        return []

    def open(self, selector: str, capacity: int | None = None) -> Device:
        return BrokenDevice(selector, capacity)


def main() -> None:
    unregistered.register("broken", f"{__name__}:BrokenBackend")
    gc.freeze()  # pytest collects garbage ten times as it ends, and would go through PyTorch's objects each time
    failed = {}
    for fault, tests in FAULTS.items():
        op, function = OPS.get(fault, ("", None))
        right = FUNCTIONS.get(op)
        if function is not None:
            FUNCTIONS[op] = function
        tally = run(f"broken:{fault}", tests, True, sys.stderr)
        if right is not None:
            FUNCTIONS[op] = right
        failed[fault] = [len(tally.with_outcome("failed")), len(tally.tests)]
    command = CliRunner().invoke(cli.main, ["conformance", "broken:half-fills", "--only", FAULTS["half-fills"]])
    print(json.dumps({"failed": failed, "exit code": command.exit_code, "told": command.stdout}))


if __name__ == "__main__":
    main()
