"""Any two layouts start from the same weights and read the same samples: both are functions of the seed alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fivefold.config.dims import ParallelDims
from fivefold.data.rows import IGNORE, Rows
from fivefold.data.sampler import Sampler
from fivefold.data.synthetic import Synthetic
from fivefold.data.tokenfile import TokenFile
from fivefold.data.writer import TokenFileWriter
from fivefold.mesh.mesh import Mesh
from fivefold.mesh.pool import Pool
from fivefold.tools.compare import Whole
from fivefold.train.batch import Batches, Source, to_device
from tests.parity.grid import LAYOUTS, changed, row

from . import cases

Pools = Callable[[int], Pool]
DATA_LAYOUTS = ("single", "tp2", "ddp2", "fsdp2", "fsdp2-tp2", "ddp2-fsdp2", "fsdp4", "ddp8", "ddp2-fsdp4-tp2")
BATCH = 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_bit_equal(pool: Pools, layout: str) -> None:
    for model in ("moe_q", "dense"):
        one: Whole = pool(1).run(cases.initial_weights, row("single", model).config)[0]
        config = row(layout, model, 3, train__small_buffer=300).config
        ranks: list[Whole] = pool(config.dims.world).run(cases.initial_weights, config)
        for found in ranks:
            assert found.owners and found.replicas
            assert found.tensors.keys() == one.tensors.keys()
            assert all(torch.equal(found.tensors[n], x) for n, x in one.tensors.items())
        assert all(x.any() for x in one.tensors.values())


def test_the_seed_counts(pool: Pools) -> None:
    config = row("single", "dense").config
    a, b = (pool(1).run(cases.initial_weights, changed(config, "train.seed", seed))[0].tensors for seed in (0, 1))
    assert all(torch.equal(a[n], b[n]) == ("norm" in n) for n in a)


class Ids:
    """Rows whose tokens are the sampler's ids."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def rows(self, step: int, start: int, stop: int) -> Rows:
        ids = self._sampler.ids(step)[start:stop, None]
        return Rows(tokens=ids, targets=ids, positions=ids, documents=ids.astype(np.int32), single_document=True)


def token_file(path: Path, n_documents: int) -> TokenFile:
    lengths = [5 + i % 7 for i in range(n_documents)]
    writer = TokenFileWriter(path, vocab_size=50, tokenizer={"tokenizer.json": "{}"})
    writer.append(np.arange(sum(lengths)) % 50, lengths, np.array(lengths, np.int64))
    writer.start_heldout()
    writer.append(np.arange(8), [8], np.array([8], np.int64))
    writer.finish(text_bytes=sum(lengths) + 8)
    return TokenFile.open(path)


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    """Two files in a mixture, the first one short enough to be read several times in six steps."""
    files = [token_file(tmp_path / "a", 20), token_file(tmp_path / "b", 200)]
    return Sampler(files, (1.0, 2.0), 8, BATCH, seed=3)


def whole_batches(source: Source, layout: str, microbatches: int) -> list[np.ndarray]:
    """Tokens of steps 1 to 6 as the ranks of a layout read them, in the order of the batch; tp ranks must agree."""
    dims = ParallelDims.parse(layout)
    config = row(layout, "dense", 1, microbatches, data__batch_size=BATCH).config
    steps: list[dict[int, np.ndarray]] = [{} for _ in range(6)]
    for rank in range(dims.world):
        mesh = Mesh(dims, rank, connect=False)
        batches = Batches(source, config, mesh)
        for i, seen in enumerate(steps):
            tokens = batches.rows(i + 1).tokens
            assert np.array_equal(seen.setdefault(mesh.data_rank(), tokens), tokens)
        batches.close()
    assert all(sorted(seen) == list(range(dims.data)) for seen in steps)
    return [np.concatenate([seen[i] for i in range(dims.data)]) for seen in steps]


@pytest.mark.parametrize("layout", DATA_LAYOUTS)
def test_sample_ids_are_the_batchs_in_order(sampler: Sampler, layout: str) -> None:
    found = whole_batches(Ids(sampler), layout, 2)
    for step, ids in enumerate(found, 1):
        assert ids[:, 0].tolist() == sampler.ids(step).tolist()
    assert len({tuple(ids[:, 0]) for ids in found}) == 6


@pytest.mark.parametrize("kind", ["sampler", "synthetic"])
def test_rows_are_equal_for_1_2_4_and_8_data_ranks(sampler: Sampler, kind: str) -> None:
    source = sampler if kind == "sampler" else Synthetic(37, 16, BATCH, 3)
    one = whole_batches(source, "single", 1)
    for layout in DATA_LAYOUTS[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(one, whole_batches(source, layout, 2), strict=True))


def test_rows_out_of_order_are_those_asked_for(sampler: Sampler) -> None:
    batches = Batches(sampler, row("single", "dense", data__batch_size=BATCH).config, Mesh.single())
    for step in (1, 2, 5, 2, 3):
        assert np.array_equal(batches.rows(step).tokens, sampler.rows(step, 0, BATCH).tokens)
    batches.close()


def test_microbatches_cover_the_share_and_carry_the_whole_batchs_counts() -> None:
    source = Synthetic(37, 16, 8, 3)
    batches = Batches(source, row("single", "dense", 1, 4).config, Mesh.single())
    rows = batches.rows(1)
    batch = batches.batch(rows)
    batches.close()
    assert int(batch.n_targets) == 16 + 7 + 5 + 1 + 0 + 11 + 3 + 16
    assert len(batch.microbatches) == 4
    for name in ("tokens", "targets", "positions", "documents"):
        parts = [getattr(mb, name) for mb in batch.microbatches]
        assert all(len(part) == 2 for part in parts)
        assert torch.equal(torch.cat(parts), torch.from_numpy(getattr(rows, name)))
    assert all(mb.n_targets is batch.n_targets and mb.n_sequences == 8 for mb in batch.microbatches)


def test_a_batch_without_targets_or_documents() -> None:
    """The count is at least one, so that nothing is divided by zero; one document a row needs no mask."""

    class Empty:
        def rows(self, step: int, start: int, stop: int) -> Rows:
            zeros = np.zeros((stop - start, 4), np.int64)
            return Rows(tokens=zeros, targets=zeros + IGNORE, positions=zeros, documents=zeros.astype(np.int32),
                        single_document=True)  # fmt: skip

    batches = Batches(Empty(), row("single", "dense").config, Mesh.single())
    batch = batches.batch(batches.rows(1))
    batches.close()
    assert int(batch.n_targets) == 1 and batch.microbatches[0].documents is None


def test_tensors_keep_their_dtypes() -> None:
    tensors = to_device(Synthetic(37, 16, 2, 0).rows(1, 0, 2), torch.device("cpu"))
    assert {n: x.dtype for n, x in tensors.items()} == {"tokens": torch.int64, "targets": torch.int64,
                                                        "positions": torch.int64, "documents": torch.int32}  # fmt: skip
