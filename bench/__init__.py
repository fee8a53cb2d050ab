"""Benches, run from the repository's root as `python -m bench.NAME`; nothing imports them.

(As a module, not as a file: run by path, `bench/requests.py` would shadow the library `requests`.)
"""
