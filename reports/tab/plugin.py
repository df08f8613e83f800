"""The routes of the dsprof tab. All but TensorBoard is imported with the first report that is asked for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from dsprof import regular_files
from dsprof.run import RunFolder

from .cannot_answer import CannotAnswer
from .run_listing import RunListing

if TYPE_CHECKING:
    from .run_views import RunViews

HERE: Final = Path(__file__).parent
HTML: Final = HERE.parent / "html"
SCRIPTS: Final = "application/javascript"
MOST_RANKS: Final = 64


class DsprofTab(base_plugin.TBPlugin):  # type: ignore[misc]
    """The tab."""

    plugin_name = "dsprof"

    def __init__(self, context: Any) -> None:
        self._listing = RunListing(context.logdir or "")
        self._views: RunViews | None = None
        self._lock = threading.Lock()

    def is_active(self) -> bool:
        return bool(self._listing.runs())

    def frontend_metadata(self) -> Any:
        # The tab asks by itself for what has come, when its reader wants it: a report is not to jump while it is read.
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="dsprof", disable_reload=True)

    def get_plugin_apps(self) -> dict[str, Any]:
        return {
            "/index.js": _file(SCRIPTS, lambda: _read(HERE / "imports.js", HTML / "figures.js", HERE / "tab.js")),
            "/plotly.js": _file(SCRIPTS, lambda: _read(HTML / "plotly-cartesian.min.js")),
            "/style.css": _file(
                "text/css", lambda: _read(HTML / "theme.css", HTML / "blocks.css", HTML / "page.css", HERE / "tab.css")
            ),
            "/runs": self._route(lambda asked: {"runs": [_told(*item) for item in self._listing.runs().items()]}),
            "/report": self._route(lambda asked: self._shown().report(self._run(asked, "run"))),
            "/timeline": self._route(self._timeline),
            "/comparison": self._route(
                lambda asked: self._shown().comparison(self._run(asked, "before"), self._run(asked, "after"))
            ),
        }

    def _timeline(self, asked: Mapping[str, str]) -> dict[str, Any]:
        ranks = [rank for rank in asked.get("ranks", "").split(",") if rank]
        step = asked.get("step", "")
        if not all(word.isdecimal() and len(word) < 10 for word in (step, *ranks)) or len(ranks) > MOST_RANKS:
            raise CannotAnswer("step and ranks are numbers", 400)
        return self._shown().timeline(self._run(asked, "run"), int(step), tuple(map(int, ranks)))

    def _run(self, asked: Mapping[str, str], name: str) -> RunFolder:
        """The run that is named by its id."""
        folder = self._listing.runs().get(asked.get(name, ""))
        if folder is None:
            raise CannotAnswer("no such run below the log folder", 404)
        return folder

    def _shown(self) -> RunViews:
        with self._lock:
            if self._views is None:
                from .run_views import RunViews

                self._views = RunViews()
            return self._views

    def _route(self, answer: Callable[[Mapping[str, str]], dict[str, Any]]) -> Any:
        """A route that answers in JSON, also where it cannot: then `error` says why."""

        @wrappers.Request.application
        def respond(request: Any) -> Any:
            try:
                content, status = answer(request.args), 200
            except CannotAnswer as refused:
                content, status = {"error": str(refused)}, refused.status
            except Exception as error:
                content, status = {"error": str(error)}, 500
            return http_util.Respond(request, json.dumps(content), "application/json", code=status)

        return respond


def _file(kind: str, read: Callable[[], str]) -> Any:
    @wrappers.Request.application
    def respond(request: Any) -> Any:
        return http_util.Respond(request, read(), kind)

    return respond


def _read(*paths: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def _told(name: str, folder: RunFolder) -> dict[str, str]:
    """A run, and its verdict where it was drawn already."""
    found = {"id": name, "name": folder.path.resolve().name, "status": "", "headline": ""}
    try:
        verdict = regular_files.read_json(folder.findings_json)["verdict"]
        return found | {"status": str(verdict["status"]), "headline": str(verdict["headline"])}
    except (OSError, ValueError, KeyError, TypeError):
        return found
