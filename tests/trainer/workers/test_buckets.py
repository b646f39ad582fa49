"""Shards move between ranks in buckets: the sums are those of all ranks, whichever way they are cut."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tuneloop.trainer.ranks.buckets import Buckets
from tuneloop.trainer.ranks.shards import cut

#: Of very different lengths; of a rank of four, the last ones are no more than a block.
COUNTS = {"large": 5000, "tiny": 3, "unlearnt": 700, "half": 2600, "last": 256}


def _parts(shards, rank, *, dtype=torch.float32):
    """A rank's own numbers of each parameter, and nothing of one that it has learnt nothing of."""
    random = torch.Generator().manual_seed(rank)
    whole = {name: torch.randn(count, generator=random).to(dtype) for name, count in COUNTS.items()}
    return [(shard, whole[shard.name][shard.span]) for shard in shards]


def _run(folder: Path, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    shards = [each for each in cut(COUNTS, size) if each.name != "unlearnt"]
    for numbers in (2 * size, 2 * size * 37, 1 << 20):  # buckets of one number, of some, and one for all
        buckets = Buckets(rank, size, numbers, torch.device("cpu"))
        everywhere = [_parts(shards, other) for other in range(size)]
        mine = [(shard, None if rank == 1 and shard.name == "tiny" else each) for shard, each in everywhere[rank]]
        sums = {shard: each.clone() for shard, each in everywhere[rank] if shard.owner == rank}
        buckets.add_up(mine, sums)
        for at, shard in enumerate(shards):
            told = [parts[at][1] for other, parts in enumerate(everywhere) if (other, shard.name) != (1, "tiny")]
            if shard.owner == rank:
                torch.testing.assert_close(sums[shard], torch.stack(told).sum(0), rtol=0, atol=1e-5)
        for dtype in (torch.float32, torch.bfloat16):
            everywhere = [_parts(shards, other, dtype=dtype) for other in range(size)]
            buckets.spread(everywhere[rank])
            for at, (shard, each) in enumerate(everywhere[rank]):
                owned = everywhere[shard.owner][at][1] if shard.owner != rank else each
                assert torch.equal(each, owned)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forked: imports take longest
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_owner_has_the_sums_and_every_rank_what_owners_have(tmp_path, size):
    pids = {}
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                _run(tmp_path, rank, size)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids[pid] = rank
    assert {pids[pid]: os.waitstatus_to_exitcode(status) for pid, status in (os.waitpid(each, 0) for each in pids)} == (
        dict.fromkeys(range(size), 0)
    )
