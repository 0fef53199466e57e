"""Tiny judges with tokenizers of several kinds, and what they would say by a plain pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from offbeat.testing.tiny import _fit

KINDS = ("characters", "bytes", "metaspace")
CHARACTERS = "\n :()ABGadenorsty" + "0123456789YESNO" + "cilpw,.?+=Q"
TEXT = """
Grade: 10 Grade: 1 Grade: 9 yes no Yes No correct incorrect partly correct wrong right
correct, incorrect. Partly (yes) (no) yes: no: Question answer 1 2 3 4 5 6 7 8 9 10 11 100
"""
SAID = (
    "1", "10", " 10", "9", " 8", "yes", " yes", "Yes", "no", "NO", "A", " B", "100", "?\n", "in",
    "correct", " correct", "partly correct", "Partly (yes)", "incorrect",
)  # fmt: skip


def make_tokenizer(kind: str) -> Any:
    """Characters alone, byte-level BPE (as GPT's), or BPE with a mark for spaces (as Llama's)."""
    if kind == "characters":
        tokens = ["<pad>", "<eos>", "<unk>", *dict.fromkeys(CHARACTERS)]
        made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>"))
        made.decoder = decoders.Fuse()
    else:
        made = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
        special = ["<pad>", "<eos>", "<unk>"]
        if kind == "bytes":
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        else:
            # Digits stand alone, as Llama 2's.
            split = pre_tokenizers.Split(pattern=Regex("[0-9]"), behavior="isolated")
            space = pre_tokenizers.Metaspace(prepend_scheme="first")
            made.pre_tokenizer = pre_tokenizers.Sequence([space, split])
            made.decoder = decoders.Metaspace(prepend_scheme="first")
            alphabet = [*CHARACTERS, "\u2581"]
        trainer = trainers.BpeTrainer(
            vocab_size=330, min_frequency=1, special_tokens=special, initial_alphabet=alphabet,
            show_progress=False,
        )  # fmt: skip
        made.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def make_judge(path: Path, kind: str, seed: int = 0, steps: int = 45) -> Path:
    """Saves a tiny Llama that says one of `SAID` behind `Grade:`, whatever it reads."""
    tokenizer = make_tokenizer(kind)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model: Any = LlamaForCausalLM(config)
    random = Random(seed)

    def example() -> tuple[str, str]:
        a, b, c = (random.randint(0, 9) for _ in range(3))
        return f"Q: {a} + {b}?\nAnswer: {c}\nGrade:", random.choice(SAID)

    _fit(model, tokenizer, example, steps=steps, batch=24, rate=4e-3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Oracle:
    """The judge by transformers alone."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path)

    def begins(self, prompt: Sequence[int], path: Sequence[int]) -> float:
        """How likely the judge's tokens begin with `path`: one whole pass, teacher-forced."""
        ids = torch.tensor([[*prompt, *path]])
        with torch.inference_mode():
            likely = self.model(ids, use_cache=False).logits[0].double().log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(path) - 1)
        return float(sum(likely[at, token] for at, token in zip(places, path, strict=True)).exp())

    def weigh(self, text: str, verdicts: Sequence[str]) -> list[float]:
        """Each verdict in each usual case, with and without a space, as the tokenizer writes it
        behind the text; what goes on to a longer verdict is the longer one's."""
        prompt = self.tokenizer(text)["input_ids"]
        ways: dict[tuple[int, ...], int] = {}
        for number, verdict in enumerate(verdicts):
            cases = {verdict} if len(verdict) == 1 else {
                verdict, verdict.upper(), verdict.lower(), verdict.capitalize()
            }  # fmt: skip
            for said in [space + case for case in cases for space in ("", " ")]:
                path = self._behind(text, said)
                if self.tokenizer.unk_token_id not in path:
                    ways[path] = number
        sums = [0.0] * len(verdicts)
        for path, number in ways.items():
            share = self.begins(prompt, path)
            sums[number] += share
            shorter = [other for other in ways if path[: len(other)] == other and other != path]
            if shorter:
                sums[ways[max(shorter, key=len)]] -= share
        return sums

    def _behind(self, text: str, said: str) -> tuple[int, ...]:
        """The tokens of `said`, where those of the text before it stay as they are."""
        for before in (text, "(", "\n"):
            begun, whole = (self.tokenizer(t)["input_ids"] for t in (before, before + said))
            if whole[: len(begun)] == begun:
                return tuple(whole[len(begun) :])
        raise AssertionError(f"{said!r} merges with all that stands before it")
