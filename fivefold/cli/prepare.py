"""``fivefold prepare``: from text to a token file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields

from ..data.prepare import prepare
from ..data.request import Request

SUMMARY = "turn text into a token file to train on"
EXAMPLES = (
    "fivefold prepare stdlib",
    "fivefold prepare books/ notes.txt --out data/books --vocab-size 16384",
    "fivefold prepare 'crawl/*.jsonl.gz' --field content --tokenizer ./tokenizer",
    "fivefold prepare hf:HuggingFaceFW/fineweb-edu:sample-10BT --tokens 1000000000",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: one for each field of ``Request``."""
    add = parser.add_argument
    add("sources", metavar="SOURCE", nargs="+", help="files, folders, patterns, stdlib, or one hf:NAME[:CONFIG]")
    add("--out", metavar="DIR", default="", help="folder of the token file (default: data/ and the source's name)")
    add("--format", choices=("auto", "text", "jsonl", "parquet"), default="auto", help="what the files hold")
    add("--field", default="text", help="field that holds the text (default: text)")
    add("--hub-split", metavar="NAME", default="train", help="split of a Hugging Face dataset (default: train)")
    add("--tokenizer", metavar="DIR", default="", help="folder of a tokenizer; one is trained unless given")
    add("--vocab-size", metavar="N", type=int, help="vocabulary of the trained tokenizer (default: 32768, stdlib 4096)")
    add("--tokenizer-bytes", metavar="N", type=int, help="text the tokenizer is trained on at most, in bytes")
    add("--tokens", metavar="N", type=int, help="stop with the document that reaches N tokens")
    add("--heldout", metavar="SHARE", type=float, help="share of documents held out for evaluation (default: 0.02)")
    add("--split-seed", metavar="N", type=int, help="seed of the choice of held-out documents (default: 0)")
    add("--workers", metavar="N", type=int, help="processes (default: one for each CPU); the result is the same")
    add("--shard-bytes", metavar="N", type=int, help="text a worker takes at once, in bytes")
    add("--overwrite", action="store_true", help="replace a token file that another request made")


def run(args: argparse.Namespace, given: Mapping[str, str]) -> int:
    """Prepare the token file."""
    chosen = {f.name: getattr(args, f.name) for f in fields(Request) if getattr(args, f.name) is not None}
    prepare(Request(**{**chosen, "sources": tuple(args.sources)}))
    return 0
