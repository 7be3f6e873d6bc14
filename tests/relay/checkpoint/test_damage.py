"""Full disks, read-only folders, damaged or forged checkpoints: a clear error, and nothing that was whole is lost."""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import relay
from relay.checkpoint import manifest as manifests
from relay.checkpoint.format import Checkpoint
from relay.errors import CheckpointError
from tests.relay.checkpoint.test_forged_values import examples, values


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 2)]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


@pytest.fixture(scope="module")
def trainer() -> Iterator[relay.Trainer]:
    with relay.Trainer(layers(), nn.functional.mse_loss, microbatches=2, state_dtype="int8") as made:
        made.step(batch(0))
        yield made


@pytest.fixture(scope="module")
def original(trainer: relay.Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "c"
    trainer.save(folder, note=[1, (2, "three")])
    return folder


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "c"))


def refused(trainer: relay.Trainer, path: Path) -> CheckpointError:
    """Loading must fail with the error that names the file, and change nothing."""
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    steps = trainer.steps
    with pytest.raises(CheckpointError) as caught:
        trainer.load(path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())
    assert trainer.steps == steps
    assert caught.value.file
    assert caught.value.file in str(caught.value)
    return caught.value


# **** no room, no right ****


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk is like: writing beyond so many bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system of its own, where we may mount one."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_file_that_cannot_grow_is_an_error_and_the_checkpoint_before_stays(
    trainer: relay.Trainer, tmp_path: Path, background: bool
) -> None:
    path = tmp_path / "c"
    trainer.save(path)
    step = trainer.steps
    trainer.step(batch(1))
    with files_of_at_most(500):
        with pytest.raises(CheckpointError, match=r"could not be written.*Free space"):
            trainer.save(path, background=background).wait()
    trainer.wait_saved(quietly=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    Checkpoint(path).verify()
    assert Checkpoint(path).manifest.step == step
    trainer.step(batch(2))
    trainer.save(path)
    assert Checkpoint(path).manifest.step == step + 2


def test_a_full_disk_is_an_error_and_the_checkpoint_before_stays(trainer: relay.Trainer, tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=64k") as folder:
        trainer.save(folder / "c")
        step = trainer.steps
        trainer.step(batch(1))
        left = shutil.disk_usage(folder).free
        (folder / "filler").write_bytes(b"x" * (left - 4096))
        with pytest.raises(CheckpointError, match="No space left"):
            trainer.save(folder / "c")
        Checkpoint(folder / "c").verify()
        assert Checkpoint(folder / "c").manifest.step == step
        (folder / "filler").unlink()
        trainer.save(folder / "c")
        assert Checkpoint(folder / "c").manifest.step == step + 1
        assert [entry.name for entry in folder.iterdir()] == ["c"]


def test_a_folder_that_cannot_be_written_is_an_error(trainer: relay.Trainer, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(CheckpointError, match="could not be written"):
            trainer.save(tmp_path / "locked" / "c")
        return
    with mounted(tmp_path / "locked", "size=64k,ro") as folder:
        with pytest.raises(CheckpointError, match="Read-only"):
            trainer.save(folder / "c")


# **** damage ****


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_a_shard_cut_off_anywhere_is_refused(trainer: relay.Trainer, copied: Path) -> None:
    for shard in shards(copied):
        whole = shard.read_bytes()
        for length in {0, 1, 7, 8, len(whole) // 2, len(whole) - 1}:
            shard.write_bytes(whole[:length])
            assert refused(trainer, copied).file == str(shard)
        shard.write_bytes(whole + b"\0")
        assert refused(trainer, copied).file == str(shard)
        shard.write_bytes(whole)
    trainer.load(copied)


@given(position=st.integers(0, 10**9), bit=st.integers(0, 7))
@examples(150)
def test_a_flipped_bit_anywhere_is_refused(trainer: relay.Trainer, original: Path, position: int, bit: int) -> None:
    files = sorted(original.iterdir())
    total = sum(file.stat().st_size for file in files)
    position %= total
    for file in files:
        if position < file.stat().st_size:
            break
        position -= file.stat().st_size
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[position] ^= 1 << bit
    file.write_bytes(flipped)
    try:
        if file.name == manifests.MANIFEST and json.loads(whole) == _json(flipped):
            return  # a blank became another blank
        assert refused(trainer, original).file == str(file)
    finally:
        file.write_bytes(whole)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_a_missing_file_is_named(trainer: relay.Trainer, copied: Path) -> None:
    shards(copied)[0].unlink()
    assert "missing" in str(refused(trainer, copied))
    (copied / manifests.MANIFEST).unlink()
    assert "no checkpoint" in str(refused(trainer, copied))


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, and make its checksum fit."""
    file = path / manifests.MANIFEST
    body = json.loads(file.read_text())
    change(body)
    body.pop("sha256", None)
    file.write_text(json.dumps({"sha256": manifests._own_hash(body), **body}))


def test_another_version_is_refused_by_name(trainer: relay.Trainer, copied: Path) -> None:
    forge(copied, lambda body: body.update(version=2))
    error = refused(trainer, copied)
    assert error.field == "version"
    assert "expected 1, received 2" in str(error)


@pytest.mark.parametrize("name", ["../other/shard-00000.safetensors", "/etc/passwd", "shard-1.safetensors", "..", 7])
def test_a_manifest_cannot_name_files_outside_its_folder(trainer: relay.Trainer, copied: Path, name: Any) -> None:
    forge(copied, lambda body: body["shards"][0].update(file=name))
    assert refused(trainer, copied).field == "shards[0].file"


def test_a_shard_that_is_a_link_or_no_file_is_refused(trainer: relay.Trainer, copied: Path) -> None:
    shard = shards(copied)[0]
    shard.rename(copied.parent / "elsewhere")
    shard.symlink_to(copied.parent / "elsewhere")
    assert refused(trainer, copied).file == str(shard)
    shard.unlink()
    os.mkfifo(shard)
    assert refused(trainer, copied).file == str(shard)


def test_hyperparameters_cannot_bring_parameters(trainer: relay.Trainer, copied: Path) -> None:
    forge(copied, lambda body: body["optimizer"]["groups"][0]["values"].update(params=3))
    assert refused(trainer, copied).field == "optimizer.groups[0].values.params"


# **** fuzz ****


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths_in(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from paths_in(item, (*path, number))


@given(data=st.data())
@examples(900)
def test_a_forged_manifest_is_read_or_refused_with_its_file_and_field(
    trainer: relay.Trainer, original: Path, data: st.DataObject
) -> None:
    file = original / manifests.MANIFEST
    whole = file.read_bytes()

    def change(body: dict[str, Any]) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            path = data.draw(st.sampled_from([path for path in paths_in(body) if path and path[0] != "sha256"]))
            parent: Any = body
            for key in path[:-1]:
                parent = parent[key]
            if data.draw(st.booleans()):
                parent[path[-1]] = data.draw(values)
            else:
                del parent[path[-1]]

    try:
        forge(original, change)
        with contextlib.suppress(CheckpointError):
            trainer.load(original)
    finally:
        file.write_bytes(whole)
    trainer.load(original, verify=False)
    assert trainer.steps == Checkpoint(original).manifest.step


@given(data=st.binary(max_size=200), position=st.floats(0, 1), replaces=st.integers(0, 50))
@examples(300)
def test_any_bytes_in_a_manifest_are_refused(
    trainer: relay.Trainer, original: Path, data: bytes, position: float, replaces: int
) -> None:
    file = original / manifests.MANIFEST
    whole = file.read_bytes()
    at = int(position * len(whole))
    changed = whole[:at] + data + whole[at + replaces :]
    file.write_bytes(changed)
    try:
        if json.loads(whole) == _json(changed):
            return
        refused(trainer, original)
    finally:
        file.write_bytes(whole)


@given(
    data=st.binary(min_size=1, max_size=60), position=st.integers(0, 500), length=st.none() | st.integers(0, 2**64 - 1)
)
@examples(300)
def test_any_bytes_in_a_shard_are_refused_even_where_the_checksum_was_forged_too(
    trainer: relay.Trainer, original: Path, data: bytes, position: int, length: int | None
) -> None:
    shard = shards(original)[0]
    whole, text = shard.read_bytes(), (original / manifests.MANIFEST).read_bytes()
    changed = whole[:position] + data + whole[position + len(data) :]
    if length is not None:
        changed = length.to_bytes(8, "little") + changed[8:]
    shard.write_bytes(changed)
    try:
        digest = {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
        forge(original, lambda body: body["shards"][0].update(digest))
        with contextlib.suppress(CheckpointError):
            trainer.load(original)
    finally:
        shard.write_bytes(whole)
        (original / manifests.MANIFEST).write_bytes(text)
