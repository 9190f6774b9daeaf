"""The output of several workers in one terminal or file."""

import codecs
import os
import re
import shutil
import sys
import threading
from typing import IO, TextIO

STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Of TensorFlow's start, whatever its level of messages: notes before it reads
# that, and the error that there is no driver of a GPU.
CHATTER = re.compile(
    r"WARNING: All log messages before absl::|I\d{4} [\d:.]+ +\d+ \w+\.cc:|"
    r"E\d{4} .*failed call to cuInit.*\(303\)$"
)


class Terminal:
    """Where the output of all workers is written, a line at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar_is_shown = False
        self._is_interactive = sys.stdout.isatty()
        self.hides_interrupts = False

    def hide_interrupts(self) -> None:
        """From now on tracebacks are not shown: the user has pressed Ctrl-C."""
        self.hides_interrupts = True

    def write_line(self, stream: TextIO, text: str) -> None:
        """Writes a line of its own, over the progress bar if there is one."""
        if not stream.isatty():
            text = STYLE.sub("", text)
        with self._lock:
            if self._bar_is_shown:
                sys.stdout.write("\r\x1b[K")
                sys.stdout.flush()
                self._bar_is_shown = False
            stream.write(text + "\n")
            stream.flush()

    def show_bar(self, text: str) -> None:
        """Writes a line for the next one to overwrite, in a terminal."""
        if self._is_interactive:
            width = shutil.get_terminal_size().columns
            with self._lock:
                bar = STYLE.sub("", text)[: width - 1]
                sys.stdout.write(f"\r{bar}\x1b[K")
                sys.stdout.flush()
                self._bar_is_shown = True


class LineFilter:
    """Turns what one worker writes to one stream into lines and bars.

    Args:
        terminal: Where they go.
        stream: The stream of ours that stands for the worker's.
        prefix: What to put before each line.
        shows_bars: Whether lines that overwrite themselves are shown.
        shows_chatter: Whether notes of TensorFlow's start are.
    """

    def __init__(
        self,
        terminal: Terminal,
        stream: TextIO,
        prefix: str,
        shows_bars: bool,
        shows_chatter: bool,
    ) -> None:
        self._terminal = terminal
        self._stream = stream
        self._prefix = prefix
        self._shows_bars = shows_bars
        self._shows_chatter = shows_chatter
        self._line = ""
        self._is_traceback = False

    def feed(self, text: str) -> None:
        """Takes the next piece of output."""
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            self._write(line.removesuffix("\r"))
        # A return at the end may belong to the end of the line.
        body = rest.removesuffix("\r")
        if "\r" in body:
            bar = visible_part(body)
            rest = "\r" + bar + rest[len(body) :]
            if self._shows_bars:
                self._terminal.show_bar(self._prefix + bar)
        self._line = rest

    def close(self) -> None:
        """Writes what is left without an end of line."""
        if self._line:
            self._write(self._line)
            self._line = ""

    def _write(self, line: str) -> None:
        if self._terminal.hides_interrupts and self._is_of_interrupt(line):
            return
        if not self._shows_chatter and CHATTER.match(line):
            return
        if self._shows_bars or "\r" not in line:
            text = self._prefix + visible_part(line)
            self._terminal.write_line(self._stream, text)

    def _is_of_interrupt(self, line: str) -> bool:
        """Whether a line is of a traceback; another error's last is not."""
        if not line.strip():
            return True
        if line.startswith("Traceback (most recent call last)"):
            self._is_traceback = True
        elif self._is_traceback and not line[0].isspace():
            self._is_traceback = False
            return line.startswith("KeyboardInterrupt")
        return self._is_traceback or line.startswith("During handling of the")


def visible_part(line: str) -> str:
    """What a terminal shows of a line that overwrites itself."""
    parts = [part.rstrip("\b") for part in line.split("\r")]
    return next((part for part in reversed(parts) if part), "")


def pass_on(pipe: IO[bytes], lines: LineFilter) -> None:
    """Reads a pipe to its end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        while piece := os.read(pipe.fileno(), 1 << 16):
            lines.feed(decoder.decode(piece))
        lines.close()
    except BrokenPipeError:
        pass  # nobody reads what we write; SIGPIPE tells the main thread
