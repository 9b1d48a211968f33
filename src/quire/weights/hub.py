"""The hub, through its own client. A module of its own: the client takes a fifth of a second to import."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from quire.errors import InvalidModel, Unavailable

WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.bpe", "*.tiktoken")
"""What a serving engine reads: never code, never pickles."""


def fetch(name: str, revision: str | None = None, cache: str | None = None) -> Path:
    """The folder of a hub id in `cache` (by default the hub's own), downloaded first where needed.

    Raises InvalidModel or Unavailable.
    """
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(WANTED)))
    except GatedRepoError:
        raise InvalidModel(f"{name} is gated: accept its terms on the hub and log in (`hf auth login`)") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise InvalidModel(f"the hub has no model {name!r}, or it is private and you are not logged in") from None
    except LocalEntryNotFoundError:
        raise Unavailable(
            f"{name} is not in the local hub cache, and the hub is offline or cannot be reached"
        ) from None
    except OSError as error:
        raise Unavailable(f"{name} could not be downloaded: {error}") from None
