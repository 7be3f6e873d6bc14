"""The command `relay generate`: text from a Hugging Face model that may be larger than the device, through the relay.

This file holds the options and the output. Reading folders is `relay.finetuning.model_folder`, generating is
`relay.hf.generation`. Invariant: the same folder, prompts and seed give the same text on the same device.
"""

from __future__ import annotations

import time
from typing import Any

import click

from relay.cli.console import json_option, print_json
from relay.cli.shared_options import together, training_option

TRAINER = ("precision", "slots", "layers_per_slot", "resident_layers", "microbatches", "capacity", "host_memory")
"""The options of `relay.Trainer` that matter without training."""

ONE_PIECE = "Here, all prompts together if not given."


@click.command()
@click.argument("folder")
@click.option("--prompt", "prompts", multiple=True, required=True, help="A text to continue. Repeatable: a batch.")
@click.option("--chat", is_flag=True, help="Each prompt is a user's message, rendered by the tokenizer's template.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(min=1), help="New tokens at most.")
@click.option(
    "--temperature",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="0 takes the likeliest token every time; otherwise tokens are drawn from logits divided by it.",
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Draw among the likeliest tokens whose probabilities add up to this.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of the draws.")
@training_option("device")
@together(*[training_option(name) for name in TRAINER if name != "microbatches"])
@training_option("microbatches", default=1, because=ONE_PIECE)
@json_option
@click.pass_context
def generate(
    context: click.Context,
    /,
    folder: str,
    prompts: tuple[str, ...],
    chat: bool,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Print how the model in FOLDER continues prompts. Its layers are sent to the device one after the other.

    FOLDER is what save_pretrained or relay finetune wrote, adapters included, or a name on the hub. Keys and values of
    earlier tokens are kept in host memory.

    \b
    Examples:
      relay generate runs/finetuned --prompt "The shortest way"
      relay generate my-model --prompt "One" --prompt "Two" --tokens 100 --temperature 0.8 --top-p 0.9
      relay generate my-chat-model --chat --prompt "What is a lambda?" --device cuda:0 --resident-layers auto
    """
    for name in ("top_p", "seed"):
        if temperature == 0 and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = name.replace("_", "-")
            raise click.UsageError(
                f"--{flag} is of tokens that are drawn, and without --temperature the likeliest is taken. Give "
                "--temperature 1 too, or leave it out."
            )
    import torch

    from relay.finetuning.data.labels import Classes
    from relay.finetuning.model_folder import build_empty, load, open_folder, open_tokenizer, quiet_transformers
    from relay.hf.generation import generate as continue_prompts
    from relay.models import adapters
    from relay.trainer import Trainer

    with quiet_transformers():
        opened = open_folder(folder)
        tokenizer = open_tokenizer(opened)
        filler = next(one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if one is not None)
        model = build_empty(opened, "causal", Classes((), {}), opened.dtype, filler)
        load(model, opened, new_head=False)
        if opened.adapter is not None:
            model = adapters.load_adapters(model, opened.adapter)
        texts = [_rendered(tokenizer, prompt) if chat else prompt for prompt in prompts]
        rows = [tokenizer(text, add_special_tokens=not chat)["input_ids"] or [filler] for text in texts]
        longest = max(map(len, rows))
        input_ids = torch.tensor([[filler] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        begun = time.perf_counter()
        with Trainer(model.eval(), master_weights="as_given", **options) as trainer:
            output = continue_prompts(
                trainer, model, input_ids, mask, max_new_tokens=tokens, temperature=temperature, top_p=top_p,
                pad_token_id=filler, seed=seed,
            )  # fmt: skip
            peak = trainer._session.device.memory().peak
        seconds = time.perf_counter() - begun
    found = [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in output]
    if as_json:
        answers = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, found, strict=True)]
        print_json({"texts": answers, "seconds": seconds, "device_peak_bytes": peak})
    else:
        for prompt, text in zip(prompts, found, strict=True):
            click.echo(text if chat else prompt + text)


def _rendered(tokenizer: Any, prompt: str) -> str:
    """A user's message as the template of the tokenizer has it, up to where the assistant begins."""
    if not getattr(tokenizer, "chat_template", None):
        raise click.UsageError("--chat needs a tokenizer with a chat template, and this folder's has none.")
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return text
