"""A mistake ends the command with status 2 and one line a problem, in a second or so, before torch is imported."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fivefold.cli.main import main
from fivefold.data.writer import TokenFileWriter

LIMIT_S = 5.0


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working folder, outside of any launcher."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def token_file(folder) -> Path:
    """A prepared set of 5 rows of 8 tokens, of a vocabulary of 40."""
    writer = TokenFileWriter(folder / "data" / "text", vocab_size=40, tokenizer={"tokenizer.json": "{}"})
    writer.append(np.arange(41) % 40, [33, 8], [99, 24])
    writer.start_heldout()
    writer.append(np.arange(20), [20], [60])
    writer.finish(text_bytes=183)
    return folder / "data" / "text"


def errors(capsys, line: str | list[str]) -> list[str]:
    """What ``fivefold LINE`` says; it must end with status 2, in time, and print only errors."""
    begin = time.monotonic()
    assert main(line.split() if isinstance(line, str) else line) == 2
    assert time.monotonic() - begin < LIMIT_S
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert all(text.startswith("error: ") for text in lines)
    return lines


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train moe_tinny", ["recipe=moe_tinny is not a recipe", "Did you mean moe_tiny?"]),
        ("verify moe_tinny --parallel tp2", ["Did you mean moe_tiny?"]),
        ("show deepseek_v4", ["Did you mean deepseek_v3?"]),
        ("train", ["RECIPE is missing", "moe_demo"]),
        ("train moe_tiny --train.stepz 5", ["train.stepz=5 is not a field", "Did you mean train.steps?"]),
        ("train moe_tiny --stepz 5", ["stepz=5 is not a field", "Did you mean train.steps?"]),
        ("train moe_tiny --stepz=5", ["stepz=5", "Did you mean train.steps?"]),
        ("train moe_tiny extra", ["extra= is not a field"]),
        ("show moe_tiny --run-dir x", ["run_dir=x is not a field"]),
        ("train moe_tiny --parallel fdsp2", ["parallel=fdsp2 has 'fdsp2'", "Did you mean fsdp2?"]),
        ("train moe_tiny --parallel fsdp*", ["fsdp to the number of ranks", "torchrun"]),
        (
            "train moe_tiny --parallel ep2-fsdp2",
            ["ep=2 is a legal axis that this version cannot run yet", "pp, ddp, fsdp, cp and tp"],
        ),
        ("verify moe_tiny --parallel fsdp2-etp2", ["etp=2 is a legal axis"]),
        ("train moe_tiny --parallel pp2 --train.microbatches 3", ["batch_size=8", "train.microbatches=3", "6 or 9"]),
        (
            "train moe_tiny --parallel pp2-fsdp2 --data.batch-size 10 --train.microbatches 2",
            ["fsdp*train.microbatches=4"],
        ),
        ("train moe_tiny --parallel pp8", ["pp=8 stages are more than the model's 6 parts", "pp from 1 to 6"]),
        ("verify moe_tiny --parallel pp2 pp8", ["pp=8 stages are more than the model's 6 parts"]),
        ("show moe_tiny --parallel pp8", ["pp=8 stages are more than the model's 6 parts"]),
        ("train moe_tiny --parallel pp4 --pipeline.chunks 2", ["pp*chunks=8 stages", "one chunk with pp=4"]),
        (
            "train moe_tiny --parallel pp2 --pipeline.schedule zb_q",
            ["pipeline.schedule=zb_q is not", "Did you mean zb_"],
        ),
        ("train moe_tiny --pipeline.schedule zb_h1 --pipeline.chunks 2", ["pipeline.chunks=2", "zb_h1"]),
        ("train moe_tiny --parallel pp2 --pipeline.stages 2,3", ["adds up to 5 parts", "has 6", "such as 3,3"]),
        ("train moe_tiny --parallel pp2 --pipeline.stages 6", ["counts 1 stages, not the 2 of pp=2"]),
        ("train moe_tiny --parallel pp2 --pipeline.costs F=1", ["pipeline.costs=F=1 has no effect"]),
        ("train moe_tiny --pipeline.schedule auto --pipeline.costs F=a", ["pipeline.costs=F=a"]),
        ("train moe_tiny --parallel pp2 --pipeline.schedule mine.py:table", ["mine.py does not exist"]),
        ("train moe_tiny --parallel tp3", ["tp=3", "tp in [1, 2, 4]"]),
        ("train moe_tiny --parallel tp2 --data.sequence-length 15", ["sequence_length=15", "14 or 16"]),
        ("train moe_tiny --parallel fsdp2 --data.batch-size 9", ["batch_size=9", "=8 or 10"]),
        ("train moe_tiny --train.microbatches 3", ["batch_size=8", "train.microbatches=3", "6 or 9"]),
        ("show moe_tiny --parallel fsdp3-ep3 --data.batch-size 9", ["n_experts=8 is not a multiple of ep=3", "6 or"]),
        ("train moe_tiny --model.dim 0", ["model.dim=0 is not above 0", "from 1"]),
        ("train moe_tiny --model.dim -4", ["model.dim=-4 is not above 0"]),
        ("train moe_tiny --data.batch-size 0", ["data.batch_size=0 is not above 0"]),
        (f"train moe_tiny --train.seed {2**63}", [f"train.seed={2**63} is above {2**63 - 1}"]),
        ("train moe_tiny --parallel tp0", ["tp=0 is below 1"]),
        ("train moe_tiny --model.moe.top-k 9", ["top_k=9 is above model.moe.n_experts=8"]),
        ("train moe_tiny --optim.warmup-steps 30", ["warmup_steps=30 is longer than the run (train.steps=20)"]),
        ("verify moe_tiny --steps 0", ["train.steps=0 is not above 0"]),
        ("verify moe_tiny --dtype bfloat16", ["bfloat16 cannot be verified", "float64 or float32"]),
        ("verify moe_tiny --dtype floaty", ["train.dtype=floaty"]),
        ("train moe_tiny --data.files nowhere", ["data.files=nowhere is not prepared"]),
        ("train moe_tiny --data.files stdlib", ["vocabulary of 4096", "model.vocab_size=37"]),
        ("prepare nowhere.txt", ["nowhere.txt"]),
        ("schedule", ["NAME is missing", "zb_v", "path/file.py:function"]),
        ("schedule zb_w", ["schedule=zb_w is not a schedule", "Did you mean zb_v?"]),
        ("schedule zb_v --chunks 3", ["chunks=3 is not 2", "Use chunks=2, or schedule in [interleaved,"]),
        ("schedule auto --limit 1 --chunks 2", ["limit=1 is below 2", "(chunks=2)", "Use 2 or more"]),
        ("schedule 1f1b --limit 4", ["limit=4 has no effect on schedule=1f1b"]),
        ("schedule nowhere.py:table", ["schedule=nowhere.py:table names no file"]),
        ("schedule 1f1b --json nowhere/a.json", ["json=nowhere/a.json cannot be written"]),
    ],
)
def test_messages(capsys, line, words):
    found = errors(capsys, line)
    assert any(all(word in text for word in words) for text in found), found


LATENT_OF_NONE = "context.method=latent exchanges MLA's latent, and this model has none (model.attention.kind=gqa)."
CONTEXT = [
    (
        "moe_tiny --parallel tp2 --data.sequence-length 15",
        "data.sequence_length=15 is not a multiple of tp=2. Use data.sequence_length=14 or 16, or tp in [1, 3, 5, 15].",
    ),
    (
        "moe_tiny --parallel cp2-tp2 --data.sequence-length 14 --context.placement contiguous",
        "data.sequence_length=14 is not a multiple of cp*tp=4 (cp=2, tp=2, context.placement=contiguous). "
        "Use data.sequence_length=12 or 16.",
    ),
    (
        "moe_tiny --parallel cp2 --data.sequence-length 15 --context.placement contiguous",
        "data.sequence_length=15 is not a multiple of cp=2 (cp=2, context.placement=contiguous). "
        "Use data.sequence_length=14 or 16.",
    ),
    (
        "moe_tiny --parallel cp2-tp2 --data.sequence-length 12",
        "data.sequence_length=12 is not a multiple of 2*cp*tp=8 (cp=2, tp=2, context.placement=zigzag). "
        "Use data.sequence_length=8 or 16, or context.placement=contiguous.",
    ),
    (
        "dense_tiny --parallel cp2-tp2 --data.sequence-length 15 --context.placement balanced",
        "data.sequence_length=15 is not a multiple of 2*cp*tp=8 (cp=2, tp=2, context.placement=balanced). "
        "Use data.sequence_length=8 or 16.",
    ),
    (
        "dense_tiny --parallel cp4 --data.sequence-length 3",
        "data.sequence_length=3 is not a multiple of 2*cp=8 (cp=4, context.placement=zigzag). "
        "Use data.sequence_length=8.",
    ),
    (
        "moe_tiny --parallel cp8 --context.method ulysses",
        "context.method=ulysses needs heads that cp*tp=8 divides (cp=8, tp=1, model.attention.n_heads=4). "
        "Use cp in [1, 2, 4], or context.method in ring, all_gather, latent.",
    ),
    (
        "dense_tiny --parallel cp4-tp2 --context.method ulysses",
        "context.method=ulysses needs heads that cp*tp=8 divides "
        "(cp=4, tp=2, model.attention.n_heads=8, model.attention.n_kv_heads=4). "
        "Use cp in [1, 2], or context.method in ring, all_gather.",
    ),
    (
        "dense_tiny --parallel cp2 --context.method latent",
        f"{LATENT_OF_NONE} Use context.method in ring, all_gather, ulysses.",
    ),
    (
        "moe_tiny --parallel cp2 --context.method rng",
        "context.method=rng is not one of the choices. Did you mean ring? "
        "Use ring, all_gather, ulysses, latent, auto, or path/file.py:function.",
    ),
    (
        "moe_tiny --parallel cp2 --context.placement zigzagged",
        "context.placement=zigzagged is not one of the choices. Did you mean zigzag? "
        "Use zigzag, contiguous, balanced, or path/file.py:function.",
    ),
    (
        "moe_tiny --parallel cp2 --context.link-gb-per-s 0",
        "context.link_gb_per_s=0 is not above 0. Use a number above 0.",
    ),
]


@pytest.fixture
def no_process(monkeypatch):
    """A process that is started fails the test."""

    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("os.fork", start)
    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", start)


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize(("line", "message"), CONTEXT)
def test_sequences_that_cannot_be_cut(capsys, no_process, command, line, message):
    assert errors(capsys, f"{command} {line}") == [f"error: {message}"]


OWN = """
def method(run):
    return None

