"""Finding and reading the small files of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltatree.errors import CheckpointError

SHIPPED = "shipped"
"""The name of the pair inside this package, for `--target` and `--drafter`."""


def shipped_folder(part: str) -> Path:
    """Folder of the shipped `target` or `drafter`."""
    return Path(__file__).parent / "pair" / part


def resolve_checkpoint(source: str, part: str) -> Path:
    """The local folder of a checkpoint named by a folder, by `shipped`, or by a hub id (downloaded then).

    part: "target" or "drafter", for messages and for `shipped`. Raises CheckpointError.
    """
    if source == SHIPPED:
        return shipped_folder(part)
    folder = Path(source)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{part} folder {source} has no config.json; name a checkpoint folder or a hub id")
        return folder
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise CheckpointError(f"{part} {source!r} is neither an existing folder nor a hub id of the form owner/name")
    return _download(source, part)


def _download(source: str, part: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"])
        )
    except Exception as error:  # the hub client raises many kinds; the user needs one sentence
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{part} {source!r} is no local folder and could not be fetched from the hub ({reason}); "
            "check the name and the network, or name a local folder"
        ) from error


def read_json(path: Path) -> dict:
    """A JSON object. Raises CheckpointError with the path and the line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; is this a complete checkpoint?") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def weight_hashes(folder: Path | None) -> dict[str, str]:
    """The SHA-256 of every weight file in a folder, by name; nothing without a folder."""
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    with ThreadPoolExecutor(4) as pool:
        return dict(zip((file.name for file in files), pool.map(_sha256, files), strict=True))


def _sha256(file: Path) -> str:
    """The hub's cache names a weight file by its hash; any other file is read."""
    blob = file.resolve().name
    if file.is_symlink() and len(blob) == 64:
        return blob
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
