"""An example of a batch for a model of transformers, by the inputs that its forward takes, and what its speed counts.

Tensors are on the meta device: only names, shapes and dtypes count. Which model it is does not matter here, only its
`main_input_name`, the task in its class's name, and sizes in its configuration.

Invariant: a length that the model does not take, or does not have positions for, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from relay.simulation.described.transformer_shape import ShapeError

RATE = 16000
"""Samples of audio a second: that of speech models."""

FRAMES = 100
"""Frames of a spectrogram a second: one in ten milliseconds."""

USUAL_SEQUENCE = 1024
USUAL_SECONDS = 10.0
USUAL_IMAGE = 224

Tensors = dict[str, torch.Tensor]


class Unit(NamedTuple):
    """What speed counts: its name in the plural, and how many of it a sample has."""

    name: str
    per_sample: float


class Example(NamedTuple):
    """The tensors of a batch, and what was assumed about them."""

    tensors: dict[str, Any]
    notes: tuple[str, ...] = ()


def unit_of(example: Mapping[str, Any], encoder_decoder: bool = False) -> Unit:
    """What speed counts for batches like this one.

    Tokens for integer ids, of encoder and decoder together; images; seconds of audio; samples for anything else.
    """
    tensors = {name: tensor for name, tensor in example.items() if isinstance(tensor, torch.Tensor) and tensor.dim()}
    ids, labels = tensors.get("input_ids"), tensors.get("labels")
    if ids is not None and ids.dim() == 2:
        if "pixel_values" in tensors and labels is None:
            return Unit("samples", 1)
        decoder = tensors.get("decoder_input_ids", labels) if encoder_decoder else None
        written = decoder.shape[1] if decoder is not None and decoder.dim() == 2 else 0
        return Unit("tokens", ids.shape[1] + written)
    sound = tensors.get("input_values")
    if sound is not None and sound.dim() in (2, 3):
        return Unit("seconds of audio", sound.shape[1] / (RATE if sound.dim() == 2 else FRAMES))
    if "input_features" in tensors:
        return Unit("seconds of audio", tensors["input_features"].shape[-1] / FRAMES)
    inputs = [tensor for name, tensor in tensors.items() if name != "labels"]
    if any(tensor.dim() == 4 and tensor.is_floating_point() for tensor in inputs):
        return Unit("images", 1)
    if inputs and inputs[0].dim() >= 2 and not inputs[0].is_floating_point():
        return Unit("tokens", inputs[0].shape[1])
    return Unit("samples", 1)


def example_batch(model: Any, batch: int, seq: int | None = None, seconds: float | None = None) -> Example:
    """An example of a batch of so many samples, with labels.

    `seq` is the number of tokens in a sample, `seconds` the length of its audio. Raises ShapeError for a length that
    the model does not take, and for a model whose inputs are not known here.
    """
    name, main = type(model).__name__, getattr(model, "main_input_name", "input_ids")
    makers = {
        "input_ids": _of_text, "pixel_values": _of_images, "input_values": _of_sound, "input_features": _of_spectrogram,
    }  # fmt: skip
    if main not in makers:
        raise ShapeError(
            f"{name} takes {main}, for which no example of a batch is known here. Give one: "
            "relay.simulate(module, example=batch)."
        )
    audio = main in ("input_values", "input_features")
    if seconds is not None and not audio:
        raise ShapeError(f"seconds={seconds:g} is a length of audio, and {name} takes {main}. Leave it out.")
    if seq is not None and not _takes_tokens(model, main):
        raise ShapeError(f"seq={seq} is a number of tokens, and {name} takes {main} alone. Leave it out.")
    return makers[main](model, batch, seq, seconds)


def _takes_tokens(model: Any, main: str) -> bool:
    return main == "input_ids" or bool(getattr(model.config, "is_encoder_decoder", False))


def _of_text(model: Any, batch: int, seq: int | None, seconds: float | None) -> Example:
    config = model.config.get_text_config()
    most = learned_positions(model, getattr(config, "max_position_embeddings", None))
    if seq is None:
        seq = USUAL_SEQUENCE if most is None else min(USUAL_SEQUENCE, most)
    if most is not None and seq > most:
        raise ShapeError(
            f"seq={seq} is longer than the {most} learned positions of {type(model).__name__}. Give {most} or less."
        )
    ids = _ids(batch, seq)
    tensors: Tensors = {"input_ids": ids}
    notes: tuple[str, ...] = ()
    task = type(model).__name__.rpartition("For")[2]
    if hasattr(model.config, "vision_config") and task == type(model).__name__:  # two towers, such as CLIP
        tensors["pixel_values"] = _pixels(model.config.vision_config, batch)
        return Example({**tensors, "return_loss": True})
    if hasattr(model.config, "vision_config") or hasattr(model.config, "audio_config"):
        notes = (
            f"{type(model).__name__} takes images or sounds too. The batch here is text alone: their parts are stored "
            "and hold no gradients.",
        )
    if task in ("SequenceClassification", "MultipleChoice"):
        tensors["labels"] = _ids(batch)
    elif task == "QuestionAnswering":
        tensors |= {"start_positions": _ids(batch), "end_positions": _ids(batch)}
    elif task == "PreTraining":
        tensors |= {"labels": ids, "next_sentence_label": _ids(batch)}
    else:
        tensors["labels"] = ids
    return Example(tensors, notes)


def _of_images(model: Any, batch: int, seq: int | None, seconds: float | None) -> Example:
    config = model.config
    pixels = _pixels(config, batch)
    size = pixels.shape[-1]
    notes = () if _size(config) else (f"The configuration has no image_size; assumed are images of {size} x {size}.",)
    task = type(model).__name__.rpartition("For")[2]
    if task == "MaskedImageModeling":
        patches = (size // config.patch_size) ** 2
        return Example({"pixel_values": pixels, "bool_masked_pos": torch.empty(
            batch, patches, dtype=torch.bool, device="meta")}, notes)  # fmt: skip
    if task == "SemanticSegmentation":
        return Example({"pixel_values": pixels, "labels": _ids(batch, size, size)}, notes)
    if task == "PreTraining":
        return Example({"pixel_values": pixels}, notes)
    if getattr(config, "is_encoder_decoder", False) or "VisionEncoderDecoder" in type(model).__name__:
        return Example({"pixel_values": pixels, "labels": _ids(batch, seq or USUAL_SEQUENCE)}, notes)
    return Example({"pixel_values": pixels, "labels": _ids(batch)}, notes)


def _of_sound(model: Any, batch: int, seq: int | None, seconds: float | None) -> Example:
    config, task = model.config, type(model).__name__.rpartition("For")[2]
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram of one length, as AST takes
        length = config.max_length / FRAMES
        if seconds not in (None, length):
            raise ShapeError(f"{type(model).__name__} takes {length:g} seconds of audio; received seconds={seconds:g}.")
        sound = torch.empty(batch, config.max_length, config.num_mel_bins, device="meta")
        return Example({"input_values": sound, "labels": _ids(batch)})
    length = USUAL_SECONDS if seconds is None else seconds
    sound = torch.empty(batch, int(length * RATE), device="meta")
    labels = _ids(batch, max(1, int(length * 15))) if task == "CTC" else _ids(batch)  # about 15 letters a second
    return Example({"input_values": sound, "labels": labels}, () if seconds else _assumed(length))


def _of_spectrogram(model: Any, batch: int, seq: int | None, seconds: float | None) -> Example:
    config = model.config
    fixed = getattr(config, "max_source_positions", None)
    length = seconds or USUAL_SECONDS
    notes = () if seconds else _assumed(length)
    if fixed is not None and config.model_type == "whisper":
        length, notes = 2 * fixed / FRAMES, ()
        if seconds not in (None, length):
            raise ShapeError(f"{type(model).__name__} takes {length:g} seconds of audio; received seconds={seconds:g}.")
    features = torch.empty(batch, config.num_mel_bins, int(length * FRAMES), device="meta")
    most = getattr(config, "max_target_positions", None)
    tokens = seq if seq is not None else most or USUAL_SEQUENCE
    if most is not None and tokens > most:
        raise ShapeError(f"seq={tokens} is longer than the {most} positions of {type(model).__name__}'s decoder.")
    return Example({"input_features": features, "labels": _ids(batch, tokens)}, notes)


def _assumed(seconds: float) -> tuple[str, ...]:
    return (f"Assumed are {seconds:g} seconds of audio in a sample; --seconds gives another length.",)


def learned_positions(model: nn.Module, most: int | None) -> int | None:
    """The length of a model's tables of learned positions; None where it has none."""
    lengths = [
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS
    ]
    if not lengths:
        return None
    return min(lengths) if most is None else min(most, *lengths)


_POSITIONS = ("wpe", "position_embeddings", "position_embedding", "embed_positions", "positions_embed")


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def _size(config: Any) -> Any:
    return getattr(config, "image_size", None)


def _pixels(config: Any, batch: int) -> torch.Tensor:
    size = _size(config) or USUAL_IMAGE
    high, wide = (size, size) if isinstance(size, int) else size[-2:]
    return torch.empty(batch, getattr(config, "num_channels", 3), high, wide, device="meta")