def placement(documents, n):
    return None
"""


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("method", "no/where.py:method", ["Use the path of an existing Python file."]),
        ("method", "nowhere.py:method", ["names no file", "nowhere.py does not exist"]),
        ("method", "owm.py:method", ["owm.py does not exist", "Did you mean", "own.py?"]),
        ("method", "own.py:methd", ["own.py has no methd", "Did you mean own.py:method?"]),
        ("method", "broken.py:method", ["cannot be imported: ZeroDivisionError", "broken.py, line 1"]),
        ("placement", "nowhere.py:place", ["names no file", "nowhere.py does not exist"]),
        ("placement", "own.py:place", ["own.py has no place", "Did you mean own.py:placement?"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_method_and_a_placement_of_ones_own(capsys, folder, no_process, command, key, name, words):
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("1 / 0\n")
    (text,) = errors(capsys, f"{command} moe_tiny --parallel cp2 --context.{key} {name}")
    assert all(word in text for word in [f"error: context.{key}={name}", *words]), text


def test_many_at_once(capsys, folder):
    (folder / "old").mkdir()
    (folder / "old" / "config.json").write_text("{}")
    found = errors(
        capsys,
        "train moe_tiny --parallel fsdp3-ep3 --optm.lr 1 --train.steps abc --model.moe.top-k 9 --optim.warmup-steps 30 "
        "--run-dir old --data.files nowhere --data.weights 1,2 --stepz 4",
    )
    keys = ("optm.lr=1", "stepz=4", "train.steps=abc", "model.moe.top_k=9", "optim.warmup_steps=30", "run_dir=old")
    keys += ("data.files=nowhere", "data.weights=", "ep=3", "data.batch_size=8", "model.moe.n_experts=8")
    for key in keys:
        assert sum(f"error: {key}" in text for text in found) == 1, (key, found)
    assert len(found) == len(keys)


TABLES = """
def gpipe(pp, microbatches, chunks):
    return [[(kind, rank, m) for kind in "FB" for m in range(microbatches)] for rank in range(pp)]

