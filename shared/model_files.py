"""The files of a model, in a local directory or in a snapshot downloaded from the Hugging Face hub."""

import re
from pathlib import Path

DEMO_MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(model: str) -> Path:
    """Return the model's directory, and download it if `model` is a hub id (`owner/name`). Raises ValueError."""
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.exists() or not HUB_ID.fullmatch(model):
        raise ValueError(f"model {model!r} is neither a directory nor a hub id such as Qwen/Qwen3-0.6B")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"model {model!r} is not a local directory; to download it, first run: pip install 'baton-serve[hub]'"
        ) from None
    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except (OSError, ValueError, RuntimeError) as error:  # includes all errors of the hub and the network
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        raise ValueError(f"model {model!r} is not a local directory, and downloading it failed: {reason}") from None
