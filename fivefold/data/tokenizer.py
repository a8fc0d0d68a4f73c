"""Train a byte-level BPE tokenizer, or take one from a folder, and encode documents with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..config.errors import ConfigError

BEGIN, END = "<|begin|>", "<|end|>"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SMALLEST_VOCABULARY = 256 + 2  # every byte, begin and end


def train(texts: Iterable[str], vocab_size: int) -> dict[str, str]:
    """Train a byte-level BPE tokenizer and return its files' texts; it decodes to exactly the bytes it encoded.

    Source: Sennrich 2016, arXiv 1508.07909; Radford 2019 ("Language Models are Unsupervised Multitask Learners",
    section 2.2) for bytes and the split into words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "add_eos_token": True,
    }
    return {TOKENIZER: tokenizer.to_str(pretty=True), TOKENIZER_CONFIG: json.dumps(config, indent=2) + "\n"}


def read_folder(folder: str | Path) -> dict[str, str]:
    """The texts of a tokenizer folder's files.

    Raises:
        ConfigError: if there is no ``tokenizer.json``.
    """
    path = Path(folder)
    if not (path / TOKENIZER).is_file():
        raise ConfigError([f"tokenizer={folder} has no {TOKENIZER}. Give a folder with one, or leave it out to train."])
    names = [name for name in (TOKENIZER, TOKENIZER_CONFIG) if (path / name).is_file()]
    return {name: (path / name).read_text(encoding="utf-8") for name in names}


class DocumentTokenizer:
    """Encodes whole documents, each with the begin and end tokens its configuration asks for, once."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """``files`` holds the texts of ``tokenizer.json`` and, if there is one, ``tokenizer_config.json``.

        Raises:
            ConfigError: if they do not make a tokenizer.
        """
        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER])
            config = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
        except Exception as error:  # tokenizers raises bare Exception for a bad file
            message = f"tokenizer cannot be read ({error}). Give a folder with a valid {TOKENIZER}."
            raise ConfigError([message]) from None
        self._tokenizer.no_truncation()  # some are saved with the limits of their last use
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text that spells a special token stays text
        before, after = self._post_processor_adds()
        self.begin_ids = self._wanted(before, config, "bos")
        self.end_ids = self._wanted(after, config, "eos")
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _post_processor_adds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the post-processor puts before and after a text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        n_added = len(full) - len(plain)
        start = next(i for i in range(n_added + 1) if full[i : i + len(plain)] == plain)
        return tuple(full[:start]), tuple(full[start + len(plain) :])

    def _wanted(self, added: tuple[int, ...], config: dict[str, Any], role: str) -> tuple[int, ...]:
        """What to put on one side: ``add_{role}_token`` overrules the post-processor for that token."""
        asked = config.get(f"add_{role}_token")
        if asked is None:
            return added
        token = config.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        token_id = None if text is None else self._tokenizer.token_to_id(text)
        if not asked:
            return tuple(i for i in added if i != token_id)
        if token_id is None:
            rule = f"add_{role}_token=true needs a {role}_token in the vocabulary ({role}_token={text})"
            raise ConfigError([f"{rule}. Mend {TOKENIZER_CONFIG}."])
        if token_id in added:
            return added
        return (token_id, *added) if role == "bos" else (*added, token_id)

    def encode(self, text: str) -> tuple[list[int], int]:
        """A document's tokens, and the UTF-8 bytes that its targets (all tokens but the first) stand for."""
        n_bytes = len(text.encode())
        if self.begin_ids:
            # The batch call skips the offsets, a fifth of the time.
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return [*self.begin_ids, *ids, *self.end_ids], n_bytes
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if encoding.offsets:  # nothing predicts the first token
            n_bytes -= len(text[: encoding.offsets[0][1]].encode())
        return [*encoding.ids, *self.end_ids], n_bytes

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens, without begin, end and other special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)
