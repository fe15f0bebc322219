"""A process for the tests: server.serve over a FakeEngine, with the command line's own error handling and exit status.

``python -m tests.server.fake_serve '{"engine": {...}, "settings": {...}, "start_error": "...", "make_seconds": 0}'``
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from engine.errors import ModelNotFoundError
from server import cli
from server.metrics import Metrics
from server.progress import ProgressView
from server.settings import Settings
from tests.fakes import FakeEngine, FakeStatus


def run() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    failure = ModelNotFoundError(plan["start_error"]) if "start_error" in plan else None
    num_words = plan.get("num_words", 0)

    async def make_engine(settings: Settings, metrics: Metrics, view: ProgressView) -> FakeEngine:
        view.update("making a fake engine", None)
        await asyncio.sleep(plan.get("make_seconds", 0))
        engine = FakeEngine(**plan.get("engine", {}), start_failure=failure, status=FakeStatus.STARTING, info=None)
        if num_words:
            engine.pieces = lambda prompt: ["word "] * num_words
        return engine

    cli.make_engine = make_engine  # type: ignore[assignment]
    cli.app = lambda: cli.run_server(Settings(port=0, **plan.get("settings", {})))  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":
    run()
