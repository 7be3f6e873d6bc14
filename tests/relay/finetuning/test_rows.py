"""From files to batches: fields, masks, packing, order and bad input. Nothing is compiled here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.documentation_chats import conversations, save_llama, write_jsonl
from relay.errors import RelayError
from relay.finetuning.data.batches import Batches, trained_targets
from relay.finetuning.data.chat import CHATML
from relay.finetuning.data.packing import check_separate
from relay.finetuning.data.prepare import PreparedData, find_labelling, prepare_data, read
from relay.finetuning.data.tokenise import Tokeniser
from relay.finetuning.model_folder import open_folder
from relay.finetuning.options import settings_of
from tests.support import reference
from tests.support.command_line import relay

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is json?"},
    {"role": "assistant", "content": "A format."},
    {"role": "user", "content": "And pathlib?"},
    {"role": "assistant", "content": "Paths."},
]
TAGGED = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}{% else %}{{ message['content'] + '</s>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' and "
    "loop.last %}{{ '(thought) ' }}{% endif %}{{ message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As templates of reasoning models: the last turn is rendered otherwise than those before it."""


Prepare = Callable[..., PreparedData]


@pytest.fixture
def prepare(llama: Path, place: Path) -> Prepare:
    def of(data: Path, template: str | None = None, length: int = 128, **options: Any) -> PreparedData:
        source = open_folder(str(llama))
        settings = settings_of({"cache": str(place / "cache"), "batch": 4, "held_out": 0.0, **options})
        files = read([str(data)], str(place / "cache"))
        tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
        tokenizer.chat_template = template or tokenizer.chat_template
        labelling = find_labelling(files, source, settings)
        return prepare_data(files, labelling, tokenizer, length, source.vocabulary, 0, settings)

    return of


def trained_text(row: dict[str, Any], tokenizer: Any) -> str:
    pairs = zip(row["input_ids"], row["labels"], strict=True)
    return str(tokenizer.decode([token for token, label in pairs if label >= 0]))


@pytest.mark.parametrize("template", [None, TAGGED])
def test_only_what_the_assistant_wrote_is_trained_with_the_token_that_ends_it(
    template: str | None, prepare: Prepare, tokenizer: Any, tmp_path: Path
) -> None:
    data = prepare(write_jsonl(tmp_path / "talk.jsonl", [{"messages": TALK}]), template)
    row = data.training.rows[0]
    assert trained_text(row, tokenizer) == "A format.</s>Paths.</s>"
    whole = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert row["input_ids"] == whole


def test_a_template_that_renders_earlier_turns_otherwise_masks_the_same_turns(
    prepare: Prepare, tokenizer: Any, tmp_path: Path
) -> None:
    data = prepare(write_jsonl(tmp_path / "talk.jsonl", [{"messages": TALK}]), FORGETFUL)
    assert trained_text(data.training.rows[0], tokenizer) == "A format.</s>(thought) Paths.</s>"


def test_the_template_called_chatml_marks_the_assistant_by_itself(
    prepare: Prepare, tokenizer: Any, tmp_path: Path
) -> None:
    data = prepare(write_jsonl(tmp_path / "talk.jsonl", [{"messages": TALK}]), length=256, chat_template="chatml")
    assert trained_text(data.training.rows[0], tokenizer) == "A format.<|im_end|>Paths.<|im_end|>"
    assert "generation" in CHATML


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Yes."}]}, "Yes.</s>"),
        ({"prompt": "1 + 1 =", "completion": " 2"}, " 2</s>"),
        ({"question": "Why?", "answer": " So."}, " So.</s>"),
        ({"text": "A text."}, "A text.</s>"),
        ({"prompt": TALK[1:2], "completion": TALK[2:3]}, "A format.</s>"),
        ({"messages": [TALK[1], {"role": "assistant", "content": [{"type": "text", "text": "A "}, {"text": "b."}]}]},
         "A b.</s>"),
    ],
)  # fmt: skip
def test_fields_with_the_usual_names_are_found(
    row: dict[str, Any], trained: str, prepare: Prepare, tokenizer: Any, tmp_path: Path
) -> None:
    data = prepare(write_jsonl(tmp_path / "rows.jsonl", [row, row]))
    assert trained_text(data.training.rows[0], tokenizer) == trained