def repeats(*sizes):
    first, *rest = gpipe(*sizes)
    return [[first[0], *first], *rest]

def omits(*sizes):
    *rest, last = gpipe(*sizes)
    return [*rest, last[:-1]]

def deadlocks(pp, microbatches, chunks):
    first, *rest = gpipe(pp, microbatches, chunks)
    return [[(kind, 0, m) for m in range(microbatches) for kind in "FB"], *rest]

def fails(*sizes):
    return gpipe(*sizes)[9]

def number(*sizes):
    return 7
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("repeats", ["F0.0 runs 2 times on rank 0"]),
        ("omits", ["Rank 1 never runs B1.1"]),
        ("deadlocks", ["rank 0 waits at B0.0 for B1.0; rank 1 waits at F1.1 for F0.1"]),
        ("fails", ["IndexError", "(pp=2, microbatches=2, chunks=1)", "tables.py, line"]),
        ("number", ["7 is not a table"]),
        ("gpip", ["Did you mean tables.py:gpipe?"]),
    ],
)
@pytest.mark.parametrize("command", ["train moe_tiny --parallel pp2", "verify moe_tiny --parallel pp2 pp2-tp2"])
def test_a_schedule_of_ones_own(capsys, folder, function, words, command):
    (folder / "tables.py").write_text(TABLES)
    (text,) = errors(capsys, f"{command} --train.microbatches 2 --pipeline.schedule tables.py:{function}")
    assert all(word in text for word in [f"pipeline.schedule=tables.py:{function}", *words]), text


