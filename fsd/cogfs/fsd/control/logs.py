"""The log of the daemon: one JSON object a line, on standard error."""

from __future__ import annotations

import logging
import sys
import threading

import structlog

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str) -> None:
    """Everything at ``level`` and above, of libraries too."""
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
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
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
