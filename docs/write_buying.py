"""Ten questions of a buyer with the commands that answer them: writes docs/buying.md with what these print.

    python docs/write_buying.py [--out docs/buying.md] [--only NUMBER]

Prices in the commands are examples, and the user's own go there. Every figure is a prediction with its range
(docs/validation.md). The last question measures the machine that writes the page. Invariant: what the page shows below
a command is what the command prints.
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
from pathlib import Path

from click.testing import CliRunner

from relay.cli import main

PAGE = Path(__file__).parent / "buying.md"

MODEL = "--model llama-3-8b --seq 2048 --batch 16"
PRICES = "--price rtx-4090=0.4/h,a100-sxm-80gb=1.6/h,h100-sxm=2.5/h"
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Which card trains an 8B model for a billion tokens at the lowest rent?",
     (f"relay plan {MODEL} --host-memory 256GB --compare rtx-4090,a100-sxm-80gb,h100-sxm --tokens 1e9 {PRICES}",)),
    ("And if I buy the machine, with what power costs me?",
     (f"relay plan {MODEL} --host-memory 256GB --compare rtx-4090,rtx-3090 --tokens 10e9 "
      "--buy rtx-4090=3500,rtx-3090=2000 --years 3 --power-price 0.30/kWh",)),
    ("How much CO2 is that?",
     (f"relay plan {MODEL} --host-memory 256GB --compare rtx-4090 --tokens 10e9 --grid 400g/kWh --pue 1.2",)),
    ("Does a model with 50 billion parameters fit a 16 GB card with 512 GB of host memory, and what would help?",
     ("relay simulate --layers 62 --hidden 8192 --device v100-sxm2-16gb --host-memory 512GB --stash host "
      "--loss-scale fixed",
      "relay simulate --layers 62 --hidden 8192 --device v100-sxm2-16gb --host-memory 512GB --stash host "
      "--loss-scale fixed --state-dtype int8 --microbatches 8 --tokens 1e9")),
    ("How long does training to the compute-optimal number of tokens take?",
     ("relay plan --model gpt2-xl --seq 1024 --batch 32 --compare h100-sxm,rtx-4090 --chinchilla",)),
    ("Is a faster link or a faster card the better spent money?",
     ("relay simulate --model llama-3-8b --seq 512 --batch 8 --device rtx-4090 --host-memory 256GB --stash host",)),
    ("Do two cards in one host pay?",
     ("relay simulate --model llama-3-8b --seq 2048 --batch 16 --device rtx-4090 --host-memory 256GB --stash host",
      "relay simulate --model llama-3-8b --seq 2048 --batch 16 --device rtx-4090 --host-memory 256GB --stash host "
      "--count 2")),
    ("Do more hosts pay, and where does it stop?",
     ("relay plan --model llama-3-8b --seq 2048 --batch 16 --device rtx-4090 --host-memory 256GB --hosts 8 "
      "--network 25GB/s",)),
    ("What is the longest sequence that I can train on this card?",
     ("relay plan --model llama-3-8b --seq 2048 --batch 1 --device rtx-4090 --host-memory 256GB "
      "--head-chunk-tokens 1024 --longest",)),
    ("How sure are these figures, and how do I make them surer?",
     ("relay calibrate --device cpu --out here.json", "relay simulate --model gpt2 --calibration here.json --seq 64")),
)  # fmt: skip

INTRODUCTION = """# What to rent or buy

Written by `python docs/write_buying.py`. Each question is answered by one command, or two, and the answer is what it
printed. Prices are yours: no preset has one. Every figure is a prediction with its range; [validation](validation.md)
says where the ranges come from. `--csv FILE` writes a comparison as a table and `--picture FILE.png` draws it.
"""


def answer(command: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    if result.exit_code not in (0, 1):  # 1: it does not fit, which is an answer
        raise SystemExit(f"{command}\n{result.output}")
    return result.stdout.rstrip()


def section(number: int) -> str:
    """A question with its commands and their answers. Files that the commands write go to a temporary folder."""
    question, commands = QUESTIONS[number]
    lines = [f"## {number + 1}. {question}", ""]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for command in commands:
                lines += ["```sh", command, "```", "", "```text", answer(command), "```", ""]
        finally:
            os.chdir(before)
    return "\n".join(lines)


def main_page() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--only", type=int, help="print the section of one question, and write nothing")
    options = parser.parse_args()
    if options.only is not None:
        print(section(options.only - 1))
        return
    text = "\n".join([INTRODUCTION, *(section(number) for number in range(len(QUESTIONS)))])
    options.out.write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main_page()
