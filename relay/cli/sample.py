"""The command `relay sample`: generate text with a trained GPT.

The model runs in plain PyTorch on the CPU and reads the whole context again for every byte, which is quick enough for a
few hundred bytes of a small model. This is not an inference engine. Invariant: the same weights, prompt and seed give
the same text on the same machine.
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
    """`count` bytes that follow the prompt, drawn from the model's distribution; the likeliest at temperature 0."""
    import torch

    # The model needs at least one byte of input; new text starts after a line break.
    text = torch.tensor([list(prompt or b"\n")])  # (1, T)
    longest = model.embedding.position.num_embeddings
    random = torch.Generator().manual_seed(seed)
    written = bytearray()
    with torch.no_grad():
        for _ in range(count):
            scores = model(text[:, -longest:]).logits[0, -1]  # (V)
            if temperature > 0:
                # The largest score is moved to 0, so that a tiny temperature gives no infinities.
                probabilities = torch.softmax((scores - scores.max()).double() / temperature, dim=0)
                following = torch.multinomial(probabilities, 1, generator=random)
            else:
                following = scores.argmax().reshape(1)
            text = torch.cat([text, following[None]], dim=1)
            written.append(int(following))
    return bytes(written)


@click.command()
@click.argument("folder", default=DEFAULT_FOLDER, type=click.Path(path_type=Path))
@click.option("--prompt", default=DEFAULT_PROMPT, show_default=True, help="The text to continue.")
@click.option("--bytes", "count", default=300, show_default=True, type=click.IntRange(min=1), help="Bytes to generate.")
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Randomness of the text: 0 takes the likeliest byte every time, 1 samples from the model's distribution.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of the sampling.")
@json_option
def sample(folder: Path, prompt: str, count: int, temperature: float, seed: int, as_json: bool) -> None:
    """Print text that the model in FOLDER (by default runs/latest) writes.

    \b
    Examples:
      relay sample
      relay sample runs/latest --prompt "class " --bytes 500 --temperature 0.7
      relay sample --json
    """
    from relay.models import gpt_folder

    model = gpt_folder.load(folder)
    started = time.perf_counter()
    start = os.fsencode(prompt)  # the exact bytes on the command line
    written = generate(model, start, count, temperature, seed)
    seconds = time.perf_counter() - started
    text = (start + written).decode(errors="replace")
    if as_json:
        print_json({"text": text, "prompt_bytes": len(start), "bytes": count, "seconds": seconds})
    else:
        click.echo(text)