def test_a_schedule_is_refused_with_all_that_is_wrong(capsys, folder):
    line = "schedule auto --pp 0 --microbatches x --chunks -1 --cost F=-1,Q=2 --limit many --svg . --json no/a.json"
    found = errors(capsys, line)
    keys = ("pp=0 is not a whole number above 0", "microbatches=x", "chunks=-1", "cost=F=-1,Q=2 has F=-1")
    keys += ("cost=F=-1,Q=2 has Q=2", "limit=many is not a number above 0", "svg=. cannot", "json=no/a.json cannot")
    for key in keys:
        assert sum(text.startswith(f"error: {key}") for text in found) == 1, (key, found)
    assert len(found) == len(keys)
    (folder / "tables.py").write_text(TABLES)
    for name, words in (("deadlocks", "rank 0 waits at B0.0 for B1.0"), ("omits", "never runs B1.1")):
        (text,) = errors(capsys, f"schedule tables.py:{name} --pp 2 --microbatches 2")
        assert words in text


MODEL = '''
from fivefold.config.model import ModelConfig
from fivefold.recipes.tiny import dense_tiny

class Own(ModelConfig):
    """A model whose parts have no costs."""

def recipe():
    return dense_tiny().model_copy(update={"model": Own(builder="nowhere:build", vocab_size=37)})
'''


def test_a_model_that_does_not_say_its_parts(capsys, folder):
    (folder / "own.py").write_text(MODEL)
    (text,) = errors(capsys, "train own.py:recipe --parallel pp2 --train.microbatches 2")
    assert text.startswith("error: pp=2 cuts the model, but Own does not say what its parts are. Define part_costs(")


def test_gpu_where_none_is(capsys, monkeypatch):
    monkeypatch.setattr("fivefold.cli.train.gpu_count", lambda visible: 0)
    assert "train.device=cuda asks for a GPU" in errors(capsys, "train moe_tiny --train.device cuda")[0]
    monkeypatch.setattr("fivefold.cli.train.gpu_count", lambda visible: 1)
    assert "this machine has 1" in errors(capsys, "train moe_tiny --parallel tp2")[0]


