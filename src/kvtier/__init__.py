"""kvtier: a tiered store for attention keys and values (GPU memory, host memory, NVMe).

The rooms are `kvtier.index`, `kvtier.kernels`, `kvtier.tiers`, `kvtier.engine` and `kvtier.tools`;
importing this package loads none of them.
"""

__version__ = "0.1.0"
