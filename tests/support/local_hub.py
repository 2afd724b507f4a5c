"""A hub on localhost: repositories with commits, branches, private ones, large files, and faults on request.

It speaks as much of the Hub's protocol as uploading, downloading and validating cards take. Everything is in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

USER, TOKEN = "user", "hf_token_of_the_user"
_LARGE = (".safetensors", ".bin", ".model")
_LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "other", "unknown"}
_TASKS = {"text-generation", "fill-mask", "text-classification", "token-classification", "question-answering"}
_LIBRARIES = {"transformers"}


@dataclass
class Repository:
    """Commits from the first to the last, each all files by path, and what names point to them."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make ``files`` the content of a branch."""
        parts = [f"{len(self.commits)}"] + [f"{path}:{hashlib.sha1(data).hexdigest()}" for path, data in files.items()]
        name = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.branches[branch] = name
        return name

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch's or a commit's name means."""
        name = self.branches.get(revision, revision)
        return name if name in self.commits else None

    @property
    def files(self) -> dict[str, bytes]:
        """What the main branch holds."""
        return self.commits[self.branches["main"]]


class LocalHub(AbstractContextManager["LocalHub"]):
    """Serve repositories on a free port until the ``with`` block ends.

    Attributes:
        repositories: by name, ``"user/name"``.
        faults: by what goes wrong, how often it still will: ``"break upload"`` closes the connection in the middle of
            a large file, ``"refuse upload"`` answers 403 there, ``"break commit"`` closes it before a commit is made,
            ``"break download"`` in the middle of a file.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.faults: dict[str, int] = {}
        self.requests: list[str] = []
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def environment(self, home: Any, *, token: str | None = TOKEN, offline: bool = False) -> dict[str, str]:
        """Variables for a process that is to use this hub; they count before its first import of huggingface_hub."""
        variables = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "NO_PROXY": "127.0.0.1",
        }
        return variables | ({"HF_TOKEN": token} if token else {}) | ({"HF_HUB_OFFLINE": "1"} if offline else {})

    def create(self, name: str, private: bool = False) -> Repository:
        """Make an empty repository."""
        repository = self.repositories[name] = Repository(private)
        repository.commit({})
        return repository

    def fails(self, fault: str) -> bool:
        """Whether this fault happens now; each has so many times."""
        with self.lock:
            left = self.faults.get(fault, 0)
            self.faults[fault] = max(left - 1, 0)
        return left > 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, *args: Any) -> None:
        """Nothing: requests are kept in the hub."""

    def do_GET(self) -> None:
        path = self._path()
        if path == "/api/whoami-v2":
            account = {"name": USER, "type": "user", "fullname": USER, "orgs": [], "auth": {"type": "access_token"}}
            return self._json(account) if self._is_owner() else self._error(401, "Invalid token")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            return self._tree(found[1], found[2], found[3] or "")
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(found[1], found[2], found[3])
        return self._error(404, f"no such route: {path}")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = self._path(), self._body()
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if not self._is_owner():
            return self._error(401, "Invalid username or password.")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            files = [
                {"path": name, "uploadMode": "lfs" if name.endswith(_LARGE) else "regular", "shouldIgnore": False}
                for name in (file["path"] for file in json.loads(body)["files"])
            ]
            return self._json({"files": files})
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._lfs(json.loads(body)["objects"])
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            return self._commit(found[1], found[2], body)
        return self._error(404, f"no such route: {path}")

    def do_PUT(self) -> None:
        found = re.fullmatch(r"/large/([0-9a-f]{64})", self._path())
        if self.hub.fails("break upload"):
            self.rfile.read(max(int(self.headers.get("Content-Length", 2)) // 2, 1))
            self.close_connection = True
            self.connection.close()
            return None
        body = self._body()
        if self.hub.fails("refuse upload"):
            return self._error(403, "the link has expired")
        if found is None or hashlib.sha256(body).hexdigest() != found[1]:
            return self._error(400, "not the file that was announced")
        self.hub.blobs[found[1]] = body
        return self._json({})

    def _path(self) -> str:
        self.hub.requests.append(f"{self.command} {self.path}")
        return unquote(urlsplit(self.path).path)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if status == 200 and "X-Repo-Commit" in headers and self.hub.fails("break download"):
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(body)

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        named = {"X-Error-Code": code} if code else {}
        body = json.dumps({"error": message}).encode()
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        self._send(status, body, {"Content-Type": "application/json", "X-Error-Message": message} | named | more)

    def _repository(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit, or None after an error was sent."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._is_owner()):
            # As on the Hub, who may not see a repository is told that there is none.
            status = 404 if self._is_owner() else 401
            self._error(
                status, "Repository not found" if status == 404 else "Invalid username or password.", "RepoNotFound"
            )
            return None
        commit = repository.resolve(revision)
        if commit is None:
            self._error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return None
        return repository, commit

    def _info(self, name: str, revision: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        repository, commit = found
        self._json(
            {
                "id": name,
                "modelId": name,
                "sha": commit,
                "private": repository.private,
                "tags": [],
                "siblings": [{"rfilename": path} for path in repository.commits[commit]],
                "downloads": 0,
                "likes": 0,
                "createdAt": "2026-01-01T00:00:00.000Z",
                "lastModified": "2026-01-01T00:00:00.000Z",
            }
        )

    def _tree(self, name: str, revision: str, below: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        repository, commit = found
        entries = []
        for path, data in repository.commits[commit].items():
            if path.startswith(below):
                entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _git_name(data)}
                if path.endswith(_LARGE):
                    entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                entries.append(entry)
        self._json(entries)

    def _file(self, name: str, revision: str, path: str) -> None:
        if (found := self._repository(name, revision)) is None:
            return
        repository, commit = found
        data = repository.commits[commit].get(path)
        if data is None:
            return self._error(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit)
        headers = {"Content-Type": "application/octet-stream", "X-Repo-Commit": commit, "ETag": f'"{_git_name(data)}"'}
        if path.endswith(_LARGE):
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start:
            rest = data[int(start[1]) :]
            headers["Content-Range"] = f"bytes {start[1]}-{len(data) - 1}/{len(data)}"
            return self._send(206, rest, headers)
        return self._send(200, data, headers | {"Accept-Ranges": "bytes"})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        with self.hub.lock:
            if name in self.hub.repositories:
                return self._json(answer | {"error": "You already created this model repo"}, 409)
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.create(name, private)
        return self._json(answer)

    def _lfs(self, objects: list[dict[str, Any]]) -> None:
        answers = []
        for wanted in objects:
            answer = {"oid": wanted["oid"], "size": wanted["size"], "authenticated": True}
            # What has arrived before need not be sent again.
            if wanted["oid"] not in self.hub.blobs:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/large/{wanted['oid']}"}}
            answers.append(answer)
        self._json({"transfer": "basic", "objects": answers})

    def _commit(self, name: str, branch: str, body: bytes) -> None:
        if (found := self._repository(name, branch)) is None:
            return None
        if self.hub.fails("break commit"):
            self.close_connection = True
            self.connection.close()
            return None
        repository, parent = found
        files = dict(repository.commits[parent])
        for line in body.decode().splitlines():
            operation = json.loads(line)
            kind, value = operation["key"], operation["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        with self.hub.lock:
            commit = repository.commit(files, branch)
        return self._json(
            {
                "success": True,
                "commitOid": commit,
                "commitUrl": f"{self.hub.url}/{name}/commit/{commit}",
                "hookOutput": "",
            }
        )

    def _validate(self, content: str) -> None:
        problems = card_problems(content)
        if problems:
            return self._send(400, "\n".join(problems).encode(), {"Content-Type": "text/plain"})
        return self._json({"errors": [], "warnings": []})


def card_problems(content: str) -> list[str]:
    """What the Hub would complain about in the metadata of a card, as far as this project's cards go."""
    found = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
    if found is None:
        return ["no metadata between two lines of ---"]
    data = yaml.safe_load(found[1])
    if not isinstance(data, dict):
        return ["the metadata must be names and values"]
    problems = []
    for name, known in (("license", _LICENSES), ("pipeline_tag", _TASKS), ("library_name", _LIBRARIES)):
        if name in data and data[name] not in known:
            problems.append(f"{name} {data[name]!r} is not known")
    for name in ("tags", "datasets", "language", "base_model"):
        words = data.get(name, [])
        words = [words] if isinstance(words, str) else words
        if not (isinstance(words, list) and all(isinstance(word, str) and word for word in words)):
            problems.append(f"{name} must be a list of words")
    if not all(
        re.fullmatch(r"[a-z]{2,3}|code|multilingual", word)
        for word in [data.get("language") or []]
        if isinstance(word, str)
    ):
        problems.append("language must be a code of ISO 639")
    for entry in data.get("model-index", []):
        if not entry.get("name"):
            problems.append("model-index needs a name")
        for result in entry.get("results", []):
            complete = all(result.get(part, {}).get("type") for part in ("task", "dataset")) and result["dataset"].get(
                "name"
            )
            metrics = result.get("metrics", [])
            if not complete or not metrics:
                problems.append("a result needs a task, a dataset with type and name, and metrics")
            for metric in metrics:
                if not metric.get("type") or not isinstance(metric.get("value"), int | float):
                    problems.append("a metric needs a type and a number as its value")
    return problems


def _git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


__all__ = ["TOKEN", "USER", "LocalHub", "Repository", "card_problems"]
