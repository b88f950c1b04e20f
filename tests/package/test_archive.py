"""Files that are damaged, or made to do harm."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import dynamo_backends
from dynamo_backends import PackageError
from dynamo_backends.graph.layouts import ALIGNMENT
from dynamo_backends.package import archive
from dynamo_backends.package.verifying import check_parts
from tests.package.conftest import entries


@pytest.fixture(scope="module")
def path(packages: Any) -> Path:
    made: Path = packages("onnxrt")
    return made


def written(path: Path, contents: dict[str, bytes], **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, content in contents.items():
            file.writestr(name, content)
    return path


def test_a_flipped_byte_of_any_part_is_found(path: Path, tmp_path: Path):
    content = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        infos = file.infolist()
    for info in infos:
        start = info.header_offset + 30 + len(info.filename)
        damaged = bytearray(content)
        damaged[start + info.file_size // 2] ^= 1
        copy = tmp_path / "damaged.dbp"
        copy.write_bytes(damaged)
        # The arguments that it was saved with are for `verify` alone.
        read = check_parts if info.filename == "examples.safetensors" else dynamo_backends.load
        with pytest.raises(PackageError, match="damaged"):
            read(copy)


def test_a_flipped_byte_anywhere_is_an_error_or_of_no_account(path: Path, tmp_path: Path):
    content, copy = path.read_bytes(), tmp_path / "damaged.dbp"
    parts, errors = check_parts(path), 0
    for at in range(0, len(content), max(len(content) // 400, 1)):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        copy.write_bytes(damaged)
        try:
            assert check_parts(copy) == parts
        except PackageError:
            errors += 1
    assert errors > 300


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(path: Path, tmp_path: Path, share: float):
    content, copy = path.read_bytes(), tmp_path / "short.dbp"
    copy.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(PackageError, match=r"damaged or not a package"):
        dynamo_backends.load(copy)


def test_a_part_that_is_missing_is_named(path: Path, tmp_path: Path):
    contents = entries(path)
    del contents["weights.safetensors"]
    with pytest.raises(PackageError, match=r"lacks \['weights.safetensors'\]"):
        dynamo_backends.load(written(tmp_path / "m.dbp", contents))


def test_a_zip_bomb_is_refused_before_anything_is_unpacked(path: Path, tmp_path: Path):
    bomb = written(tmp_path / "bomb.dbp", {"zeros.bin": bytes(1 << 26)},
                   compression=zipfile.ZIP_DEFLATED)  # fmt: skip
    assert bomb.stat().st_size < 1 << 18
    with pytest.raises(PackageError, match=r"'zeros\.bin' is compressed"):
        dynamo_backends.load(bomb)


def test_parts_that_share_their_bytes_are_refused(tmp_path: Path):
    bomb = written(tmp_path / "bomb.dbp", {f"part_{i}.bin": b"0" for i in range(9)})
    whole = written(tmp_path / "whole.dbp", {"part_0.bin": bytes(1000)})
    content = bytearray(bomb.read_bytes())
    at = content.find(b"PK\x01\x02")
    while at >= 0:  # each entry claims to be as long as the file
        content[at + 20 : at + 28] = (len(content) - 100).to_bytes(4, "little") * 2
        at = content.find(b"PK\x01\x02", at + 4)
    bomb.write_bytes(content)
    with pytest.raises(PackageError, match="exceed the file size"):
        dynamo_backends.load(bomb)
    with pytest.raises(PackageError, match="has no manifest"):
        dynamo_backends.load(whole)


@pytest.mark.parametrize("name", ["../evil.bin", "/etc/evil", "a/../../b.bin", "C:\\evil", "a//b"])
def test_a_path_that_escapes_is_refused(path: Path, tmp_path: Path, name: str):
    contents = {**entries(path), name: b"evil"}
    before = set(tmp_path.parent.iterdir())
    with pytest.raises(PackageError, match="contains an unexpected part"):
        dynamo_backends.load(written(tmp_path / "m.dbp", contents))
    assert set(tmp_path.parent.iterdir()) == before


def test_a_name_that_is_there_twice_is_refused(path: Path, tmp_path: Path):
    """Readers of zips differ in which of the two they take."""
    copy = written(tmp_path / "m.dbp", entries(path))
    with (
        zipfile.ZipFile(copy, "a") as file,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        file.writestr("weights.safetensors", b"others")
    with pytest.raises(PackageError, match="contains an unexpected part"):
        dynamo_backends.load(copy)


@pytest.mark.parametrize(
    ("limit", "message"), [("_MOST", "exceed the file size"), ("_LONGEST", "manifest is too large")]
)
def test_the_number_of_parts_and_the_manifest_have_limits(
    limit: str, message: str, path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(archive, limit, 3)
    with pytest.raises(PackageError, match=message):
        dynamo_backends.load(path)


@pytest.mark.parametrize("change", [{"size": 1}, {"size": 10**12}, {"sha256": []}], ids=str)
def test_what_the_manifest_says_of_a_part_is_checked(
    change: dict[str, Any], path: Path, tmp_path: Path
):
    """Before memory is taken for it."""
    contents = entries(path)
    manifest = json.loads(contents["manifest.json"])
    manifest["parts"]["weights.safetensors"] |= change
    contents["manifest.json"] = json.dumps(manifest).encode()
    contents["manifest.sha256"] = archive.sha256(contents["manifest.json"]).encode()
    with pytest.raises(
        PackageError, match=r"damaged: the checksum of weights\.safetensors is wrong"
    ):
        dynamo_backends.load(written(tmp_path / "m.dbp", contents))


@pytest.mark.parametrize("number", [1, 99])
def test_another_format_says_what_is_read(number: int, path: Path, tmp_path: Path):
    from dynamo_backends.package.archive import sha256

    contents = entries(path)
    manifest = {**json.loads(contents["manifest.json"]), "format": number}
    contents["manifest.json"] = json.dumps(manifest).encode()
    contents["manifest.sha256"] = sha256(contents["manifest.json"]).encode()
    with pytest.raises(PackageError, match=rf"has format {number}, .* reads format 2\. Save it"):
        dynamo_backends.load(written(tmp_path / "m.dbp", contents))


def test_what_is_no_package_is_refused(tmp_path: Path):
    with pytest.raises(PackageError, match="there is no file"):
        dynamo_backends.load(tmp_path / "missing.dbp")
    (tmp_path / "text").write_text("not a zip")
    with pytest.raises(PackageError, match="damaged or not a package"):
        dynamo_backends.load(tmp_path / "text")
    torch.save({"x": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(PackageError, match="not a valid package: it contains an unexpected"):
        dynamo_backends.load(tmp_path / "weights.pt")


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bytes]:
    """A file with a part that is mapped, and the part."""
    monkeypatch.setattr(archive, "MAPPED", 1000)
    path, content = tmp_path / "large.dbp", bytes(range(256)) * 10
    archive.write(path, {}, {"small.bin": b"ab", "large.bin": content})
    return path, content


def test_a_large_part_is_memory_of_its_own(large: tuple[Path, bytes]):
    path, content = large
    with archive.Archive(path) as opened:
        memory = opened.read_memory("large.bin")
        assert opened.read("small.bin") == b"ab"
    assert memory.data_ptr() % ALIGNMENT == 0
    archive.write(path, {}, {"large.bin": b"another one" * 1000})
    assert memory.numpy().tobytes() == content  # the file that was opened


def test_what_is_written_to_a_mapped_part_does_not_reach_the_file(large: tuple[Path, bytes]):
    path, content = large
    with archive.Archive(path) as opened:
        opened.read_memory("large.bin").fill_(0)
        assert opened.read("large.bin") == content


def test_a_flipped_byte_of_a_mapped_part_is_found(large: tuple[Path, bytes]):
    path, content = large
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(content) + 5] ^= 1
    path.write_bytes(damaged)
    with archive.Archive(path) as opened, pytest.raises(PackageError, match="damaged"):
        opened.read_memory("large.bin")


def test_a_large_part_that_begins_elsewhere_is_read(large: tuple[Path, bytes], tmp_path: Path):
    path, content = large
    moved = written(tmp_path / "moved.dbp", {"x.bin": b"abc", **entries(path)})
    with archive.Archive(moved) as opened:
        assert opened.read_memory("large.bin").numpy().tobytes() == content


def test_nothing_is_unpickled(path: Path, call: Any, monkeypatch: pytest.MonkeyPatch):
    dynamo_backends.load(path)  # whatever imports do is not meant

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch._C, "_pickle_load_obj", refuse)
    dynamo_backends.load(path)(*call[0], **call[1])
