"""`relay sample`, and the folder of a trained model that it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from relay.cli.sample import generate
from relay.models import GPT, gpt_folder
from tests.support.command_line import only_object, relay


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    configuration = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 16}
    gpt_folder.prepare(tmp_path / "trained")
    gpt_folder.save(tmp_path / "trained", GPT(**configuration).state_dict(), configuration)
    return tmp_path / "trained"


def test_sample_writes_as_many_bytes_as_asked_and_the_same_for_a_seed(trained: Path) -> None:
    first, again, other = (
        only_object(relay("sample", trained, "--bytes", 20, "--seed", seed, "--json"))["text"] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith("def ")
    assert len(generate(gpt_folder.load(trained), b"", 20)) == 20


def test_sample_goes_on_from_a_prompt_longer_than_the_model_reads(trained: Path) -> None:
    result = relay("sample", trained, "--prompt", "x" * 40, "--bytes", 3, "--temperature", 0)
    assert result.exit_code == 0
    assert result.stdout.startswith("x" * 40)


def test_a_tiny_temperature_takes_the_likeliest_byte(trained: Path) -> None:
    model = gpt_folder.load(trained)
    assert generate(model, b"a", 8, temperature=1e-300) == generate(model, b"a", 8, temperature=0)


def test_sample_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    result = relay("sample", tmp_path, "--json")
    assert result.exit_code == 1
    assert only_object(result)["type"] == "RunFolderError"
    assert "relay train --out" in result.stderr


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"wings": 2}'),
        ("config.json", b'{"layers": 1, "hidden": 16, "heads": 2, "sequence": 16}'),
        ("config.json", b'{"layers": 2, "hidden": 32, "heads": 2, "sequence": 16}'),
        ("model.safetensors", b"nothing of the kind"),
    ],
)
def test_a_damaged_folder_is_exit_code_1_naming_the_file(trained: Path, file: str, content: bytes) -> None:
    (trained / file).write_bytes(content)
    result = relay("sample", trained)
    assert result.exit_code == 1
    assert file in result.stderr


def test_a_save_that_fails_leaves_the_old_file_and_no_other(trained: Path) -> None:
    before = {file.name: file.read_bytes() for file in trained.iterdir()}
    with pytest.raises(Exception, match="meta"):
        gpt_folder.save(trained, {"w": torch.empty(3, device="meta")}, json.loads(before["config.json"]))
    assert before.keys() == {"config.json", "model.safetensors"} == {file.name for file in trained.iterdir()}
    assert (trained / "model.safetensors").read_bytes() == before["model.safetensors"]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_as_they_were_saved(tmp_path: Path, tied: bool) -> None:
    configuration = {"layers": 2, "hidden": 16, "heads": 2, "sequence": 16, "tied": tied}
    model = GPT(**configuration)
    gpt_folder.save(tmp_path, model.state_dict(), configuration)
    back = gpt_folder.load(tmp_path).state_dict()
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())
