"""Finds a model by name: local paths, `random:` presets, embedded models and hub names."""

import os
import re
import sys
from pathlib import Path

from specengine.hub.embedded_models import EMBEDDED, fetch_embedded
from specengine.types import ModelFetchError
from specengine.utils.model_files import gguf_parts, is_gguf

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*?)(?P<gguf>/[\w.-]+\.gguf)?")
# The last one has what PARD-2 adds to a model in safetensors.
_HUB_COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja", "warp_model.bin")
# Subfolders hold other formats of the same weights; the named files are copies or training state.
_HUB_IGNORED = ("*/*", "consolidated*", "training_args.bin", "optimizer*.bin")


def resolve_model(name: str | os.PathLike[str]) -> str | Path:
    """Resolves a model's name to a folder, a GGUF file, or an unchanged `random:<preset>`; fetches it if needed.

    An embedded name wins over a local folder of that name (write `./name` for the folder). A local path wins over a hub
    name. Bars are shown where stderr is a terminal.
    Raises ValueError for an unknown name, FileNotFoundError for a missing path, ModelFetchError for a failed fetch.
    """
    text = os.fspath(name)
    if isinstance(name, str):
        if name.startswith("random:"):
            return name
        if name in EMBEDDED:
            return fetch_embedded(name)
    path = Path(os.path.expanduser(text))  # pathlib raises RuntimeError for an unknown user
    if text and (path.is_dir() or is_gguf(path)):
        return path
    if text and path.exists():
        raise ValueError(f"model: {text!r} exists; expected a folder or a GGUF file")
    hub_name = _HUB_NAME.fullmatch(text) if isinstance(name, str) else None
    if hub_name and not hub_name["repo"].lower().endswith(".gguf"):
        return _fetch_from_hub(hub_name["repo"], (hub_name["gguf"] or "").lstrip("/"))
    if not isinstance(name, str) or "/" in text or os.sep in text or path.suffix.lower() == ".gguf":
        raise FileNotFoundError(f"model: {text!r}, no such folder or .gguf file")
    raise ValueError(
        f"model: unknown name {text!r}, expected one of {', '.join(sorted(EMBEDDED))}, a folder, a .gguf file, "
        "random:<preset>, or a hub name org/name (org/name/file.gguf for GGUF)"
    )


def _fetch_from_hub(repo: str, gguf: str) -> Path:
    # The import is slow, and most names need no hub.
    from huggingface_hub import constants, errors, hf_hub_download, snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        if gguf:
            parts = [hf_hub_download(repo, part.name) for part in gguf_parts(Path(gguf))]
            return Path(parts[0])
        for weights in ("*.safetensors", "*.bin"):
            wanted = [*_HUB_COMPANIONS, weights]
            folder = Path(snapshot_download(repo, allow_patterns=wanted, ignore_patterns=list(_HUB_IGNORED)))
            if any(folder.glob(weights)):
                return folder
        reason = "it has no safetensors or .bin weights; name one GGUF file as org/name/file.gguf"
    except errors.LocalEntryNotFoundError:
        reason = (
            f"the hub cannot be reached and the local cache {constants.HF_HUB_CACHE} does not hold it all; "
            f"run `hf download {repo}` where there is a network and copy that cache, or pass a local path"
        )
    except errors.GatedRepoError:
        reason = "its owner asks you to accept terms first; accept them on its page and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such repository, or it is private (set HF_TOKEN)"
    except errors.EntryNotFoundError:
        reason = f"the repository has no file {gguf}"
    except Exception as error:  # the client also raises errors of its HTTP library
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    finally:
        if silence:
            enable_progress_bars()
    name = f"{repo}/{gguf}" if gguf else repo
    raise ModelFetchError(f"model {name!r}: no such local path, and as a hub name: {reason}")
