"""llama.cpp's own server out of the package xllamacpp, for a machine that has no `llama-server`: the same HTTP.

python -m ktransformer2.bench.xllamacpp_server -m FILE --slot-save-path DIR/ -np 1 -c N -t N --host H --port P
"""

from __future__ import annotations

import argparse
import signal
from importlib.util import find_spec

PACKAGE = "xllamacpp"


def is_installed() -> bool:
    """Whether the package is there; it is not imported."""
    return find_spec(PACKAGE) is not None


def serve(words: list[str] | None = None) -> None:
    """Until the process is ended; `words` as `llama-server` takes them, those of them that the bench uses."""
    import xllamacpp

    parser = argparse.ArgumentParser()
    for name in ("-m", "--slot-save-path", "--host"):
        parser.add_argument(name, required=True)
    for name in ("-np", "-c", "-t", "--port"):
        parser.add_argument(name, required=True, type=int)
    asked = parser.parse_args(words)
    params = xllamacpp.CommonParams()
    params.model.path, params.slot_save_path = asked.m, asked.slot_save_path
    params.n_parallel, params.n_ctx = asked.np, asked.c
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.t
    params.hostnames, params.port = [asked.host], asked.port
    server = xllamacpp.Server(params)
    signal.pause()
    del server  # it serves as long as it lives


if __name__ == "__main__":
    serve()
