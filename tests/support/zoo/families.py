"""Model families, each as small as its architecture allows, with random weights and batches for it.

They are other people's models, taken as they are: `transformers` classes built from configurations, and torch's own.
Nothing here knows the relay, and nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

WIDTH = 16
VOCABULARY = 48
LENGTH = 8
IMAGE = 8
IGNORED = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """`make(dropout)` gives the model, `draw(rows, seed)` a batch for it.

    `frozen` is a part of the names of parameters that one might well freeze, `shifted` says that the model predicts
    the next label, so that the first one of a row counts for nothing.
    `needs` is the library that has the model.
    """

    make: Callable[[float], nn.Module]
    draw: Callable[[int, int], Batch]
    shifted: bool = False
    frozen: str = "embed"
    needs: str = "transformers"

    @property
    def available(self) -> bool:
        """Whether the library is installed."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None

    def shares(self, pieces: Sequence[Batch]) -> list[float]:
        """Each piece's share in the mean loss: of its labels that count, or of its rows where there are none."""
        counts = [self._count(piece) for piece in pieces]
        return [count / sum(counts) for count in counts]

    def _count(self, piece: Batch) -> int:
        if "labels" not in piece:
            return len(piece["targets"])
        labels = piece["labels"]
        return int((labels[:, 1:] if self.shifted else labels).ne(IGNORED).sum())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(rows: int, seed: int) -> Batch:
    """Token ids which are their own labels, as causal models shift them themselves."""
    tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=_generator(seed))
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked_text(rows: int, seed: int) -> Batch:
    """Padded rows with an attention mask, and labels at every position that is not padding."""
    tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=_generator(seed))
    lengths = torch.arange(rows) % (LENGTH // 2) + LENGTH // 2
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {
        "input_ids": torch.where(mask, tokens, 1),
        "attention_mask": mask.long(),
        "labels": torch.where(mask, tokens, IGNORED),
    }


def classified_text(rows: int, seed: int) -> Batch:
    """Padded rows with one label each."""
    batch = masked_text(rows, seed)
    return {**batch, "labels": torch.randint(0, 3, (rows,), generator=_generator(seed + 1000))}


def translated_text(rows: int, seed: int) -> Batch:
    """A source with its mask, and a shorter target."""
    batch = masked_text(rows, seed)
    return {**batch, "labels": torch.randint(3, VOCABULARY, (rows, LENGTH - 3), generator=_generator(seed + 1000))}


def images(rows: int, seed: int) -> Batch:
    """Pictures with one label each."""
    generator = _generator(seed)
    return {
        "pixel_values": torch.randn(rows, 3, IMAGE, IMAGE, generator=generator),
        "labels": torch.randint(0, 3, (rows,), generator=generator),
    }


def vectors(rows: int, seed: int) -> Batch:
    """Sequences of vectors, and what should come out."""
    generator = _generator(seed)
    return {
        "inputs": torch.randn(rows, LENGTH, WIDTH, generator=generator),
        "targets": torch.randn(rows, LENGTH, WIDTH, generator=generator),
    }


# **** transformers ****

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def _gpt2(dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=3, n_head=2, bos_token_id=0,
            eos_token_id=2, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def _bert_like(model: str, config: str, **more: Any) -> Callable[[float], nn.Module]:
    def make(dropout: float) -> nn.Module:
        import transformers

        settings = {**_SIZES, "max_position_embeddings": LENGTH + 2, **more}
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            settings[name] = dropout
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


def _decoder(model: str, config: str, **more: Any) -> Callable[[float], nn.Module]:
    def make(dropout: float) -> nn.Module:
        import transformers

        settings = {**_SIZES, "max_position_embeddings": 4 * LENGTH, "num_key_value_heads": 1, **more}
        return getattr(transformers, model)(getattr(transformers, config)(attention_dropout=dropout, **settings))

    return make


def _t5(tied: bool) -> Callable[[float], nn.Module]:
    def make(dropout: float) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=2,
                dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
        if not tied:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return make


def _opt(dropout: float) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=LENGTH, word_embed_proj_dim=WIDTH, dropout=dropout, pad_token_id=1,
        )
    )  # fmt: skip


def _bloom(dropout: float) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=2, hidden_dropout=dropout,
            attention_dropout=dropout, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        )
    )  # fmt: skip


