"""Files of data and folders of models that cannot be used, or would be read as something else. Nothing is trained."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.documentation_chats import conversations, save_folder, write_jsonl
from relay.errors import RelayError
from relay.finetuning.data.data_error import DataError
from relay.finetuning.data.data_files import read_files
from relay.finetuning.model_folder import longest_row, open_folder
from tests.support.command_line import relay

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', "row 2: This is not JSON"),
        (b'{"text": "a"}\n{"text": [1]}\n', "row 2, field 'text': The field must be a text; received list: [1]"),
        (b'{"text": "a"}\n{"text": 5.5}\n', "row 2, field 'text'"),
        (b'{"text": "a"}\n{"text": "b", "text": "c"}\n', "row 2, field 'text': The field is in this row twice"),
        (b'{"text": "a"}\n{"text": "\xe9"}\n', "Line 2 holds the byte 0xe9, which is not UTF-8"),
        (b"\n\n", "The file holds no rows"),
    ],
)
def test_a_broken_line_of_a_file_is_named_in_one_line(
    content: bytes, message: str, llama: Path, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(content)
    result = relay("finetune", llama, "--data", data, "--cache", place / "cache", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"relay: {data}")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not any(capfd.readouterr())  # the libraries write nothing of their own


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,text,label\na,b,1\n", "field 'text': 2 columns have this name"),
        ("a.csv", "text,label\nHello, you,1\nBye, you,0\n", "row 1: The row has 3 values, and the file has 2 columns"),
        ("a.csv", 'text,label\na,1\n"b,0\n', "row 2: A quote that begins in this row is not closed"),
        ("a.csv", "text;label\na;1\n", "its values are separated by ';'"),
        ("a.csv", "text,label\n", "The file holds no rows"),
        ("a.json", '[\n{"text": "a"},\n{"text": "b"\n]', "This is not JSON: Expecting ',' delimiter: line 4"),
        ("a.json", '[{"text": "a"}, 5]', "row 2: A row is an object of fields; received 5"),
    ],
)
def test_tables_and_lists_that_would_be_misread_are_refused_with_the_row(
    name: str, content: str, message: str, place: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as refused:
        read_files([str(tmp_path / name)], str(place / "cache"))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_words_of_a_table_that_mean_missing_elsewhere_are_texts(place: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('text,label\nNA,None\n"a, b",null\n')
    [file] = read_files([str(tmp_path / "a.csv")], str(place / "cache"))
    assert file.rows.to_dict() == {"text": ["NA", "a, b"], "label": ["None", "null"]}


def test_a_folder_of_files_of_one_kind_is_read_whole(place: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    found = read_files([str(tmp_path)], str(place / "cache"))
    assert [(Path(file.name).name, file.rows["text"][0]) for file in found] == [
        ("a.txt", "text a"),
        ("b.txt", "text b"),
    ]
    write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match="files of several kinds: json, text"):
        read_files([str(tmp_path)], str(place / "cache"))


def small(kind: str, **sizes: Any) -> Any:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return getattr(transformers, f"{kind}Config")(**{**shape, **sizes})


def test_models_that_do_not_learn_from_text_as_asked_are_refused_by_name(
    tokenizer: Any, place: Path, tmp_path: Path
) -> None:
    vit = transformers.ViTForImageClassification(small("ViT", image_size=8, patch_size=4))
    vit.save_pretrained(tmp_path / "vit")
    with pytest.raises(RelayError, match="is a vit model, which takes pixel_values"):
        open_folder(str(tmp_path / "vit"))
    encoder = small("Bert", vocab_size=400)
    folder = save_folder(tmp_path / "bert", transformers.BertForMaskedLM, encoder, tokenizer)
    data = write_jsonl(tmp_path / "rows.jsonl", conversations(2, 20))
    common = ("--data", data, "--cache", place / "cache", "--out", tmp_path / "out")
    result = relay("finetune", folder, *common, "--task", "causal", "--dry-run")
    assert "bert model whose config.json has is_decoder false" in result.stderr
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    assert "is quantized by its library" in relay("finetune", folder, *common).stderr


def test_rows_end_where_positions_end_that_begin_after_padding(tmp_path: Path, tokenizer: Any) -> None:
    config = small("Camembert", vocab_size=400, max_position_embeddings=40, pad_token_id=1)
    model = transformers.CamembertModel(config)
    model.save_pretrained(tmp_path)
    longest = longest_row(open_folder(str(tmp_path)), tokenizer, None)
    assert longest == 38
    tokens = transformers.BatchEncoding({"input_ids": [[5] * longest]}, tensor_type="pt")
    assert model(**tokens).last_hidden_state.shape[1] == longest


def test_a_result_never_takes_the_place_of_its_model_or_of_another_kind(
    llama: Path, place: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", conversations(2, 20))
    common = ("--data", data, "--cache", place / "cache", "--out")
    assert "which would be overwritten" in relay("finetune", llama, *common, llama).stderr
    whole = tmp_path / "whole"
    shutil.copytree(llama, whole)
    refused = relay("finetune", llama, *common, whole, "--lora", "2")
    assert "holds a whole model of an earlier run, and this run writes adapters" in refused.stderr
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    refused = relay("finetune", llama, *common, tmp_path / "lora")
    assert "holds adapters of an earlier run, and this run writes a whole model" in refused.stderr
    (tmp_path / "file").write_text("")
    refused = relay("finetune", llama, *common, tmp_path / "out", "--plot", tmp_path / "file" / "loss.png")
    assert "--plot" in refused.stderr
    assert "cannot be written" in refused.stderr
