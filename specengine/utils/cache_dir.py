"""The folder that holds fetched models, packed weights and measurements."""

import os
import sys
from pathlib import Path


def cache_dir() -> Path | None:
    """Returns $SPECENGINE_CACHE, or else `specengine` in the user's cache folder; None for SPECENGINE_CACHE=off.

    Raises RuntimeError if the user has no home folder.
    """
    if (chosen := os.environ.get("SPECENGINE_CACHE")) == "off":
        return None
    if chosen:
        return Path(os.path.expanduser(chosen))
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "specengine"
    if sys.platform == "win32" and (base := os.environ.get("LOCALAPPDATA")):
        return Path(base) / "specengine"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "specengine"
