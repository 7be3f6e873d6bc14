"""Progressive stacking (Gong et al. 2019): train a few layers, double them by copying, and again, and compare with
training the full depth from the start, for the same number of steps.

Every layer is a slot's worth of device memory whatever the depth, so device memory is the same throughout. Prints one
line a report, and at the end time and loss of both.

    python examples/progressive_growth.py --layers 16 --steps 120
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from pathlib import Path

import torch

import relay
from relay.models import GPT


@dataclass
class Result:
    """What a run came to."""

    seconds: float
    loss: float
    device_peak_bytes: int


def text_batches(text: bytes, count: int, rows: int, length: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Windows of a text as bytes, each with the next byte as label."""
    data = torch.tensor(list(text))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        starts = torch.randint(len(data) - length - 1, (rows,), generator=generator)
        windows = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
        found.append({"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()})
    return found


def run(
    batches: list[dict[str, torch.Tensor]], layers: int, doublings: int, hidden: int, device: str, learning_rate: float
) -> Result:
    """Train from `layers / 2**doublings` layers to `layers`, doubling at equal distances."""
    torch.manual_seed(0)
    length = batches[0]["input_ids"].shape[1]
    model = GPT(vocabulary=256, layers=layers >> doublings, hidden=hidden, heads=4, sequence=length, tied=False)
    grow_at = {len(batches) * (number + 1) // (doublings + 1) for number in range(doublings)}
    seconds, peak, losses = 0.0, 0, []
    optimizer = relay.AdamW(lr=learning_rate)
    with relay.Trainer(model, device=device, microbatches=2, stash="host", optimizer=optimizer) as trainer:
        trainer.prepare(batches[0])
        for step, batch in enumerate(batches):
            if step in grow_at:
                for layer in [copy.deepcopy(one) for one in model.blocks]:
                    trainer.insert(len(model.blocks), layer)
            metrics = trainer.step(batch)
            seconds += metrics.seconds
            peak = max(peak, metrics.device_peak_bytes)
            losses.append(metrics.loss)
            if step % 20 == 0 or step in grow_at:
                print(f"  step {step:4d}  {len(model.blocks):3d} layers  loss {metrics.loss:.3f}  {seconds:6.1f} s")
    last = losses[-10:]
    return Result(seconds, sum(last) / len(last), peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="the full depth")
    parser.add_argument("--doublings", type=int, default=2, help="how often the depth is doubled on the way there")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.doublings < 1 or options.layers % (1 << options.doublings):
        parser.error("--layers must be a multiple of 2 to the power of --doublings, and that at least 1")
    text = Path(argparse.__file__).read_bytes()
    batches = text_batches(text, options.steps, 8, 64)
    settings = (options.hidden, options.device, options.lr)
    print("growing:")
    grown = run(batches, options.layers, options.doublings, *settings)
    print("full depth from the start:")
    full = run(batches, options.layers, 0, *settings)
    print(f"growing     {grown.seconds:7.1f} s  loss {grown.loss:.3f}  device peak {grown.device_peak_bytes:,} bytes")
    print(f"full depth  {full.seconds:7.1f} s  loss {full.loss:.3f}  device peak {full.device_peak_bytes:,} bytes")
    print(f"time of growing / full depth: {grown.seconds / full.seconds:.2f}")


if __name__ == "__main__":
    main()
