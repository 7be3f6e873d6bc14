"""Letting a trained GPT write: `generate`, and the command `relay sample`.

It runs the model in plain PyTorch on the CPU, the whole context anew for every byte: simple, and quick enough
for a few hundred bytes of a small model. It is not an inference engine. Invariant: the same weights, prompt
and seed give the same text on the same machine.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relay.cli.console import json_option, print_json

if TYPE_CHECKING:
    from relay.models import GPT

DEFAULT_FOLDER = "runs/latest"
DEFAULT_PROMPT = "def "


def generate(model: "GPT", prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """`count` more bytes after the prompt, each drawn from the model's own odds (the likeliest at 0)."""
    import torch

    # A model must read something before it can write; a line break is where new text starts.
    text = torch.tensor([list(prompt or b"\n")])  # (1, T)
    longest = model.embedding.position.num_embeddings
    random = torch.Generator().manual_seed(seed)
    written = bytearray()
    with torch.no_grad():
        for _ in range(count):
            scores = model(text[:, -longest:]).logits[0, -1]  # (V)
            if temperature > 0:
                # The largest becomes 0 first: a tiny temperature must not turn scores into infinities.
                odds = torch.softmax((scores - scores.max()).double() / temperature, dim=0)
                following = torch.multinomial(odds, 1, generator=random)
            else:
                following = scores.argmax().reshape(1)
            text = torch.cat([text, following[None]], dim=1)
            written.append(int(following))
    return bytes(written)


@click.command()
@click.argument("folder", default=DEFAULT_FOLDER, type=click.Path(path_type=Path))
@click.option("--prompt", default=DEFAULT_PROMPT, show_default=True, help="The text to go on from.")
@click.option("--bytes", "count", default=300, show_default=True, type=click.IntRange(min=1), help="How many to write.")
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Below 1 plays safe, above 1 takes risks, 0 always takes the likeliest byte.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Another seed, another text.")
@json_option
def sample(folder: Path, prompt: str, count: int, temperature: float, seed: int, as_json: bool) -> None:
    """Let the model in FOLDER (runs/latest by default) write some text.

    \b
    Examples:
      relay sample
      relay sample runs/latest --prompt "class " --bytes 500 --temperature 0.7
      relay sample --json
    """
    from relay.models import gpt_folder

    model = gpt_folder.load(folder)
    started = time.perf_counter()
    start = os.fsencode(prompt)  # the very bytes that were typed
    written = generate(model, start, count, temperature, seed)
    seconds = time.perf_counter() - started
    text = (start + written).decode(errors="replace")
    if as_json:
        print_json({"text": text, "prompt_bytes": len(start), "bytes": count, "seconds": seconds})
    else:
        click.echo(text)
