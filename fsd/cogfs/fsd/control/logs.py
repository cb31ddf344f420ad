"""The log of the daemon: one JSON object a line, on standard error."""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import suppress
from typing import TextIO, cast

import structlog

LEVELS = ("debug", "info", "warning", "error")
USUAL = "info"


class _Lossy:
    """A stream that loses what its disk does not take: that a line cannot be logged must not end what logs it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def configure(level: str) -> None:
    """Everything at ``level`` and above, of libraries too."""
    stream = cast(TextIO, _Lossy(sys.stderr))
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=repr),
    ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    log = structlog.get_logger("cogfs")
    threading.excepthook = lambda caught: log.error(
        "a thread ended by an error",
        thread=caught.thread.name if caught.thread else "",
        exc_info=caught.exc_value or caught.exc_type,
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.INFO), force=True)
