"""The folder of a model: what it holds, what it can learn, its tokenizer, and the model with its weights streamed in.

Weights are read one tensor at a time by `relay.models.load_weights`; adapters are in `relay.models.adapters`.
Invariant: a folder that cannot be trained is refused, in one line, before any weight is read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from relay.errors import RelayError
from relay.finetuning.data.labels import Classes
from relay.models import empty_weights, load_weights
from relay.models.load_pretrained import stored_names

AUTO = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}
AFTER_PADDING = (
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "xmod",
)  # fmt: skip
"""Kinds of models beside RoBERTa's whose positions begin after that of padding."""

LONGEST = 1024
"""Tokens of a row where neither --seq nor the model sets a smaller number."""


class ModelFolder(NamedTuple):
    """A folder with a model, or with adapters and the folder of the model that they belong to.

    `config` is that of the model that is trained, `stored` that of the weights: they differ for adapters with a head.
    """

    given: str
    folder: Path
    adapter: Path | None
    config: Any
    stored: Any

    @property
    def own_task(self) -> str | None:
        """What the folder's own head learns; None for a bare model or another head."""
        return _task_of(self.config)

    @property
    def stored_task(self) -> str | None:
        """What the head learns that is among the folder's weights."""
        return _task_of(self.stored)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """What the folder's weights are stored in, as its configuration has it."""
        found = getattr(self.config, "dtype", None)
        found = getattr(torch, found, None) if isinstance(found, str) else found
        return found if isinstance(found, torch.dtype) else torch.float32


def _task_of(config: Any) -> str | None:
    """What the head of a configuration's architecture learns."""
    name = str((getattr(config, "architectures", None) or [""])[0])
    if name.endswith("ForSequenceClassification"):
        one = getattr(config, "problem_type", None) == "regression" or config.num_labels == 1
        return "regression" if one else "classification"
    if name.endswith("ForTokenClassification"):
        return "token-classification"
    two = ("Generation", "LMHeadModel", "EncoderDecoderModel")
    if getattr(config, "is_encoder_decoder", False) and name.endswith(two):
        return "seq2seq"
    return "causal" if name.endswith(("ForCausalLM", "LMHeadModel")) else None


