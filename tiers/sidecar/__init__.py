"""One warm cache per host: a server that owns DRAM and NVMe, and the engine's tier beside it."""
