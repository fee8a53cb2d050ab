"""The ground floor: names, the radix tree and the policies. No torch, no I/O, no clock."""
