"""What a benchmark is at, told on stderr while it runs."""

import shutil
import time
from typing import Any

#: Where lines stay, what is told often is told each so many seconds.
_EVERY_S = 10.0


class Progress:
    """One line that changes on a terminal, elsewhere lines that stay; each begins with the time spent."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.changes = stream.isatty()
        self.begin = time.perf_counter()
        self.told = 0.0
        self.where = ""

    def __call__(self, text: str, often: bool = False) -> None:
        spent = time.perf_counter() - self.begin
        line = f"{int(spent) // 60}:{int(spent) % 60:02} {self.where}{text}"
        if self.changes:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", file=self.stream, flush=True)
        elif not often or spent - self.told >= _EVERY_S:
            self.told = spent
            print(line, file=self.stream, flush=True)

    def end(self) -> None:
        """Clears the line."""
        if self.changes:
            print("\r\033[K", end="", file=self.stream, flush=True)
