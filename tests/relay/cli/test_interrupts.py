"""Ctrl-C while a kernel hangs: one press after the other gives up more, and the last checkpoint stays whole."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from relay.checkpoint.format import Checkpoint
from relay.checkpoint_manager import newest
from relay.interrupts import CountedInterrupts
from tests.support.processes.packages import ROOT

SIZES = [
    "--layers",
    "2",
    "--hidden",
    "16",
    "--heads",
    "2",
    "--seq",
    "16",
    "--batch",
    "4",
    "--steps",
    "9",
    "--no-sample",
]


def until(process: "subprocess.Popen[str]", text: str, within: float = 300) -> str:
    """Read the errors of a process up to a line that has the text."""
    assert process.stderr is not None
    read, deadline = "", time.monotonic() + within
    while time.monotonic() < deadline:
        line = process.stderr.readline()
        read += line
        if text in line:
            return read
        assert line, f"the process ended: {read}"
    raise AssertionError(f"no {text!r} in: {read}")


def test_three_presses_end_a_run_whose_kernel_hangs_and_its_last_checkpoint_is_whole(tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "processes" / "hanging_training.py"
    words: list[Any] = [sys.executable, "-u", str(script), "train", "--device", "hangs", "--out", str(tmp_path / "run")]
    words += [*SIZES, "--checkpoint-every", "1", "--stall-timeout", "0.2", "--data", str(ROOT / "README.md")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        until(process, "hanging")
        assert "kernels: " in until(process, "bytes in use"), "the watchdog tells what is waited for"
        process.send_signal(signal.SIGINT)
        until(process, "a step that runs is finished first")
        process.send_signal(signal.SIGINT)
        until(process, "Not waiting for the step any more")
        process.send_signal(signal.SIGINT)
        last = until(process, "relay: ")
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    assert "--resume continues it" in last
    whole = newest(tmp_path / "run" / "checkpoints")
    assert whole is not None
    assert str(whole) in last
    Checkpoint(whole).verify()


def test_the_watchdog_of_relay_train_is_on_by_default() -> None:
    from relay.cli.train import train

    (option,) = (option for option in train.params if option.name == "stall_timeout")
    assert option.default == 120.0


def test_no_thread_holds_what_a_command_trained_after_its_end() -> None:
    """One that let go of tensors while the interpreter ends would abort the process."""

    class Trained:
        def saved(self) -> str:
            return "all is saved"

    for _ in range(20):
        trained = Trained()
        with CountedInterrupts(print, trained.saved):
            assert [thread for thread in threading.enumerate() if thread.name == "relay-interrupts"]
        gone = weakref.ref(trained)
        del trained
        assert gone() is None
        assert not [thread for thread in threading.enumerate() if thread.name == "relay-interrupts"]
