"""A safetensors file that was cut off is named, with the tensor that is not whole and the bytes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from relay.errors import RelayError
from relay.models.safetensors_file import check_whole


def saved(folder: Path) -> tuple[Path, int]:
    file = folder / "model.safetensors"
    save_file({"first": torch.zeros(4, 4), "second": torch.zeros(8)}, file, metadata={"format": "pt"})
    return file, file.stat().st_size


def test_a_whole_file_passes(tmp_path: Path) -> None:
    check_whole(saved(tmp_path)[0])


def test_a_file_without_its_last_bytes_names_the_tensor_and_the_bytes(tmp_path: Path) -> None:
    file, size = saved(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    wanted = rf"model\.safetensors is cut off: second ends at byte {size:,}, and the file has {size - 5:,} of {size:,}"
    with pytest.raises(RelayError, match=wanted):
        check_whole(file)


@pytest.mark.parametrize("left", [0, 5, 20])
def test_a_file_without_its_header_is_cut_off_too(tmp_path: Path, left: int) -> None:
    file, _ = saved(tmp_path)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(RelayError, match=rf"cut off: its header ends at byte .* the file has {left:,} bytes"):
        check_whole(file)


def test_another_kind_of_file_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((4).to_bytes(8, "little") + b"text" + bytes(100))
    with pytest.raises(RelayError, match="is no safetensors file"):
        check_whole(file)


def test_loading_a_folder_checks_its_files(tmp_path: Path) -> None:
    from relay.models.load_pretrained import load_weights

    file, _ = saved(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(RelayError, match="cut off: second"):
        load_weights(torch.nn.Linear(2, 2), tmp_path)
