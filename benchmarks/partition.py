"""How long a deep model takes to be cut and captured, and how much host memory that costs beyond the model itself.

    python benchmarks/partition.py [--layers 32] [--hidden 512] [--quick] [--json out.json]

The model is a Llama of `transformers` with random weights, made on the meta device and filled from a folder shard by
shard, as a large one would be. Prints the figures as JSON; `overhead` is peak resident memory above what the
process held before the model was there, over the bytes of its weights, less one.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import relay
from hal.page_lock import give_back_free_memory
from relay.models import empty_weights, load_weights


def resident() -> int:
    """Bytes of this process's own memory (pages of files, such as libraries and mapped shards, not counted)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell resident memory in /proc/self/status")


class Watch(threading.Thread):
    """Samples resident memory until stopped; `peak` is the most it saw."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self.peak = max(self.peak, resident())

    def stop(self) -> int:
        """The peak."""
        self._ended.set()
        self.join()
        return self.peak


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="a small model of three layers: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden = 3, 64
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    tokens = torch.randint(0, 2048, (4, options.sequence))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    warm(config, batch)
    with tempfile.TemporaryDirectory() as folder:
        weights = write_folder(config, folder)
        gc.collect()
        give_back_free_memory()
        before = resident()
        watch = Watch()
        watch.start()
        with empty_weights():
            model: nn.Module = LlamaForCausalLM(config)
        load_weights(model, folder)
        start = time.perf_counter()
        trainer = relay.Trainer(model, microbatches=2, optimizer=relay.SGD(lr=0.1))
        trainer.prepare(batch)
        seconds = time.perf_counter() - start
        peak = watch.stop()
        trainer.close()
    figures = {
        "layers": options.layers,
        "model_bytes": weights,
        "partition_and_capture_seconds": round(seconds, 2),
        "peak_bytes_above_start": peak - before,
        "overhead": round((peak - before) / weights - 1, 3),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def warm(config: object, batch: dict[str, torch.Tensor]) -> None:
    """Import and set up all that a first capture does, with a model of two layers, so that only the model counts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 2})  # type: ignore[attr-defined]
    with relay.Trainer(LlamaForCausalLM(small), microbatches=2, optimizer=relay.SGD(lr=0.1)) as trainer:
        trainer.prepare(batch)


def write_folder(config: object, folder: str) -> int:
    """Save a model with random weights in shards; its bytes."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config)  # type: ignore[arg-type]
    model.save_pretrained(folder, max_shard_size="50MB")
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


if __name__ == "__main__":
    main()
