"""Loads a Mixtral's folder, trains a step and saves a folder, under a hard limit of memory; prints figures, as JSON.

`test_pretrained_memory` runs it. The system refuses memory beyond `RLIMIT_DATA`, which counts all private memory that
can be written to: what was allocated, thread stacks, and the mapped shard that is being read.
"""

import ctypes
import gc
import json
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import relay
from hal.page_lock import give_back_free_memory
from relay.models import empty_weights, load_weights
from tests.support.processes.streaming_load import peak_during

LAYERS = 10
SHARD = 4 << 20
DEVICE = 48 << 20
"""Bytes that the device may take. It is the CPU, whose memory is the process's."""


def private() -> int:
    """Bytes of this process that the limit counts."""
    return int(Path("/proc/self/status").read_text(encoding="utf-8").split("VmData:")[1].split()[0]) * 1024


@contextmanager
def limit(size: int) -> Iterator[None]:
    """While open, the process may have `size` bytes in all."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def configuration(layers: int) -> MixtralConfig:
    return MixtralConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, output_router_logits=False, use_cache=False,
    )  # fmt: skip


def empty(config: MixtralConfig) -> MixtralForCausalLM:
    with empty_weights():
        return MixtralForCausalLM(config)


def run(folder: Path, batch: dict[str, torch.Tensor], beside: int = 0) -> dict[str, int]:
    """Load, train a step and save, each with the memory of the weights, of one layer, of the device, and `beside`."""
    model = empty(MixtralConfig.from_pretrained(folder))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    gc.collect()
    give_back_free_memory()
    before = private()
    with limit(before + weights + layer + beside):
        load_weights(model, folder)
    with limit(before + weights + layer + beside + DEVICE):
        trainer = relay.Trainer(model, microbatches=1, optimizer=relay.SGD(lr=0.1), capacity=DEVICE, slots=1)
        trainer.step(batch)
        ledger = trainer.ledger.total
        trainer.save_pretrained(folder.parent / "saved", shard_size=str(SHARD))
        try:
            torch.empty(weights, dtype=torch.uint8)
            refused = False
        except RuntimeError:
            refused = True
    # A checkpoint is mapped to be verified, and the limit would count that: what is counted here is no file's.
    saving = peak_during(lambda: trainer.save(folder.parent / "checkpoint").wait())
    trainer.close()
    return {"weights": weights, "layer": layer, "ledger": ledger, "refused": refused, "saving": saving}


def main(folder: Path) -> None:
    threading.stack_size(1 << 20)
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    for name, layers in (("small", 2), ("large", LAYERS)):
        given = folder / name / "given"
        MixtralForCausalLM(configuration(layers)).to(torch.bfloat16).save_pretrained(given, max_shard_size=SHARD)
    run(folder / "small" / "given", batch, 1 << 40)  # imports, and compiles what is compiled once
    print(json.dumps(run(folder / "large" / "given", batch)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
