"""The commands `relay inspect` and `relay export`: show the contents of a checkpoint, and write its model to a folder.

Neither builds a trainer or needs a device. Invariant: everything printed was verified first, unless `--no-verify` is
given; the exit code of `relay inspect` is 0 only for a whole checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from hal.spec.units import format_size
from relay.cli.console import json_option, print_json
from relay.errors import CheckpointError

if TYPE_CHECKING:
    from relay.checkpoint.format import Checkpoint


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--verify/--no-verify", default=True, show_default=True, help="Read all data and compare its checksums.")
@json_option
def inspect(checkpoint: Path, verify: bool, as_json: bool) -> None:
    """Show the contents of CHECKPOINT, and verify that it is whole.

    CHECKPOINT is the folder of a checkpoint. For the folder of a run, or of its checkpoints, it is the newest one.

    \b
    Examples:
      relay inspect runs/long
      relay inspect runs/long/checkpoints/step-000000300 --no-verify
      relay inspect runs/long --json
    """
    opened = open_checkpoint(checkpoint)
    if verify:
        opened.verify()
    answer = _describe(opened, verify)
    if as_json:
        print_json(answer)
    else:
        click.echo(_text(answer))


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--onnx", is_flag=True, help="Also write model.onnx: the forward, with all weights by name.")
@json_option
def export(checkpoint: Path, folder: Path, onnx: bool, as_json: bool) -> None:
    """Write the model in CHECKPOINT to FOLDER, as model.safetensors and config.json.

    The weights have the model's own names, so that `from_pretrained` and `load_state_dict` accept them. The optimizer
    is not exported. ONNX can be written for models of `relay train`.

    \b
    Examples:
      relay export runs/long exported
      relay export runs/long exported --onnx
      relay sample exported
    """
    from relay.models import gpt_folder

    opened = open_checkpoint(checkpoint)
    opened.verify()
    manifest = opened.manifest
    model = manifest.user.get("model", {})
    if not isinstance(model, dict):
        raise CheckpointError(f"expected an object, received {model!r:.80}", file=str(opened.path), field="user.model")
    gpt_folder.prepare(folder)
    gpt_folder.save(folder, {name: opened.weight(name) for name in manifest.parameters}, model)
    answer = {
        "weights": str(folder / gpt_folder.WEIGHTS),
        "configuration": str(folder / gpt_folder.CONFIGURATION),
        "step": manifest.step,
        "tensors": len(manifest.parameters),
    }
    if onnx:
        answer["onnx"] = str(_write_onnx(folder))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"{answer['weights']}: {answer['tensors']} tensors after step {answer['step']}")
        if onnx:
            click.echo(f"{answer['onnx']}: the forward of one context, for viewers and other runtimes")


def _write_onnx(folder: Path) -> Path:
    """Write the GPT in a folder as ONNX beside it, for one text as long as its context."""
    import torch

    from relay.models import gpt_folder
    from relay.models.onnx_export import export_onnx

    model = gpt_folder.load(folder)
    longest = model.embedding.position.num_embeddings
    return export_onnx(model, {"input_ids": torch.zeros(1, longest, dtype=torch.int64)}, folder / "model.onnx")


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path, or the newest whole one in the folder of a run. Raises CheckpointError."""
    from relay.checkpoint.format import Checkpoint, find
    from relay.checkpoint.manifest import MANIFEST
    from relay.checkpoint_manager import newest

    if not (find(path) / MANIFEST).exists():
        for folder in (path, path / "checkpoints"):
            found = newest(folder)
            if found is not None:
                return Checkpoint(found)
    return Checkpoint(path)


def _describe(checkpoint: Checkpoint, verified: bool) -> dict[str, Any]:
    from relay.checkpoint.manifest import tensors_of

    manifest = checkpoint.manifest
    sizes: Counter[tuple[str, str]] = Counter()
    for name, entry in manifest.parameters.items():
        for _, stored in tensors_of(name, entry):
            kind, _, rest = stored.key.partition("/")
            what = ("buffers" if entry.buffer else "weights") if kind == "weights" else rest.partition("/")[0]
            sizes[(what, stored.dtype)] += stored.size
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        "seed": manifest.seed,
        "verified": verified,
        "parameters": sum(math.prod(entry.shape) for entry in manifest.parameters.values() if not entry.buffer),
        "optimizer": manifest.optimizer.kind,
        "groups": [
            {"parameters": len(group.names), **{key: repr(value) for key, value in group.values.items()}}
            for group in manifest.optimizer.groups
        ],
        "loss_scale": msgspec.to_builtins(manifest.loss_scale),
        "options": {
            key: value if isinstance(value, (int, float, str)) else repr(value)
            for key, value in manifest.options.items()
        },
        "user": {key: repr(value)[:200] for key, value in manifest.user.items()},
        "bytes": {f"{what} {dtype}": size for (what, dtype), size in sizes.items()},
        "shards": [{"file": shard.file, "bytes": shard.size, "sha256": shard.sha256} for shard in manifest.shards],
        "software": manifest.software,
    }


def _text(answer: dict[str, Any]) -> str:
    lines = [
        f"{answer['path']}: after step {answer['step']}, seed {answer['seed']}",
        f"{'whole: every checksum matches' if answer['verified'] else 'not verified'}; {answer['software']}",
        f"{answer['parameters']:,} parameters, {answer['optimizer']}",
    ]
    for number, group in enumerate(answer["groups"]):
        rest = ", ".join(f"{key}={value}" for key, value in group.items() if key != "parameters")
        lines.append(f"  group {number}: {group['parameters']} tensors, {rest}")
    if answer["loss_scale"] is not None:
        lines.append(f"  loss scale {answer['loss_scale']['value']:g}")
    lines += [f"  {what:<24} {format_size(size):>10}" for what, size in answer["bytes"].items()]
    lines += [f"  {key} = {value}" for key, value in {**answer["options"], **answer["user"]}.items()]
    lines += [f"  {shard['file']}  {format_size(shard['bytes'])}" for shard in answer["shards"]]
    return "\n".join(lines)