def _distilbert(dropout: float) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    return DistilBertForMaskedLM(
        DistilBertConfig(
            vocab_size=VOCABULARY, dim=WIDTH, hidden_dim=2 * WIDTH, n_layers=2, n_heads=2, dropout=dropout,
            attention_dropout=dropout, max_position_embeddings=LENGTH, pad_token_id=1,
        )
    )  # fmt: skip


def _bart(dropout: float) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, dropout=dropout,
            max_position_embeddings=2 * LENGTH, pad_token_id=1, bos_token_id=0, eos_token_id=2,
            decoder_start_token_id=0, forced_eos_token_id=None,
        )
    )  # fmt: skip


# **** torch's own ****


class Output(NamedTuple):
    """What the models below return."""

    loss: Tensor
    value: Tensor


class Translator(nn.Module):
    """nn.Transformer as it comes: an encoder and a decoder, each with a list of layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, dropout, batch_first=True)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        mask = self.body.generate_square_subsequent_mask(targets.shape[1])
        value = self.body(inputs, targets.roll(1, 1), tgt_mask=mask, tgt_is_causal=True)
        return Output(nn.functional.mse_loss(value, targets), value)


class Encoder(nn.Module):
    """nn.TransformerEncoder as it comes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.body(inputs)
        return Output(nn.functional.mse_loss(value, targets), value)


class Residual(nn.Module):
    """A block as in a ResNet: two convolutions, each with BatchNorm, and a shortcut."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        inner = torch.relu(self.first_norm(self.first(value)))
        return torch.relu(value + self.drop(self.second_norm(self.second(inner))))


class ResidualNet(nn.Module):
    """A small ResNet: stages of blocks in Sequentials, with a strided convolution and a pooling between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.embed_norm = nn.BatchNorm2d(4)
        self.stage1 = nn.Sequential(Residual(4, dropout), Residual(4, dropout))
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.stage2 = nn.Sequential(Residual(8, dropout), Residual(8, dropout))
        self.head = nn.Linear(8, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
        value = torch.relu(self.embed_norm(self.stem(pixel_values)))
        value = self.stage1(nn.functional.max_pool2d(value, 2))
        value = self.stage2(self.down(value)).mean((2, 3))
        scores = self.head(value)
        return Output(nn.functional.cross_entropy(scores, labels), scores)


def convolutions(dropout: float) -> list[nn.Module]:
    """A convolutional network as a list of modules."""
    return [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Residual(4, dropout),
        Residual(4, dropout),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ]


FAMILIES: dict[str, Family] = {
    "gpt2": Family(_gpt2, text, shifted=True, frozen="wpe"),
    "bert-mlm": Family(_bert_like("BertForMaskedLM", "BertConfig", tie_word_embeddings=False), masked_text),
    "bert-tied": Family(_bert_like("BertForMaskedLM", "BertConfig"), masked_text),
    "bert-classifier": Family(_bert_like("BertForSequenceClassification", "BertConfig", num_labels=3), classified_text),
    "roberta": Family(_bert_like("RobertaForMaskedLM", "RobertaConfig"), masked_text),
    "llama": Family(_decoder("LlamaForCausalLM", "LlamaConfig"), masked_text, shifted=True),
    "mistral": Family(_decoder("MistralForCausalLM", "MistralConfig", sliding_window=3), text, shifted=True),
    "qwen3": Family(
        _decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, tie_word_embeddings=True),
        masked_text,
        shifted=True,
    ),
    "gemma": Family(_decoder("GemmaForCausalLM", "GemmaConfig", head_dim=8), masked_text, shifted=True),
    "mixtral": Family(
        _decoder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, output_router_logits=False),
        masked_text,
        shifted=True,
    ),
    "t5": Family(_t5(tied=False), translated_text, frozen="shared"),
    "t5-tied": Family(_t5(tied=True), translated_text, frozen="shared"),
    "opt": Family(_opt, masked_text, shifted=True),
    "bloom": Family(_bloom, masked_text, shifted=True),
    "albert": Family(_bert_like("AlbertForMaskedLM", "AlbertConfig", embedding_size=8), masked_text),
    "distilbert": Family(_distilbert, masked_text),
    "bart": Family(_bart, translated_text),
    "vit": Family(
        _bert_like("ViTForImageClassification", "ViTConfig", image_size=IMAGE, patch_size=4, num_labels=3),
        images,
    ),
    "nn.Transformer": Family(Translator, vectors, frozen="encoder.layers.0", needs=""),
    "nn.TransformerEncoder": Family(Encoder, vectors, frozen="layers.0", needs=""),
    "resnet": Family(ResidualNet, images, needs=""),
}