def test_run_folder(capsys, folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    assert "run_dir=run already holds a run" in errors(capsys, "train moe_tiny --run-dir run")[0]
    (folder / "file").write_text("")
    assert "lies under a file" in errors(capsys, "train moe_tiny --run-dir file/run")[0]
    (folder / "runs").write_text("")
    assert "run_dir=runs (the default) lies under a file" in errors(capsys, "train moe_tiny")[0]


def test_folders_that_cannot_be_made(capsys, folder, monkeypatch):
    assert "run_dir= is empty" in errors(capsys, ["train", "moe_tiny", "--run-dir", ""])[0]
    monkeypatch.setattr(Path, "mkdir", refuse)
    for line in ("train moe_tiny --run-dir new", "train moe_tiny"):
        (text,) = errors(capsys, line)
        assert "cannot be made: No space left on device (" in text


def refuse(path: Path, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_full_disk(capsys, folder, monkeypatch):
    monkeypatch.setattr("fivefold.cli.prepare.prepare", lambda request: refuse(Path("data")))
    assert main(["prepare", "text"]) == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device: 'data'\n"


def test_a_report_that_cannot_be_written(capsys, folder):
    assert "json=no/report.json cannot be written" in errors(capsys, "verify moe_tiny --json no/report.json")[0]
    assert "cannot be written" in errors(capsys, f"verify moe_tiny --json {folder}")[0]


def test_a_folder_one_may_not_write(capsys, folder, monkeypatch):
    (folder / "mine").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert "run_dir=mine/run cannot be written" in errors(capsys, "train moe_tiny --run-dir mine/run")[0]


def test_data(capsys, token_file):
    line = "train moe_tiny --data.files text --data.sequence-length 8 --data.batch-size"
    assert "vocabulary of 40, more than the model's (model.vocab_size=37)" in errors(capsys, f"{line} 4")[0]
    line = line.replace("moe_tiny", "moe_tiny --model.vocab-size 41")
    assert "data.batch_size=6 exceeds the rows of the training data" in errors(capsys, f"{line} 6")[0]
    content = (token_file / "tokens.bin").read_bytes()
    (token_file / "tokens.bin").write_bytes(content[:-2])
    assert "tokens.bin" in errors(capsys, f"{line} 4")[0]
    (token_file / "tokens.bin").write_bytes(content[:10] + bytes([content[10] ^ 1]) + content[11:])
    assert "tokens.bin" in errors(capsys, f"{line} 4")[0]


def test_other_files_are_checked_before_the_library_is_prepared(capsys, folder):
    (text,) = errors(capsys, "train moe_demo --data.files stdlib,nowhere")
    assert "data.files=nowhere is not prepared" in text
    assert list(folder.iterdir()) == []


@pytest.fixture
def restored_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("1", False)])
def test_under_torchrun_the_first_rank_speaks(capsys, monkeypatch, rank, printed):
    for name, value in (("RANK", rank), ("WORLD_SIZE", "4"), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    found = errors(capsys, "train moe_tiny --parallel fsdp2 --optim.warmup-steps 30")
    assert len(found) == (2 if printed else 0)
    assert not printed or "parallel=fsdp2 needs 2 ranks (fsdp2), but 4 were started" in found[0]


def test_torchrun(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fivefold"]
    command += ["train", "moe_tiny", "--parallel", "fsdp*-tp4"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert done.returncode != 0
    assert done.stderr.count("error: parallel=fsdp*-tp4") == 1
    assert done.stderr.count("exitcode  : 2") == 2


@pytest.mark.parametrize(
    "words",
    [
        ["train", "moe_tiny", "--parallel", "tp3", "--train.steps", "0"],
        ["train", "moe_tiny", "--train.device", "cuda", "--data.files", "nowhere"],
        ["verify", "moe_tiny", "--parallel", "ep2-fsdp2"],
        ["verify", "moe_tiny", "--parallel", "cp2", "--context.method", "rng"],
        ["train", "dense_tiny", "--parallel", "cp2", "--context.method", "latent", "--no-documents"],
        ["train", "moe_tiny", "--parallel", "pp2", "--pipeline.schedule", "auto", "--pipeline.stages", "3,4"],
        ["train", "moe_tiny", "--parallel", "pp2", "--pipeline.schedule", "json:dumps"],
        ["show", "moe_tiny", "--model.dim", "0"],
        ["recipes"],
        ["train", "moe_tiny", "--help"],
        ["prepare", "nowhere.txt"],
    ],
)
def test_torch_is_not_imported(folder, words):
    code = (
        "import sys\nfrom fivefold.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'torch']\nsys.exit(status)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, env=env)
    expected = 0 if words[0] == "recipes" or "--help" in words else 2
    assert done.returncode == expected, done.stderr
    assert "Traceback" not in done.stderr
