"""The commands `relay inspect` and `relay export`: looking into a checkpoint, and taking the model out of it.

Neither builds a trainer or needs a device. Invariant: what is printed was checked first; `inspect` reads every byte
unless told not to, and its exit code says whether the checkpoint is whole.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.spec.units import format_size
from relay.cli.console import json_option, print_json
from relay.errors import CheckpointError

if TYPE_CHECKING:
    from relay.checkpoint.format import Checkpoint


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--verify/--no-verify", default=True, show_default=True, help="Read everything against its checksums.")
@json_option
def inspect(checkpoint: Path, verify: bool, as_json: bool) -> None:
    """Show what is in CHECKPOINT, and whether it is whole.

    CHECKPOINT is a checkpoint's folder, or the folder of a run or of its checkpoints: the newest one then.

    \b
    Examples:
      relay inspect runs/latest
      relay inspect runs/latest/checkpoints/step-000000300 --no-verify
      relay inspect runs/latest --json
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
@click.option("--onnx", is_flag=True, help="Write model.onnx too: the forward, with all weights by name.")
@json_option
def export(checkpoint: Path, folder: Path, onnx: bool, as_json: bool) -> None:
    """Write the model in CHECKPOINT to FOLDER, as model.safetensors and config.json.

    The weights have the model's own names, as `from_pretrained` and `load_state_dict` want them. The optimizer stays
    behind. ONNX is written for models that `relay train` made.

    \b
    Examples:
      relay export runs/latest exported
      relay export runs/latest exported --onnx
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
            click.echo(f"{answer['onnx']}: the forward of one context, for inspection and for other runtimes")


def _write_onnx(folder: Path) -> Path:
    """The GPT in a folder as ONNX beside it, for one text as long as its context."""
    import torch

    from relay.models import gpt_folder
    from relay.models.onnx_export import export_onnx

    model = gpt_folder.load(folder)
    longest = model.embedding.position.num_embeddings
    return export_onnx(model, {"input_ids": torch.zeros(1, longest, dtype=torch.int64)}, folder / "model.onnx")


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path; for a run's folder the newest whole one. Raises CheckpointError."""
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
        for _, plan in tensors_of(name, entry):
            kind, _, rest = plan.key.partition("/")
            what = ("buffers" if entry.buffer else "weights") if kind == "weights" else rest.partition("/")[0]
            sizes[(what, plan.dtype)] += plan.size
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        "seed": manifest.seed,
        "verified": verified,
        "parameters": sum(math.prod(entry.tensor.shape) for entry in manifest.parameters.values() if not entry.buffer),
        "optimizer": manifest.optimizer.kind,
        "groups": [
            {"parameters": len(names), **{key: repr(value) for key, value in values.items()}}
            for names, values in manifest.optimizer.groups
        ],
        "loss_scale": manifest.loss_scale,
        "options": {
            key: value if isinstance(value, (int, float, str)) else repr(value)
            for key, value in manifest.options.items()
        },
        "user": {key: repr(value)[:200] for key, value in manifest.user.items()},
        "bytes": {f"{what} {dtype}": size for (what, dtype), size in sizes.items()},
        "shards": [{"file": one.file, "bytes": one.size, "sha256": one.sha256} for one in manifest.shards],
        "software": manifest.software,
    }


def _text(answer: dict[str, Any]) -> str:
    lines = [
        f"{answer['path']}: after step {answer['step']}, seed {answer['seed']}",
        f"{'whole: every checksum fits' if answer['verified'] else 'not verified'}; {answer['software']}",
        f"{answer['parameters']:,} parameters, {answer['optimizer']}",
    ]
    for number, group in enumerate(answer["groups"]):
        rest = ", ".join(f"{key}={value}" for key, value in group.items() if key != "parameters")
        lines.append(f"  group {number}: {group['parameters']} tensors, {rest}")
    if answer["loss_scale"] is not None:
        lines.append(f"  loss scale {answer['loss_scale']['value']:g}")
    lines += [f"  {what:<24} {format_size(size):>10}" for what, size in answer["bytes"].items()]
    lines += [f"  {key} = {value}" for key, value in {**answer["options"], **answer["user"]}.items()]
    lines += [f"  {one['file']}  {format_size(one['bytes'])}" for one in answer["shards"]]
    return "\n".join(lines)