def open_folder(given: str) -> ModelFolder:
    """The model of that folder, or of that name where the hub can be reached. Raises RelayError."""
    folder, adapter = _located(given), None
    if (folder / "adapter_config.json").is_file():
        from peft import PeftConfig

        adapter = folder
        base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
        if not base:
            raise RelayError(f"{folder}/adapter_config.json does not name the model that the adapters belong to.")
        folder = _located(base)
    stored = config = _read_config(folder)
    if adapter is not None and (adapter / "config.json").is_file():
        config = _read_config(adapter)
    if kind := _input_besides_text(config):
        raise RelayError(
            f"{given} is a {config.model_type} model, which takes {kind}, and relay finetune trains on text. Train it "
            "with relay.Trainer, whose batches hold what the model takes."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise RelayError(
            f"{given} is quantized by its library, as the quantization_config in its config.json has it, so its "
            "weights cannot be trained. Use the model that it was made from; --quantize-frozen packs it here."
        )
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            raise RelayError(
                f"{given} is a {config.model_type} model with a {part}, and relay finetune trains on text alone. "
                "Train it with relay.Trainer, whose batches may hold images."
            )
    return ModelFolder(given, folder, adapter, config, stored)


def _read_config(folder: Path) -> Any:
    import transformers

    if not (folder / "config.json").is_file():
        raise RelayError(f"The folder {folder} has no config.json. MODEL is a folder that save_pretrained wrote.")
    try:
        return transformers.AutoConfig.from_pretrained(str(folder))
    except (ValueError, OSError, KeyError) as wrong:
        raise RelayError(f"{folder}/config.json cannot be used: {' '.join(str(wrong).split())[:300]}") from wrong


def _input_besides_text(config: Any) -> str | None:
    """The name of what a model takes in place of tokens, such as pixel_values; None for one that takes tokens."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return None
    found = MODEL_MAPPING[type(config)]
    name = getattr(found[0] if isinstance(found, tuple) else found, "main_input_name", "input_ids")
    return None if name == "input_ids" else str(name)


def _located(given: str) -> Path:
    path = Path(given).expanduser()
    if path.is_dir():
        return path
    if given.count("/") > 1 or given.startswith((".", "/", "~")) or path.exists():
        raise RelayError(f"There is no folder {given!r}. MODEL is a folder that save_pretrained wrote, or a hub name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(given, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))
    except Exception as wrong:  # the hub's client raises errors of its own, of HTTP and of the system
        reason = " ".join(str(wrong).split())[:200]
        raise RelayError(f"There is no folder {given!r}, and the hub gives no model of that name: {reason}") from wrong


def open_tokenizer(model: ModelFolder) -> Any:
    """The folder's tokenizer. Raises RelayError if there is none, or if it is not the model's."""
    from transformers import AutoTokenizer

    folder = model.folder
    if model.adapter is not None and (model.adapter / "tokenizer_config.json").is_file():
        folder = model.adapter
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as wrong:  # each kind of tokenizer fails in its own way
        reason = " ".join(str(wrong).split())[:200]
        raise RelayError(f"The folder {folder} has no tokenizer that can be used: {reason}") from wrong
    if len(tokenizer) > model.vocabulary:
        raise RelayError(
            f"The tokenizer in {folder} has {len(tokenizer):,} tokens, and the model's vocabulary has "
            f"{model.vocabulary:,}: it is not this model's tokenizer."
        )
    return tokenizer


def longest_row(model: ModelFolder, tokenizer: Any, given: int | None) -> int:
    """The most tokens of a row. Raises RelayError for more than the model has positions."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and ("roberta" in config.model_type or config.model_type in AFTER_PADDING):
        limit -= (config.pad_token_id or 0) + 1
    most = getattr(tokenizer, "model_max_length", None)
    if most is not None and most < 10**6:
        limit = most if limit is None else min(limit, most)
    if given is None:
        return LONGEST if limit is None else min(LONGEST, limit)
    if limit is not None and given > limit:
        raise RelayError(
            f"seq={given} is longer than the {limit} positions of {model.given}. Give --seq {limit} or less."
        )
    return given


def build_empty(model: ModelFolder, task: str, classes: Classes, dtype: torch.dtype, padding: int) -> nn.Module:
    """The model without memory for its weights."""
    import transformers

    config = model.config
    if task in ("classification", "token-classification"):
        config.num_labels = len(classes.names)
        config.id2label = dict(enumerate(classes.names))
        config.label2id = {name: number for number, name in enumerate(classes.names)}
    if task == "regression":
        config.num_labels = 1
    if task in ("classification", "regression"):
        config.problem_type = "regression" if task == "regression" else "single_label_classification"
    try:
        with empty_weights():
            built: nn.Module = getattr(transformers, AUTO[task]).from_config(config, dtype=dtype)
    except ValueError as wrong:
        reason = " ".join(str(wrong).split())[:200]
        if reason.startswith("Unrecognized configuration class"):  # a list of all that there are follows
            reason = "models of this kind do not do this task."
        raise RelayError(
            f"{model.given} is a {config.model_type} model, which has no {AUTO[task]}: {reason}"
        ) from wrong
    if task == "causal":
        _check_causal(model, built)
    if task in ("classification", "regression") and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = padding  # where a row ends; set after building, or that token's embedding would not train
    for module in built.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            # It looks for padding in each batch. Rows are padded on the right, where causal layers do not look.
            module.warn_if_padding_and_no_attention_mask = _without_warning  # type: ignore[assignment]
    return built


def _check_causal(model: ModelFolder, built: nn.Module) -> None:
    """Raise RelayError for an encoder that would predict each token from those that follow it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    config: Any = built.config
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False:
        raise RelayError(
            f"{model.given} is a {config.model_type} model whose config.json has is_decoder false: each token attends "
            "to those that follow it, so it is no causal model. Use another model, or for training another --task."
        )


def _without_warning(*_: Any) -> None:
    """Stands for a method that only warns."""


def load(built: nn.Module, model: ModelFolder, new_head: bool) -> list[str]:
    """Stream the weights of the folder into the model. Returns the names of what is new, with a new head."""
    missing: list[str] = []
    if new_head:
        prefix = f"{getattr(built, 'base_model_prefix', '')}."
        missing = [name for name in built.state_dict() if not name.startswith(prefix)] + ["*pooler*"]
    found = load_weights(built, model.folder, allow_missing=missing, allow_unexpected=["*"] if new_head else [])
    if (model.folder / "generation_config.json").is_file() and hasattr(built, "generation_config"):
        from transformers import GenerationConfig

        with contextlib.suppress(OSError, ValueError):
            built.generation_config = GenerationConfig.from_pretrained(str(model.folder))  # type: ignore[assignment]
    return found.missing_keys


def new_poolers(built: nn.Module, model: ModelFolder) -> list[str]:
    """The poolers of a model for a new head that are not among the folder's weights."""
    with contextlib.suppress(RelayError):  # a plan needs no weights
        if any("pooler" in name.split(".") for name in stored_names(model.folder)):
            return []
    return [name for name, _ in built.named_modules() if name.rpartition(".")[2] == "pooler"]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """While open, transformers logs errors alone and draws no progress bars: what matters of it is reported here."""
    try:
        from transformers.utils import logging as library
    except ImportError as absent:
        raise RelayError(
            f"Fine-tuning needs the package {absent.name!r}, which is not installed: pip install -e '.[hf]'"
        ) from absent
    logger = logging.getLogger("transformers")
    before, bars = logger.level, library.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    library.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(before)
        if bars:
            library.enable_progress_bar()
