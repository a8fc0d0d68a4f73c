"""Longer contexts: train at 512 tokens, extend to 2,048 with YaRN over four ranks of ``cp``, and see where each breaks.

    python examples/extend_context.py            # some minutes on two CPU cores
    python examples/extend_context.py --quick    # a much smaller model, from 32 tokens to 128, in one minute

Rotary positions turn queries and keys by angles that grow with the distance between them. Past the length that it was
trained at, a model meets angles that it has never seen, and its loss climbs. YaRN slows the turns that are slow, so
that four times the length stays inside the angles that were seen. A short training gets the model used to them.

Each model is measured on rows of held-out documents that start every 512 tokens, so that all four quarters of a row
hold the same tokens (but for the documents' ends), with less or more before them: what differs is the position.

The same by hand:

    fivefold train long_demo --run-dir runs/512
    fivefold train long_demo_2048 --init-from runs/512 --run-dir runs/2048
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from fivefold import recipes
from fivefold.config.run import RunConfig
from fivefold.tools.by_position import by_position, picture, table
from fivefold.train.evaluate import PositionLoss

SMALL = ("--model.dim 64", "--model.n-layers 2", "--model.ffn-dim 128", "--model.attention.n-heads 2")
QUICK = {
    "long_demo": (*SMALL, "--data.sequence-length 32", "--data.batch-size 64", "--train.steps 250",
                  "--optim.decay-steps 50"),
    "long_demo_2048": (*SMALL, "--data.sequence-length 128", "--data.batch-size 16", "--train.steps 40",
                       "--model.rope.scaling.original-length 32"),
}  # fmt: skip
BREAK, TOLERANCE = 0.1, 0.05
"""Nats per token: what the loss climbs at least before, and at most after."""


def train(recipe: str, folder: Path, *words: str) -> RunConfig:
    """Run ``fivefold train`` and return the configuration it has left."""
    command = [sys.executable, "-m", "fivefold", "train", recipe, "--run-dir", str(folder), *words]
    print("\n$ fivefold", *command[3:], flush=True)
    subprocess.run(command, check=True, timeout=1800)
    return recipes.load(str(folder)).config


def starting_from(config: RunConfig, weights: Path) -> RunConfig:
    """``config`` with the weights of a run."""
    return config.model_copy(update={"train": config.train.model_copy(update={"init_from": str(weights)})})


def check(before: PositionLoss, after: PositionLoss, trained: int) -> None:
    """Hold the last quarter of the longer rows against the first, which the first model was trained on.

    Raises:
        SystemExit: if the loss does not climb past ``trained`` before, or does so after.
    """
    length = len(before.nats)
    known = before.mean(0, trained)
    climbs = [one.mean(length - trained, length) - known for one in (before, after)]
    print(f"\n{length - trained} to {length - 1} against 0 to {trained - 1} as trained: "
          f"{climbs[0]:+.3f} nats before, {climbs[1]:+.3f} after")  # fmt: skip
    if climbs[0] < BREAK:
        raise SystemExit(f"the loss does not climb by {BREAK} past {trained} before the extension")
    if climbs[1] > TOLERANCE:
        raise SystemExit(f"the loss climbs by more than {TOLERANCE} past {trained} after the extension")


def main() -> None:
    """Train, extend, measure, draw, check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a much smaller model, from 32 tokens to 128")
    parser.add_argument("--data-dir", default="data", help="folder of prepared sets")
    parser.add_argument("--out", type=Path, help="folder of the two runs and the picture, a new one by default")
    args = parser.parse_args()
    out = args.out or Path("runs") / f"extend_context-{time.strftime('%Y%m%d-%H%M%S')}"
    words = {name: [f"--data.dir={args.data_dir}", *" ".join(quick if args.quick else ()).split()]
             for name, quick in QUICK.items()}  # fmt: skip
    first, second = out / "first", out / "second"
    short = train("long_demo", first, *words["long_demo"])
    long = train("long_demo_2048", second, *words["long_demo_2048"], "--init-from", str(first))

    trained, length = short.data.sequence_length, long.data.sequence_length
    runs = {
        f"trained at {trained:,}": starting_from(long.model_copy(update={"model": short.model}), first),
        "with YaRN, not trained further": starting_from(long, first),
        f"with YaRN, trained at {length:,}": starting_from(long, second),
    }
    found = by_position(runs, stride=trained)
    print(f"\nHeld-out loss in nats per token, under {long.parallel}:\n\n{table(found, trained // 4)}")
    title = f"Held-out loss by position: trained at {trained:,} tokens, extended to {length:,}"
    (out / "loss_by_position.svg").write_text(picture(found, trained // 4, trained, title), encoding="utf-8")
    print(f"\npicture: {out / 'loss_by_position.svg'}")
    before, _, after = found.values()
    check(before, after, trained)


if __name__ == "__main__":
    main()
