"""Stands in for a module that transformers' source distribution refers to and does not contain."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from transformers.testing_utils import torch_device

_PATIENCE = 120  # seconds; a rank that waits for one that failed would wait for ever


def _get_distributed_device_type() -> str:
    return torch.device(torch_device).type


def _get_distributed_backend() -> str:
    return "gloo" if _get_distributed_device_type() == "cpu" else "nccl"


def _get_rank_device(rank: int) -> torch.device:
    kind = _get_distributed_device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, rank)


def _set_rank_device(rank: int) -> None:
    if _get_distributed_device_type() == "cuda":
        torch.cuda.set_device(rank)


def _start_rank_processes(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Run ``function(rank, *args)`` in ``nprocs`` processes; if one fails, end the others and raise."""
    # A server that has imported everything once, and forks: imports would take longer than the tests.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "hf_longmem.models.reformer_lsh.modeling_reformer_lsh"])
    processes = [context.Process(target=function, args=(rank, *args), daemon=True) for rank in range(nprocs)]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    deadline = time.monotonic() + _PATIENCE
    fault = None
    while running and fault is None:
        ended = wait(list(running), timeout=max(deadline - time.monotonic(), 0))
        if not ended:
            fault = f"the ranks were not done after {_PATIENCE} seconds"
        for sentinel in ended:
            process = running.pop(sentinel)  # type: ignore[index]
            process.join()
            if process.exitcode:
                fault = f"a rank ended with exit code {process.exitcode}"
    for process in running.values():
        process.kill()
        process.join()
    if fault is not None:
        raise RuntimeError(fault)
