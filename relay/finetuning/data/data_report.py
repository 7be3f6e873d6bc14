"""What there is to train on, told before the first step: counts, shares, and one example with its mask."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from relay.finetuning.data.batches import Batches, lengths_of
from relay.finetuning.data.fields import Fields
from relay.finetuning.data.labels import Classes
from relay.finetuning.data.tokenise import IGNORED, Tokenised

SHOWN = 240
"""Characters of each piece of the example."""


def data_report(
    found: Tokenised,
    training: Batches,
    held_out: Batches | None,
    fields: Fields,
    classes: Classes,
    tokenizer: Any,
    names: list[str],
) -> tuple[list[str], dict[str, Any]]:
    """The report as lines, and its figures by name."""
    rows = found.rows
    tokens = sum(lengths_of(rows, "input_ids"))
    cut = sum(rows["cut"])
    trained = _trained(rows) if isinstance(rows[0]["labels"], list) else len(rows)
    figures: dict[str, Any] = {
        "rows": found.sources,
        "rows_tokenised": len(rows),
        "rows_dropped": found.dropped,
        "rows_truncated": cut,
        "tokens": tokens,
        "tokens_trained": trained,
        "batches_per_epoch": len(training),
        "held_out_batches": len(held_out) if held_out is not None else 0,
        "padded_share": training.padded_share,
        "fields": {name: value for name, value in fields._asdict().items() if value and name != "kind"},
    }
    lines = [
        f"data            {', '.join(names)}: {found.sources:,} rows, fields {fields}",
        f"tokens          {tokens:,} in {len(rows):,} rows; {cut:,} rows cut to the length of --seq",
    ]
    if found.dropped:
        lines.append(
            f"left out        {found.dropped:,} rows: nothing to train is within --seq; first {found.first_dropped}"
        )
    if classes.names:
        some = ", ".join(classes.names[:12]) + (", ..." if len(classes.names) > 12 else "")
        lines.append(f"classes         {len(classes.names)}: {some}")
    elif isinstance(rows[0]["labels"], list):
        masked = "" if training.task == "seq2seq" else f", {1 - trained / tokens:.1%} are masked"
        lines.append(f"trained         {trained:,} tokens{masked}")
    how = "packed" if training.packed else "of lengths"
    shapes = ", ".join(str(shape.inputs) for shape in training.shapes)
    lines.append(
        f"batches         {len(training):,} an epoch, {how} {shapes}; {training.padded_share:.1%} padding; "
        f"{figures['held_out_batches']:,} held out"
    )
    lines += ["first example   (> is trained)", *example(rows[0], tokenizer)]
    return lines, figures


def _trained(rows: Any) -> int:
    """How many labels are not masked, read in parts."""
    import pyarrow.compute

    labels = (
        pyarrow.compute.list_flatten(part["labels"]) for part in rows.with_format("arrow").iter(batch_size=10_000)
    )
    return sum(len(part) - pyarrow.compute.sum(pyarrow.compute.equal(part, IGNORED)).as_py() for part in labels)


def example(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """A row as text: each run of masked tokens a line that begins with |, each trained one with >."""
    tokens, labels = row["input_ids"], row["labels"]
    if not isinstance(labels, list):
        return [f"  | {_short(tokenizer.decode(tokens))}", f"  > {labels}"]
    if len(labels) != len(tokens):
        return [f"  | {_short(tokenizer.decode(tokens))}", f"  > {_short(tokenizer.decode(labels))}"]
    lines = []
    pairs = list(zip(tokens, labels, strict=True))
    for masked, group in groupby(pairs, key=lambda pair: pair[1] == IGNORED):
        text = tokenizer.decode([token for token, _ in group])
        lines.append(f"  {'|' if masked else '>'} {_short(text)}")
    return lines[:8] + (["  ..."] if len(lines) > 8 else [])


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 60]} ... {shown[-50:]}"
