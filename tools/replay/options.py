"""What the options of `kvtier replay` say: room in blocks ("4000") or in bytes ("64GiB")."""

from kvtier.index.words import TierId
from kvtier.tools.errors import BadOption
from kvtier.tools.options import admission, policy
from kvtier.tools.replay.world import Setup
from kvtier.tools.sizes import parse_size

# A pool of so many keeps some ten gigabytes of books.
MOST_BLOCKS = 1 << 27


def parse_setup(
    *,
    hbm: str,
    dram: str,
    nvme: str,
    block_bytes: int | None,
    hbm_policy: str,
    dram_policy: str,
    writeback_s: float | None,
    write_budget: str | None,
    nvme_admission: str = "all",
) -> Setup:
    """Check and parse. Raises `BadOption` for a value that makes no sense, and without a pool."""
    rooms = {
        option: parse_blocks(text, option, block_bytes)
        for option, text in (("--hbm", hbm), ("--dram", dram), ("--nvme", nvme))
    }
    if not rooms["--hbm"] and not rooms["--dram"]:
        raise BadOption("--hbm and --dram: both are 0; a cache needs one of them above NVMe")
    pools = {TierId.HBM: rooms["--hbm"], TierId.DRAM: rooms["--dram"]}
    policies = {
        TierId.HBM: policy(hbm_policy, "--hbm-policy"),
        TierId.DRAM: policy(dram_policy, "--dram-policy"),
    }
    size, budget = block_bytes or 1, None
    if write_budget is not None:
        budget = parse_blocks(write_budget, "--write-budget", block_bytes) * size
    return Setup(
        hbm=pools[TierId.HBM],
        dram=pools[TierId.DRAM],
        nvme=rooms["--nvme"],
        block_bytes=size,
        policies={tier: policies[tier] for tier, room in pools.items() if room},
        writeback_s=writeback_s,
        write_budget_bytes=budget,
        nvme_admission=admission(nvme_admission),
    )


def parse_blocks(text: str, option: str, block_bytes: int | None) -> int:
    """Whole blocks in `text`; a bare number counts blocks, "0" is none.

    Raises `BadOption` naming `option`: no number and no size, a size while `block_bytes` is not
    known, less than one block, or more than a replay can keep books on.
    """
    if text.strip().isdecimal():
        blocks = int(text)
    elif block_bytes is None:
        raise BadOption(f"{option}: {text!r} is no number of blocks; for a size, add --block-bytes")
    else:
        blocks = parse_size(text, option) // block_bytes
        if not blocks:
            raise BadOption(f"{option}: {text!r} is less than one block of {block_bytes} bytes")
    if blocks > MOST_BLOCKS:
        raise BadOption(f"{option}: {blocks:,} blocks; a replay takes at most {MOST_BLOCKS:,}")
    return blocks
