"""Makes something to fine-tune without downloading: a small random model of Llama's shape, its tokenizer, and chats.

The chats ask what a name of Python's library is, and answer with its documentation. The tokenizer is trained on them.

    python examples/documentation_chats.py
    relay finetune small-llama --data chats.jsonl --lr 3e-3
"""

import argparse
import json
import pydoc
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

MODULES = ("json", "pathlib", "collections", "textwrap", "random", "statistics", "string", "shutil", "functools")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>")


def documentation(count: int, characters: int = 160) -> list[tuple[str, str]]:
    """Names of functions and classes of Python's library with the beginning of their documentation."""
    found: list[tuple[str, str]] = []
    for module in MODULES:
        thing = pydoc.locate(module)
        for name in sorted(dir(thing)):
            text = pydoc.getdoc(getattr(thing, name))
            if text and not name.startswith("_"):
                found.append((f"{module}.{name}", " ".join(text.split())[:characters]))
    random.Random(0).shuffle(found)
    return (found * (count // len(found) + 1))[:count]


def conversations(count: int, characters: int = 160) -> list[dict[str, Any]]:
    """Rows with a question about a name and its documentation as the answer."""
    return [
        {"messages": [{"role": "user", "content": f"What is {name}?"}, {"role": "assistant", "content": text}]}
        for name, text in documentation(count, characters)
    ]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """A file with one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train_tokenizer(vocabulary: int = 400, template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE tokenizer, trained on the documentation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator((f"What is {name}? {text}" for name, text in documentation(200)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    return tokenizer


def save_folder(folder: Path, model_class: Any, config: Any, tokenizer: Any) -> Path:
    """A folder with a random model of that class and configuration, and the tokenizer."""
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_llama(folder: Path, tokenizer: Any, **sizes: Any) -> Path:
    """A folder with a random model of Llama's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": len(tokenizer)}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return save_folder(folder, LlamaForCausalLM, LlamaConfig(**{**shape, **special, **sizes}), tokenizer)


def main() -> None:
    """Write the model's folder and the chats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("small-llama"))
    parser.add_argument("--data", type=Path, default=Path("chats.jsonl"))
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    given = parser.parse_args()
    sizes = {"num_hidden_layers": given.layers, "hidden_size": given.hidden, "intermediate_size": 2 * given.hidden}
    save_llama(given.model, train_tokenizer(), **sizes)
    write_jsonl(given.data, conversations(given.rows))
    print(f"{given.model} is a random model with its tokenizer; {given.data} has {given.rows} conversations.")


if __name__ == "__main__":
    main()
