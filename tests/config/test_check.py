"""The whole-configuration checks: each rule fires with its message, and only then."""

from __future__ import annotations

import pytest

from fivefold.config import check as check_module
from fivefold.config.check import check
from fivefold.config.overrides import apply, split
from fivefold.recipes import RECIPES


def problems(recipe: str, line: str = "", **known) -> list[str]:
    words = line.split()
    parallel = words.pop(0) if words and not words[0].startswith("--") else "single"
    rest, given = split(words)
    assert rest == []
    config, wrong = apply(RECIPES[recipe](), given | {"parallel": parallel})
    assert wrong == []
    return check(config, **known)


@pytest.mark.parametrize("recipe", ["moe_tiny", "dense_tiny"])
@pytest.mark.parametrize(
    "layout",
    [
        "single",
        "fsdp2",
        "fsdp4",
        "ddp2",
        "ddp4",
        "ddp2-fsdp2",
        "tp2",
        "tp4",
        "fsdp2-tp2",
        "ddp2-fsdp2-tp2",
        "pp2",
        "pp4-ddp2",
        "cp2",
        "cp4",
        "pp2-fsdp2-cp2-tp2",
    ],
)
@pytest.mark.parametrize("more", ["", "--train.microbatches 2 --train.recompute full", "--train.recompute every-2"])
def test_what_verify_covers_is_legal(recipe, layout, more):
    assert problems(recipe, f"{layout} {more}") == []


@pytest.mark.parametrize(
    ("recipe", "line", "words"),
    [
        (
            "moe_tiny",
            "fsdp2-ep2",
            ["ep=2 is a legal axis that this version cannot run yet", "pp, ddp, fsdp, cp and tp"],
        ),
        ("moe_tiny", "fsdp2-etp2", ["etp=2 is a legal axis"]),
        ("moe_tiny", "fsdp2 --data.batch-size 7", ["data.batch_size=7 is not a multiple of fsdp=2", "6 or", "=6 or 8"]),
        (
            "moe_tiny",
            "ddp2-fsdp2 --train.microbatches 3",
            ["data.batch_size=8 is not a multiple of ddp*fsdp*train.microbatches=12", "(ddp=2, fsdp=2,", "=12, or"],
        ),
        (
            "moe_tiny",
            "tp2 --data.sequence-length 15",
            ["data.sequence_length=15 is not a multiple of tp=2", "14 or 16"],
        ),
        ("moe_tiny", "tp2 --model.ffn-dim 33", ["model.ffn_dim=33 is not a multiple of tp=2", "32 or 34"]),
        ("moe_tiny", "tp4 --model.attention.n-heads 6", ["model.attention.n_heads=6", "4 or", "tp in [1, 2, 3, 6]"]),
        (
            "dense_tiny",
            "tp4 --model.attention.n-kv-heads 2",
            ["n_kv_heads=2 is not a multiple of tp=4", "tp in [1, 2]"],
        ),
        (
            "dense_tiny",
            "--model.attention.n-kv-heads 3",
            ["n_kv_heads=3 does not divide model.attention.n_heads=8", "[1, 2, 4, 8]"],
        ),
        ("dense_tiny", "--model.attention.head-dim 5", ["head_dim=5 is odd", "4 or 6"]),
        ("moe_tiny", "--model.attention.rope-dim 3", ["rope_dim=3 is odd", "2 or 4"]),
        ("moe_tiny", "tp4 --model.moe.expert-dim 6", ["n_shared*expert_dim=6", "tp=4", "tp in [1, 2, 3, 6]"]),
        ("moe_tiny", "--model.moe.top-k 9", ["top_k=9 is above model.moe.n_experts=8", "from 1 to 4"]),
        ("moe_tiny", "--model.moe.top-k 5", ["top_k=5 is above the 4 experts of the groups", "top_groups from 3"]),
        ("moe_tiny", "--model.moe.n-groups 3", ["n_groups=3 does not divide model.moe.n_experts=8", "[1, 2, 4, 8]"]),
        ("moe_tiny", "--model.moe.top-groups 5", ["top_groups=5 is above model.moe.n_groups=4", "from 1 to 4"]),
        ("moe_tiny", "--model.moe.n-groups 8", ["leaves 1 expert a group", "up to 4", "group_score=max"]),
        ("moe_tiny", "--model.moe.n-dense-layers 5", ["n_dense_layers=5 is above model.n_layers=4"]),
        ("moe_tiny", "--model.moe.bias-off-layers 0,2", ["names layers without experts: 0", "from 1 to 3"]),
        ("moe_tiny", "--optim.warmup-steps 21", ["warmup_steps=21 is longer than the run (train.steps=20)", "0 to 20"]),
        ("moe_tiny", "--optim.decay-steps 19", ["decay_steps=19 does not fit", "warmup_steps=2", "0 to 18"]),
        ("moe_tiny", "--train.recompute every-0", ["train.recompute=every-0", "every-N"]),
        ("moe_tiny", "--train.recompute ful", ["Did you mean full?"]),
        ("moe_tiny", "--train.eval-every 5 --no-train.evaluate", ["train.eval_every=5", "train.evaluate=true"]),
        ("moe_tiny", "--data.files random,stdlib", ["mixes random with other sets"]),
        ("moe_tiny", "--data.weights 1,2", ["data.weights=1,2 has nothing to weigh (data.files=random)"]),
        ("moe_tiny", "fsdp2 --profile.every 5 --profile.ranks 0,2", ["profile.ranks=0,2", "ranks from 0 to 1"]),
        ("moe_tiny", "fsdp2-tp", ["parallel=fsdp2-tp has 'tp'", "Did you mean tp2?"]),
    ],
)
def test_messages(recipe, line, words):
    found = problems(recipe, line)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