def test_all_kinds_of_files_give_the_same_rows(prepare: Prepare, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}:", "completion": f" number {number}"} for number in range(6)]
    table = datasets.Dataset.from_list(rows)
    table.to_csv(str(tmp_path / "rows.csv"))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    files = [tmp_path / name for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "saved")]
    found = [[row["input_ids"] for row in prepare(file).training.rows] for file in files]
    assert all(one == found[0] for one in found)
    (tmp_path / "a.txt").write_text("one two three " * 60)
    text = prepare(tmp_path / "a.txt", length=32).training.rows
    assert [len(row["input_ids"]) for row in text][:-1] == [32] * (len(text) - 1)


def test_a_second_run_reads_tokens_from_the_cache_and_a_changed_file_does_not(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", conversations(5))
    first = prepare(file).training.rows[0]

    def fail(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(Tokeniser, "rows", fail)
    assert prepare(file).training.rows[0] == first
    write_jsonl(file, conversations(6))
    with pytest.raises(AssertionError, match="tokenised again"):
        prepare(file)


def test_packed_rows_have_the_loss_and_the_gradients_of_separate_rows(
    prepare: Prepare, llama: Path, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", conversations(9, characters=50))
    found = []
    for pack in (False, True):
        model = transformers.AutoModelForCausalLM.from_pretrained(llama)
        batches = prepare(file, pack=pack, batch=1).training
        total, targets = 0.0, 0
        for step in range(len(batches)):
            batch = batches.batch(step)
            count = trained_targets(batch, "causal")
            loss = model(**batch, use_cache=False).loss * count
            loss.backward()
            total, targets = total + loss.item(), targets + count
        found.append((total, targets, [parameter.grad for parameter in model.parameters()], len(batches)))
    (loss, targets, gradients, rows), (packed_loss, packed_targets, packed_gradients, packed_rows) = found
    assert packed_rows < rows
    assert packed_targets == targets
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    for ours, theirs in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * float(theirs.abs().max()))


def test_a_model_that_would_mix_packed_documents_is_refused_by_name(llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    check_separate(model, 400)
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(RelayError, match=r"MambaForCausalLM .*packed"):
        check_separate(transformers.MambaForCausalLM(config), 50)


def rows_of(batches: Batches, epoch: int) -> list[tuple[int, ...]]:
    """The rows of an epoch, without padding and without rows that train nothing."""
    found = []
    for step in range(epoch * len(batches), (epoch + 1) * len(batches)):
        batch = batches.batch(step)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            if labels.ge(0).any():
                found.append(tuple(one for one in ids.tolist() if one))
    return found


def test_each_epoch_has_every_row_once_in_another_order_and_never_a_held_out_one(
    prepare: Prepare, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", conversations(53))
    data = prepare(file, held_out=0.2)
    assert data.held_out is not None
    first, second = rows_of(data.training, 0), rows_of(data.training, 1)
    assert first != second
    assert sorted(first) == sorted(second)
    apart = [tuple(row["input_ids"]) for row in data.held_out.rows]
    assert len(apart) == 11
    assert len(first) + len(apart) == 53
    assert len(set(first) & set(apart)) == len({*first} & {*apart})
    origins = [{(row["file"], row["row"]) for row in rows} for rows in (data.training.rows, data.held_out.rows)]
    assert not origins[0] & origins[1]


@pytest.mark.parametrize("pack", [False, True])
def test_workers_prepare_the_same_batches_and_a_later_start_goes_on_with_them(
    pack: bool, prepare: Prepare, tmp_path: Path
) -> None:
    batches = prepare(write_jsonl(tmp_path / "rows.jsonl", conversations(30)), pack=pack).training
    alone = list(batches.steps(0, 12, workers=0))
    for later in (list(batches.steps(0, 12, workers=2)), [*alone[:5], *batches.steps(5, 12, workers=2)]):
        for ours, theirs in zip(later, alone, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_report_counts_rows_tokens_masks_and_what_was_cut(prepare: Prepare, tmp_path: Path) -> None:
    rows = [*conversations(10, characters=40), {"messages": [{"role": "user", "content": "long " * 80}, TALK[2]]}]
    data = prepare(write_jsonl(tmp_path / "rows.jsonl", rows), length=64)
    assert data.figures["rows"] == 11
    assert data.figures["rows_dropped"] == 1
    assert "row 11" in "\n".join(data.lines)
    labels = [label for row in data.training.rows for label in row["labels"]]
    assert data.figures["tokens"] == len(labels)
    assert data.figures["tokens_trained"] == sum(label != reference.IGNORED for label in labels)


def test_fields_that_are_not_used_are_reported(prepare: Prepare, tmp_path: Path) -> None:
    data = prepare(write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK, "tools": [{"name": "f"}]}] * 2))
    assert "not used        fields tools" in data.lines


def test_prompts_that_are_messages_take_a_chat_template(prepare: Prepare, tokenizer: Any, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": TALK[:2], "completion": TALK[2:3]}] * 2)
    data = prepare(rows, chat_template="chatml")
    assert trained_text(data.training.rows[0], tokenizer).rstrip() == "A format.<|im_end|>"


BAD: dict[str, tuple[list[Any], list[str], str]] = {
    "no such field": ([{"messages": TALK}], ["--messages", "talk"], "field 'talk': There is no such field"),
    "nothing known": ([{"a": 1, "b": 2}], [], "No field is recognised among a, b"),
    "no turn": ([{"messages": TALK}, {"messages": TALK[:2]}], [], "row 2, field 'messages': The conversation has no"),
    "no role": ([{"messages": [{"content": "Hi."}]}], [], "row 1, field 'messages': Message 1 lacks role"),
    "empty": ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}], [],
              "row 2, field 'completion': All tokens of the row are masked"),
    "null": ([{"text": "a b c"}, {"text": None}], [], "row 2, field 'text': The field is empty"),
    "no rows": ([], [], "holds no rows"),
    "too long": ([{"text": "a b c"}], ["--seq", "4096"], "longer than the 256 positions"),
    "two kinds": ([{"text": "a"}], ["--text", "text", "--messages", "m"], "two kinds of data"),
    "label of text": ([{"text": "a", "label": 1}], ["--task", "causal", "--label", "label"], "learns from text alone"),
    "merge alone": ([{"text": "a b"}], ["--merge"], "--merge is for a model with adapters"),
    "dora alone": ([{"text": "a b"}], ["--dora"], "there are none without lora"),
    "several": ([{"text": "a b"}], ["--device", "cpu:discrete,cpu:discrete", "--dry-run"], "dry_run plans for one"),
    "template raises": ([{"messages": TALK}], ["--chat-template", "raises.jinja"],
                        "row 1, field 'messages': The chat template refuses this conversation: no system"),
    "template without content": ([{"messages": TALK}], ["--chat-template", "roles.jinja"],
                                 "row 1, field 'messages': The chat template leaves out the content of message 3"),
    "weight": ([{"messages": [TALK[1], {**TALK[2], "weight": 0}]}], [], "row 1, field 'messages': Message 2 has the w"),
    "parts": ([{"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, TALK[2]]}], [],
              "row 1, field 'messages': Message 1 has a part of type 'image', and only texts are trained"),
    "beside": ([{"instruction": "a", "input": "", "output": "b"}, {"instruction": "a", "input": "c", "output": "b"}],
               [], "row 2, field 'input': The field belongs to what the model is given, and only 'instruction' is"),
    "blank": ([{"text": "a b"}, {"text": "  "}], [], "row 2, field 'text': All tokens of the row are masked"),
    "no template": ([{"messages": TALK}], ["--chat-template", "nowhere"], "--chat-template nowhere cannot be read"),
    "no Jinja": ([{"messages": TALK}], ["--chat-template", "open.jinja"], "The chat template is no Jinja template"),
    "gap among labels": ([{"text": "a", "label": 1}, {"text": "b", "label": None}], ["--label", "label"],
                         "row 2, field 'label': The field is empty"),
    "word that is none": ([{"tokens": ["a", "b"], "tags": [0, 1]}, {"tokens": ["a", None], "tags": [0, 1]}],
                          ["--task", "token-classification"], "row 2, field 'tokens': The field must be a text"),
    "targets": ([{"text": "a b"}] * 9, ["--lora", "2", "--lora-targets", "q_proj,quproj"],
                "no layer is named 'quproj'. Its linear layers are named down_proj"),
    "calls": ([{"messages": [TALK[1], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, TALK[2]]}],
              [], "row 1, field 'messages': The chat template leaves out the tool_calls of message 2"),
    "half messages": ([{"prompt": TALK[1:2], "completion": "a"}], [],
                      "row 1, field 'completion': Of 'prompt' and 'completion' one is a list of messages"),
    "samples of none": ([{"text": "a b"}], ["--held-out", "0", "--samples", "2"], "samples is of held-out prompts"),
    "no samples": ([{"text": "a b"}], ["--samples", "0", "--sample-tokens", "9"], "samples=0 writes none"),
    "samples of classes": ([{"text": "a", "label": 1}] * 2, ["--label", "label", "--samples", "2"],
                           "--samples is of models that write text"),
    "best of one row": ([{"text": "a b"}], ["--keep-best"], "--keep-best needs held-out rows, and 1 row gives none"),
    "drawing": ([{"text": "a b"}], ["--plot", "loss.foo"], "must be the name of a PNG file"),
    "split": ([{"text": "a b"}] * 2, ["--master-weights", "split"], "there is nothing to split"),
    "pack classes": ([{"text": "a", "label": 1}], ["--task", "classification", "--pack"], "pack is for causal models"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_line_that_names_file_row_and_field(
    case: str, llama: Path, place: Path, tmp_path: Path
) -> None:
    rows, options, message = BAD[case]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "raises.jinja").write_text("{% generation %}{{ raise_exception('no system') }}{% endgeneration %}")
    (tmp_path / "open.jinja").write_text("{% for message in %}")
    (tmp_path / "roles.jinja").write_text("{% for message in messages %}{{ message['role'] }}{% endfor %}")
    options = [str(tmp_path / each) if each.endswith(".jinja") else each for each in options]
    result = relay("finetune", llama, "--data", data, "--cache", place / "cache", "--out", tmp_path / "out", *options)
    assert result.exit_code in (1, 2)
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    if message.startswith("row"):
        assert f"relay: {data}, row" in result.stderr
    assert not (tmp_path / "out").exists()


def test_labels_out_of_range_name_the_row_and_the_classes(tokenizer: Any, place: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, num_labels=2)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": 2}])
    result = relay("finetune", tmp_path / "bert", "--data", data, "--cache", place / "cache", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "row 2, field 'label': The label 2 is out of range: the model has 2 classes" in result.stderr


def test_a_foreign_tokenizer_missing_shards_and_missing_folders_are_named(
    llama: Path, place: Path, tmp_path: Path, tokenizer: Any
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", conversations(4))
    common = ("--data", data, "--cache", place / "cache", "--out", tmp_path / "out", "--no-fit")
    small = save_llama(tmp_path / "small", tokenizer, vocab_size=100)
    assert "it is not this model's tokenizer" in relay("finetune", small, *common).stderr
    broken = tmp_path / "broken"
    transformers.AutoModelForCausalLM.from_pretrained(llama).save_pretrained(broken, max_shard_size="20KB")
    tokenizer.save_pretrained(broken)
    gone = sorted(broken.glob("*.safetensors"))[0]
    gone.unlink()
    for more in ((), ("--dry-run",)):
        result = relay("finetune", broken, *common, *more)
        assert result.exit_code == 1
        assert gone.name in result.stderr
        assert "rows" not in result.stderr  # it is said before the data is read
    assert "There is no folder" in relay("finetune", tmp_path / "nowhere", *common).stderr
