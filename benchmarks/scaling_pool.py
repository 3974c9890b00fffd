"""Worker processes that measure cells, a few at a time, each cell guarded by a time limit."""

import contextlib
import dataclasses
import json
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.scaling_cells import Cell

#: Seconds for a worker's first line: importing JAX and finding the devices.
START_S = 120.0
#: For a job that is not of cells, and says little of where it is.
WHOLE_S = 300.0
#: Of results.
KINDS = ("row", "link", "hop", "training")


@dataclasses.dataclass
class Job:
    """What one worker is told, and the cells it has yet to do."""

    told: dict[str, Any]
    cells: list[Cell]


@dataclasses.dataclass(eq=False)
class Worker:
    job: Job
    process: subprocess.Popen
    log: pathlib.Path
    since: float  # when its state began
    state: str = "starting"
    key: str = ""
    reader: threading.Thread | None = None

    def overdue(self, limit: float) -> bool:
        spent = time.monotonic() - self.since
        if self.state == "waiting":
            return False
        if not self.job.cells:  # kernels, training
            return spent > max(limit, WHOLE_S)
        return spent > (START_S if self.state == "starting" else limit)


class Pool:
    """`run` calls `take(kind, result)`, of `KINDS`, for everything the workers find."""

    def __init__(
        self,
        environment: dict[str, str],
        scratch: str,
        limit: float,
        command: Sequence[str] = (sys.executable, "-m", "benchmarks.scaling_worker"),
    ):
        self.environment, self.scratch, self.limit = environment, pathlib.Path(scratch), limit
        self.command = command
        self.events: queue.Queue[tuple[Worker, dict[str, Any] | None]] = queue.Queue()
        self.workers: list[Worker] = []
        self.count = 0

    def start(self, job: Job) -> Worker:
        self.count += 1
        told, log = (self.scratch / f"{self.count}.{end}" for end in ("json", "log"))
        cells = [dataclasses.asdict(cell) for cell in job.cells]
        told.write_text(json.dumps({**job.told, "cells": cells}))
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*self.command, str(told)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self.environment,
                cwd=pathlib.Path(__file__).parent.parent,
            )
        worker = Worker(job, process, log, time.monotonic())
        worker.reader = threading.Thread(target=self._read, args=(worker,), daemon=True)
        worker.reader.start()
        return worker

    def _read(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        with worker.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # a library's own output
                    self.events.put((worker, json.loads(line)))
        self.events.put((worker, None))

    def ask(self, told: dict[str, Any], name: str) -> Any:
        """The answer of a worker that is told to do one thing, or None."""
        worker = self.start(Job(told, []))
        answer = None
        with contextlib.suppress(queue.Empty):
            while (line := self.events.get(timeout=START_S)[1]) is not None:
                answer = line.get(name, answer)
        self._end(worker)
        return answer

    def run(
        self,
        jobs: list[Job],
        side_by_side: int,
        deadline: float,
        take: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Everything that can be done before `deadline`, in the order of the jobs."""
        left = list(jobs)
        try:
            while (left or self.workers) and time.monotonic() < deadline:
                while left and len(self.workers) < side_by_side:
                    self.workers.append(self.start(left.pop(0)))
                with contextlib.suppress(queue.Empty):
                    self._handle(*self.events.get(timeout=0.2), left, take)
                for worker in list(self.workers):
                    if worker.overdue(self.limit):
                        self._give_up(worker, f"no result after {self.limit:.0f} s", left, take)
        finally:
            for worker in self.workers:
                self._end(worker)
            self.workers = []

    def _handle(self, worker: Worker, line: dict[str, Any] | None, left: list[Job], take) -> None:
        if worker not in self.workers:
            return
        if line is None:
            code = worker.process.wait()
            if code or worker.job.cells:
                self._give_up(worker, f"the worker ended with status {code}", left, take)
            else:
                self.workers.remove(worker)
            return
        worker.since = time.monotonic()
        if "state" in line:
            worker.state, worker.key = line["state"], line["key"]
        for kind in KINDS:
            if kind in line:
                take(kind, line[kind])
        if "row" in line:
            cells = worker.job.cells
            worker.job.cells = [cell for cell in cells if cell.key != line["row"]["key"]]

    def _give_up(self, worker: Worker, why: str, left: list[Job], take) -> None:
        """Ends the worker; its cell is an error, and its other cells are the next job."""
        self._end(worker)
        self.workers.remove(worker)
        cells = worker.job.cells
        said = worker.log.read_text(errors="replace").strip().splitlines()[-1:]
        if not cells:
            what = [name for name in worker.job.told if name in ("links", "hops", "training")]
            print(f"{what} {worker.state}: {why} {said}"[:400], file=sys.stderr, flush=True)
        if cells:
            failed = next((cell for cell in cells if cell.key == worker.key), cells[0])
            take("row", {"key": failed.key, "error": f"{worker.state}: {why} {said}"[:400]})
            cells.remove(failed)
        if cells and worker.state != "starting":  # else the next one would not start either
            told = {k: v for k, v in worker.job.told.items() if k != "links"}
            left.insert(0, Job(told, cells))

    def _end(self, worker: Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        if worker.reader is not None:
            worker.reader.join()
