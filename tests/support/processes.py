"""Real processes for tests: started together, watched, killed on purpose, and ended whatever happens.

They are forked from a server that has imported torch, transformers and this package once and has computed nothing, so
that a process costs little more than what it is asked to do.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
import time
import traceback
from contextlib import AbstractContextManager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "torch.distributed",
        "torch._dynamo",
        "transformers.trainer",
        "hf_longmem.cli.train",
        "hf_longmem.models.infinite_former.modeling_infinite_former_heads",
        "hf_longmem.models.reformer_lsh.modeling_reformer_lsh_heads",
    ]
)


class Processes(AbstractContextManager["Processes"]):
    """Run one function of one file in so many processes, as ``torchrun`` would on a machine without accelerators.

    Args:
        program: the file that defines the function.
        function: its name. It is called with ``arguments``; what it returns must be JSON.
        directory: where the processes' logs and results are kept; a folder of its own for every run.
        world_size: how many processes. More than one find each other over gloo before the function is called.
        arguments: keyword arguments of the function, which can be pickled.
    """

    def __init__(self, program: str | Path, function: str, directory: Path, world_size: int = 1, **arguments: Any):
        directory.mkdir(parents=True)
        self.directory, self.world_size = directory, world_size
        self.processes = [
            _server.Process(
                target=_child, args=(str(program), function, rank, world_size, str(directory), arguments), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def results(self, timeout: float = 120) -> list[Any]:
        """Wait for all of them and return what each returned; the first that fails ends the others."""
        codes = self.exit_codes(timeout)
        assert codes == [0] * self.world_size, f"exit codes {codes}\n{self.logs()}"
        return [json.loads((self.directory / f"{rank}.json").read_text()) for rank in range(self.world_size)]

    def exit_codes(self, timeout: float = 120) -> list[int | None]:
        """Wait until all have ended, or one has failed, or time is up; none is left running."""
        deadline = time.monotonic() + timeout
        running = {process.sentinel: process for process in self.processes}
        while running and time.monotonic() < deadline:
            ended = [running.pop(sentinel) for sentinel in wait(running, timeout=1.0)]  # type: ignore[call-overload]
            if any(process.exitcode for process in ended):
                wait(running, timeout=2.0)  # the others' words on it
                break
        self.kill()
        return [process.exitcode for process in self.processes]

    def logs(self) -> str:
        """What every process has printed."""
        files = [self.directory / f"{rank}.log" for rank in range(self.world_size)]
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files if file.exists())

    def kill(self) -> None:
        """SIGKILL what still runs."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _child(program: str, function: str, rank: int, world_size: int, directory: str, arguments: dict[str, Any]) -> None:
    log = os.open(f"{directory}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=world_size)
    try:
        spec = importlib.util.spec_from_file_location(Path(program).stem, program)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        result = getattr(module, function)(**arguments)
        Path(directory, f"{rank}.json").write_text(json.dumps(result))
        if dist.is_initialized():
            # None leaves while another may still be reading what it sent.
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


__all__ = ["Processes"]
