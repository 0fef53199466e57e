"""Tiny models for tests, made in seconds: real model directories with tokenizers of their own.

    make_tiny_model(path)        an untrained character-level Llama, under two seconds
    make_tiny_actor(path)        a larger one that has begun to learn to reverse words
    make_tiny_judge(path)        one that writes a grade, 9 or 1, and stops
    make_tiny_scorer(path)       an untrained BERT with one logit and a WordPiece tokenizer; or with
                                 several labels, a head for tokens, a decoder instead of BERT
    write_reverse_data(path, …)  prompts `abc>` with the reference `cba`

Everything follows from the seed and a number of steps, never from a clock, so on one machine and
one thread the same call makes the same weights. torch and transformers are imported when used.
"""

from __future__ import annotations

import json
import logging
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n" + string.printable[:95]
"""What the character-level tokenizers know: a line's end and printable ASCII."""

REVERSE_TEMPLATE = "{word}>"
JUDGE_TEMPLATE = "Q:{{ question }}\nA:{{ answer }}\nGrade:"
"""The Jinja template that the tiny judge was trained on."""
SCORER_CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
"""The chat template of the tiny scorer that is a decoder."""

Example = tuple[str, str]
"""A prompt and the text that should follow it; the end of sequence comes behind."""


def write_reverse_data(path: Path, rows: int, seed: int, *, longest: int = 6) -> None:
    """Writes `rows` distinct words to reverse as JSONL with the columns prompt and reference."""
    rng = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < rows:
        words[_word(rng, longest)] = None
    with path.open("w", encoding="utf-8") as file:
        for word in words:
            prompt, reference = REVERSE_TEMPLATE.format(word=word), word[::-1]
            file.write(json.dumps({"prompt": prompt, "reference": reference}) + "\n")


def make_tiny_model(
    path: Path,
    seed: int = 0,
    *,
    characters: str = CHARACTERS,
    layers: int = 2,
    hidden: int = 64,
    tied: bool = True,
) -> Path:
    """Saves an untrained character-level Llama (head size 32) and its tokenizer in `path`."""
    tokenizer = _character_tokenizer(characters)
    _save(_llama(tokenizer, seed, layers, hidden, tied), tokenizer, path)
    return path


def make_tiny_actor(
    path: Path, seed: int = 0, *, train_steps: int = 110, longest: int = 6, tied: bool = True
) -> Path:
    """Saves a Llama of 0.8 million parameters that was shown how to reverse words.

    With no steps it is untrained; the default leaves it right at some words and wrong at others,
    so that reinforcement learning has something to find.
    """
    tokenizer = _character_tokenizer(CHARACTERS)
    model = _llama(tokenizer, seed, layers=4, hidden=128, tied=tied)
    rng = random.Random(seed + 1)

    def example() -> Example:
        word = _word(rng, longest)
        return REVERSE_TEMPLATE.format(word=word), word[::-1]

    _fit(model, tokenizer, example, steps=train_steps, batch=64, rate=2e-3)
    _save(model, tokenizer, path)
    return path


def make_tiny_judge(path: Path, seed: int = 0, *, train_steps: int = 80) -> Path:
    """Saves a Llama that reads `JUDGE_TEMPLATE` and writes one digit and the end of sequence.

    It writes 9 if the answer holds a vowel and 1 if not: a rule that a tiny model learns in
    seconds and that a test can compute (`tiny_grade`).
    """
    tokenizer = _character_tokenizer(CHARACTERS)
    model = _llama(tokenizer, seed, layers=2, hidden=64, tied=False)
    rng = random.Random(seed + 2)
    consonants = sorted(set(string.ascii_lowercase) - set("aeiou"))

    def example() -> Example:
        letters = consonants if rng.random() < 0.5 else string.ascii_lowercase
        answer = "".join(rng.choices(letters, k=rng.randint(0, 7)))
        question = REVERSE_TEMPLATE.format(word=_word(rng, 6))
        shown = JUDGE_TEMPLATE.replace("{{ question }}", question)
        return shown.replace("{{ answer }}", answer), tiny_grade(answer)

    _fit(model, tokenizer, example, steps=train_steps, batch=64, rate=4e-3)
    _save(model, tokenizer, path)
    return path


def tiny_grade(answer: str) -> str:
    """The grade that the tiny judge was taught for an answer."""
    return "9" if set(answer) & set("aeiou") else "1"


def make_tiny_scorer(
    path: Path,
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 32,
    labels: Sequence[str] = (),
    token_level: bool = False,
    decoder: bool = False,
) -> Path:
    """Saves an untrained scorer and its tokenizer in `path`: a BERT with one logit.

    With `labels` it has a logit for each; with `token_level` it classifies every token; with
    `decoder` it is a Llama (head size 32, so `hidden` is 32 or a multiple) with a tokenizer of
    characters, whose chat template ends each turn with the end of sequence, which is its padding.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    tokenizer = _chat_tokenizer() if decoder else _wordpiece_tokenizer()
    torch.manual_seed(seed)
    config = (_decoder_config if decoder else _encoder_config)(tokenizer, layers, hidden)
    config.num_labels = max(1, len(labels))
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: place for place, label in enumerate(labels)}
    kind = AutoModelForTokenClassification if token_level else AutoModelForSequenceClassification
    model = kind.from_config(config)
    if token_level:
        head = model.score if decoder else model.classifier
        torch.nn.init.normal_(head.bias)  # as a trained one's, not zero
    _save(model, tokenizer, path)
    return path


def _encoder_config(tokenizer: Any, layers: int, hidden: int) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _decoder_config(tokenizer: Any, layers: int, hidden: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _chat_tokenizer() -> Any:
    tokenizer = _character_tokenizer(CHARACTERS)
    tokenizer.pad_token, tokenizer.chat_template = EOS, SCORER_CHAT
    return tokenizer


def _word(rng: random.Random, longest: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, longest)))


def _save(model: Any, tokenizer: Any, path: Path) -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _character_tokenizer(characters: str) -> Any:
    """Each character is a token; what is not among them is `<unk>`. Nothing is ever added."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [PAD, EOS, UNKNOWN, *dict.fromkeys(characters)]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=512,
        padding_side="left",
    )


def _wordpiece_tokenizer() -> Any:
    """Lower-case words cut into single characters, within [CLS] and [SEP]."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [c for c in CHARACTERS if not c.isspace() and not c.isupper()]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces, *(f"##{piece}" for piece in pieces)]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=128,
    )


def _llama(tokenizer: Any, seed: int, layers: int, hidden: int, tied: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def _fit(
    model: Any,
    tokenizer: Any,
    example: Callable[[], Example],
    *,
    steps: int,
    batch: int,
    rate: float,
) -> None:
    """Supervised training on the texts behind the prompts, with a rate that falls to zero."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    warm_up = max(1, steps // 20)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))
        inputs, labels = _pad(tokenizer, [example() for _ in range(batch)])
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            log.info("step %d of %d, loss %.3f", step + 1, steps, loss.item())
    model.eval()


def _pad(tokenizer: Any, examples: Sequence[Example]) -> tuple[Any, Any]:
    """Token ids, padded at the end, and labels that are -100 outside of the answers."""
    import torch

    prompts = tokenizer([prompt for prompt, _ in examples])["input_ids"]
    answers = tokenizer([answer + EOS for _, answer in examples])["input_ids"]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    inputs = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        inputs[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return inputs, labels