def test_a_layout_that_does_not_parse_hides_nothing_else():
    found = problems("moe_tiny", "fdsp2 --model.moe.top-k 9 --optim.warmup-steps 30")
    assert len(found) == 3


def test_world():
    assert problems("moe_tiny", "fsdp*-tp2", world=4) == []
    assert "needs 2 ranks" in problems("moe_tiny", "tp2", world=4)[0]
    assert "not known here" in problems("moe_tiny", "fsdp*-tp2")[0]


def test_device():
    assert problems("moe_tiny", "--train.device cpu", gpus=0) == []
    assert problems("moe_tiny", "fsdp2 --train.device cpu", gpus=1) == []
    assert problems("moe_tiny", "", gpus=0) == []
    assert problems("moe_tiny", "fsdp2 --train.device cuda", gpus=2) == []
    assert "none was found" in problems("moe_tiny", "--train.device cuda", gpus=0)[0]
    assert "needs 2 GPUs for parallel=fsdp2, and this machine has 1" in problems("moe_tiny", "fsdp2", gpus=1)[0]
    assert problems("moe_tiny", "fsdp4", gpus=2, world=4, local_world=2) == []


def test_show_takes_any_legal_layout():
    for name in RECIPES:
        assert check(RECIPES[name](), run=False) == []
    assert problems("deepseek_v3", "pp16-fsdp128-ep64", run=False) == []
    assert "n_experts=256 is not a multiple of ep=3" in problems("deepseek_v3", "fsdp3-ep3", run=False)[1]


def test_wandb_must_be_there(monkeypatch):
    monkeypatch.setattr(check_module, "find_spec", lambda name: None)
    assert "metrics.wandb=p needs wandb" in problems("moe_tiny", "--metrics.wandb p")[0]


@pytest.mark.parametrize(
    ("line", "zero"),
    [
        ("single", 3),
        ("fsdp2", 3),
        ("pp2", 1),
        ("pp2-fsdp2", 1),
        ("pp2-fsdp2 --train.zero 3", 3),
        ("fsdp2 --train.zero 2", 2),
        ("single --pipeline.chunks 2", 1),
        ("fsdp2 --pipeline.chunks 1", 3),
    ],
)
def test_zero_auto(line, zero):
    layout, *words = line.split()
    config, wrong = apply(RECIPES["moe_tiny"](), split(words)[1] | {"parallel": layout})
    assert (wrong, config.zero) == ([], zero)
