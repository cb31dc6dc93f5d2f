"""A hub on this machine: the few endpoints that a download needs, with redirects, cut connections and gates."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves `repositories`; weights go over a redirect. After `cut_after` bytes the next of them breaks off."""

    def __init__(self, repositories: dict[str, Path], gated: frozenset[str] = frozenset()) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories = repositories
        self.gated = gated
        self.cut_after: int | None = None
        self.ranges: list[str | None] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts == ["api", "models"]:
            return self._search(parse_qs(urlsplit(self.path).query).get("search", [""])[0])
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[1:3] if parts[0] == "cdn" else parts[:2])
        folder = self.server.repositories.get(name)
        if name in self.server.gated:
            return self._refuse(403, "GatedRepo")
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        if parts[0] == "api":
            if parts[-1] not in (COMMIT, "main"):
                return self._refuse(404, "RevisionNotFound")
            return self._tree(folder) if parts[4] == "tree" else self._repository(name, folder)
        file = folder / parts[-1]
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        return self._file(file, name, redirected=parts[0] == "cdn")

    def _search(self, text: str) -> None:
        self._json([{"id": name, "_id": name} for name in self.server.repositories if text[:4].lower() in name.lower()])

    def _repository(self, name: str, folder: Path) -> None:
        siblings = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
        self._json({"id": name, "_id": name, "sha": COMMIT, "siblings": siblings})

    def _tree(self, folder: Path) -> None:
        self._json(
            [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _digest(path)[:40]}
                for path in sorted(folder.iterdir())
            ]
        )

    def _file(self, file: Path, name: str, *, redirected: bool) -> None:
        size, digest = file.stat().st_size, _digest(file)
        if file.suffix == ".safetensors" and not redirected:
            self.send_response(302)
            self.send_header("Location", f"{self.server.url}/cdn/{name}/{file.name}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Etag", f'"{digest}"')
            self.send_header("X-Linked-Size", str(size))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(size - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if redirected:
            self.server.ranges.append(wanted)
            if self.server.cut_after is not None:
                self.wfile.write(content[start : start + self.server.cut_after])
                self.server.cut_after = None
                self.close_connection = True
                return
        self.wfile.write(content[start:])

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def running(hub: FakeHub) -> Iterator[FakeHub]:
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
