"""A Kubernetes API server for tests: it speaks the real protocol over HTTP, and holds no cluster.

What it keeps to: optimistic locking by resourceVersion, lists in pages of one snapshot, watches as
chunked lines with bookmarks, a history of bounded length and 410 for what is older, selectors on
the server's side, RBAC's answers, defaults and schemas of CRDs. What a cluster does of itself
(pods that start, finalizers, garbage collection, CEL rules) it does not.

Tests change its objects by `apply` and `delete`, and break it by `forbid`, `compact`, `cut`,
`hold`, `fail` and the like.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from aiohttp import web

from tests.kubernetes_objects import Invalid, Kind, Object, builtin_kinds, custom_kinds

USER = "system:serviceaccount:default:picker"


@dataclass
class Change:
    """One entry of the history."""

    version: int
    kind: str
    before: Object | None
    after: Object | None


@dataclass(eq=False)
class Watcher:
    """An open watch, and the lines that it has still to send."""

    kind: str
    namespace: str
    query: dict[str, str]
    lines: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    cut: bool = False
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, line: bytes) -> None:
        if not self.cut:
            self.lines.put_nowait(line)

    def end(self, last: bytes) -> None:
        """Break off after these bytes."""
        self.put(last)
        self.cut = True


class Refused(Exception):
    """Answered as an object of kind Status."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body = status(code, reason, message)


def status(code: int, reason: str, message: str) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


class KubernetesApi:
    """The server. `running_kubernetes` starts one."""

    def __init__(self, absent: Iterable[str] = ()) -> None:
        """`absent`: CRDs that are not installed, as `plural.group`."""
        self.url = ""
        self.folder = ""  # for files, as long as it runs
        self.token = "secret"
        self.kinds: dict[str, Kind] = {**builtin_kinds(), **custom_kinds()}
        for name in absent:
            del self.kinds[name]
        self.version = 100
        self.tokens: dict[str, str] = {}  # user by token, for token reviews
        self.allowed: set[tuple[str, str, str]] = set()  # user, verb, path, for access reviews
        self.gone_as: Literal["event", "status"] = "event"  # how a watch is told 410
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # verb, plural.group, query
        self._objects: dict[str, dict[tuple[str, str], Object]] = {}
        self._history: list[Change] = []
        self._oldest = self.version  # that a watch may begin from
        self._snapshots: dict[str, tuple[int, list[Object]]] = {}
        self._watchers: set[Watcher] = set()
        self._forbidden: set[tuple[str, str]] = set()
        self._failures: dict[str, list[int]] = {}
        self.piece = 0  # bytes that watches send at once; 0: a whole line
        self.interrupt: Callable[[str, str], None] | None = None  # called with verb and kind
        self._uid = 0
        self._came = asyncio.Event()

    # The cluster's objects

    def apply(self, thing: Object) -> Object:
        """Create or replace an object. Raises Invalid."""
        name = self._kind_of(thing)
        kind, about = self.kinds[name], thing["metadata"]
        key = (about.get("namespace", ""), about["name"])
        before = self._of(name).get(key)
        whole = kind.admitted(thing)
        return self._store(name, key, before, whole)

    def delete(self, thing: Object) -> None:
        """The object of this kind, namespace and name is no more."""
        name, about = self._kind_of(thing), thing["metadata"]
        before = self._of(name).pop((about.get("namespace", ""), about["name"]))
        self._record(name, before, None)

    def remove(self, name: str) -> None:
        """A CRD is no more, nor are its objects; its watches end."""
        del self.kinds[name]
        self._objects.pop(name, None)
        self.cut()

    def install(self, name: str) -> None:
        """A CRD, `plural.group`, is there from now on."""
        self.kinds[name] = custom_kinds()[name]

    def get(self, name: str, namespace: str, of: str) -> Object:
        """An object as it is stored, by its kind `of`."""
        return self._of(of)[namespace, name]

    # What goes wrong

    def forbid(self, verb: str, name: str) -> None:
        """RBAC grants this no more; watches that are open stay."""
        self._forbidden.add((verb, name))

    def permit(self, verb: str, name: str) -> None:
        self._forbidden.discard((verb, name))

    def compact(self) -> None:
        """Forget the history: whoever comes with an older resourceVersion is told 410."""
        self.version += 1
        self._oldest = self.version
        self._history.clear()
        self._snapshots.clear()

    def cut(self, after: bytes = b"") -> None:
        """Break all watches off, after some last bytes: half a line, say."""
        for watcher in self._watchers:
            watcher.end(after)

    def send(self, line: bytes, kind: str) -> None:
        """Bytes of any kind to the watches of one kind."""
        for watcher in self._watchers:
            if watcher.kind == kind:
                watcher.put(line)

    def hold(self) -> None:
        """Nothing comes any more of the watches that are open: they are half open."""
        for watcher in self._watchers:
            watcher.flowing.clear()

    def release(self) -> None:
        """What was held comes now."""
        for watcher in self._watchers:
            watcher.flowing.set()

    def fail(self, name: str, *codes: int) -> None:
        """Answer the next requests for a kind by these codes of HTTP."""
        self._failures.setdefault(name, []).extend(codes)

    def recover(self, name: str) -> None:
        """Answer requests for a kind again."""
        self._failures.pop(name, None)

    def bookmark(self) -> None:
        """Tell all watches the newest resourceVersion, without an object."""
        for watcher in self._watchers:
            if watcher.query.get("allowWatchBookmarks") == "true":
                kind = self.kinds[watcher.kind]
                about = {"resourceVersion": str(self.version), "creationTimestamp": None}
                thing = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": about}
                watcher.put(_line("BOOKMARK", thing))

    async def asked(self, verb: str, name: str, times: int = 1) -> None:
        """Wait until a kind has been asked for so often."""
        while sum(each[:2] == (verb, name) for each in self.requests) < times:
            self._came.clear()
            await self._came.wait()

    # Inside

    def _kind_of(self, thing: Object) -> str:
        for name, kind in self.kinds.items():
            if (kind.api_version, kind.name) == (thing["apiVersion"], thing["kind"]):
                return name
        raise Invalid(f"no kind {thing['kind']} of {thing['apiVersion']}")

    def _of(self, name: str) -> dict[tuple[str, str], Object]:
        return self._objects.setdefault(name, {})

    def _store(
        self, name: str, key: tuple[str, str], before: Object | None, whole: Object
    ) -> Object:
        about = whole["metadata"]
        self._uid += 1
        old = {} if before is None else before["metadata"]
        about.setdefault("uid", old.get("uid", f"uid-{self._uid}"))
        about.setdefault(
            "creationTimestamp",
            old.get(
                "creationTimestamp", f"2026-01-01T{self._uid // 60 % 24:02}:{self._uid % 60:02}:00Z"
            ),
        )
        self._of(name)[key] = whole
        self._record(name, before, whole)
        return whole

    def _record(self, name: str, before: Object | None, after: Object | None) -> None:
        self.version += 1
        if after is not None:
            after["metadata"]["resourceVersion"] = str(self.version)
        change = Change(self.version, name, before, after)
        self._history.append(change)
        for watcher in self._watchers:
            if watcher.kind == name:
                self._tell(watcher, change)

    def _tell(self, watcher: Watcher, change: Change) -> None:
        was = change.before is not None and _selected(change.before, watcher)
        has = change.after is not None and _selected(change.after, watcher)
        if has:
            assert change.after is not None
            watcher.put(_line("MODIFIED" if was else "ADDED", change.after))
        elif was:
            last = json.loads(json.dumps(change.after or change.before))
            last["metadata"]["resourceVersion"] = str(change.version)
            watcher.put(_line("DELETED", last))

    # HTTP

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            if request.headers.get("authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            return await self._answer(request)
        except Refused as problem:
            return web.json_response(problem.body, status=problem.code)
        except Invalid as problem:
            return web.json_response(status(422, "Invalid", str(problem)), status=422)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        group, rest = ("", parts[1:]) if parts[0] == "api" else (parts[1], parts[2:])
        version, rest = rest[0], rest[1:]
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, item = rest[0], "/".join(rest[1:])
        name = f"{plural}.{group}" if group else plural
        query = dict(request.query)
        verb = {"POST": "create", "PUT": "update", "DELETE": "delete"}.get(request.method, "get")
        if verb == "get" and not item:
            verb = "watch" if query.get("watch") in ("true", "1") else "list"
        self.requests.append((verb, name, query))
        self._came.set()
        if self.interrupt is not None:
            self.interrupt(verb, name)
        if failures := self._failures.get(name):
            code = failures.pop(0)
            raise Refused(code, "InternalError", "the server is not well")
        if (verb, name) in self._forbidden:
            raise Refused(403, "Forbidden", _forbidden(verb, plural, group, namespace))
        if (name, verb) == ("tokenreviews.authentication.k8s.io", "create"):
            return web.json_response(self._token_review(await request.json()), status=201)
        if (name, verb) == ("subjectaccessreviews.authorization.k8s.io", "create"):
            return web.json_response(self._access_review(await request.json()), status=201)
        kind = self.kinds.get(name)
        if kind is None or kind.version != version:
            return web.Response(status=404, text="404 page not found\n")
        if verb == "list":
            return web.json_response(self._list(name, kind, namespace, query))
        if verb == "watch":
            return await self._watch(request, name, namespace, query)
        if verb in ("create", "update"):
            return self._write(verb, name, namespace, item, await request.json())
        thing = self._of(name).get((namespace, item))
        if thing is None:
            raise Refused(404, "NotFound", f'{name} "{item}" not found')
        if verb == "delete":
            self.delete(thing)
        return web.json_response(thing)

    def _write(
        self, verb: str, name: str, namespace: str, item: str, thing: Object
    ) -> web.Response:
        """One writer wins: the other has read an object that is no more as it was."""
        about = thing["metadata"]
        about.setdefault("namespace", namespace)
        before = self._of(name).get((namespace, about["name"]))
        if verb == "create" and before is not None:
            raise Refused(409, "AlreadyExists", f'{name} "{about["name"]}" already exists')
        if verb == "update":
            if before is None:
                raise Refused(404, "NotFound", f'{name} "{item}" not found')
            told = about.get("resourceVersion")
            if told is not None and told != before["metadata"]["resourceVersion"]:
                why = f'Operation cannot be fulfilled on {name} "{item}": it has been modified'
                raise Refused(409, "Conflict", why)
        return web.json_response(self.apply(thing), status=201 if verb == "create" else 200)

    def _token_review(self, review: Object) -> Object:
        user = self.tokens.get(review["spec"].get("token", ""))
        answer: Object = {"authenticated": False, "error": "invalid bearer token"}
        if user is not None:
            answer = {"authenticated": True, "user": {"username": user, "groups": []}}
        return review | {"status": answer}

    def _access_review(self, review: Object) -> Object:
        spec = review["spec"]
        asked = spec.get("nonResourceAttributes", {})
        is_allowed = (spec.get("user"), asked.get("verb"), asked.get("path")) in self.allowed
        return review | {"status": {"allowed": is_allowed}}

    def _list(self, name: str, kind: Kind, namespace: str, query: dict[str, str]) -> Object:
        limit, token = int(query.get("limit", 0)), query.get("continue", "")
        if token:
            taken, start = base64.b64decode(token).decode().split(":")
            if taken not in self._snapshots:
                raise Refused(410, "Expired", "The provided continue parameter is too old")
            version, found = self._snapshots[taken]
            found = found[int(start) :]
        else:
            taken, start, version = f"{len(self.requests)}", "0", self.version
            probe = Watcher(name, namespace, query)
            found = [
                thing for _, thing in sorted(self._of(name).items()) if _selected(thing, probe)
            ]
            self._snapshots[taken] = version, found
        about: Object = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            rest = f"{taken}:{int(start) + limit}".encode()
            about |= {
                "continue": base64.b64encode(rest).decode(),
                "remainingItemCount": len(found) - limit,
            }
            found = found[:limit]
        return {
            "kind": f"{kind.name}List",
            "apiVersion": kind.api_version,
            "metadata": about,
            # In a list, the objects do not tell their kind.
            "items": [
                {key: thing[key] for key in thing if key not in ("kind", "apiVersion")}
                for thing in found
            ],
        }

    async def _watch(
        self, request: web.Request, name: str, namespace: str, query: dict[str, str]
    ) -> web.StreamResponse:
        watcher = Watcher(name, namespace, query)
        watcher.flowing.set()
        since = int(query.get("resourceVersion") or self.version)
        if since < self._oldest:
            gone = Refused(410, "Expired", f"too old resource version: {since} ({self._oldest})")
            if self.gone_as == "status":
                raise gone
            watcher.end(_line("ERROR", gone.body))
        for change in self._history:
            if change.kind == name and change.version > since:
                self._tell(watcher, change)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        self._watchers.add(watcher)
        try:
            await response.prepare(request)
            async with asyncio.timeout(float(query.get("timeoutSeconds", 600))):
                while not (watcher.cut and watcher.lines.empty()):
                    line = await watcher.lines.get()
                    await watcher.flowing.wait()
                    size = self.piece or max(1, len(line))
                    for start in range(0, len(line), size):
                        await response.write(line[start : start + size])
                        await asyncio.sleep(0)
            if request.transport is not None:
                request.transport.close()  # no last chunk: the connection just ends
        except TimeoutError:
            pass
        finally:
            self._watchers.discard(watcher)
        return response


def _line(what: str, thing: Object) -> bytes:
    return json.dumps({"type": what, "object": thing}).encode() + b"\n"


def _forbidden(verb: str, plural: str, group: str, namespace: str) -> str:
    return (
        f'{plural} is forbidden: User "{USER}" cannot {verb} resource "{plural}" in API group '
        f'"{group}" in the namespace "{namespace}"'
    )


def _selected(thing: Object, watcher: Watcher) -> bool:
    about = thing["metadata"]
    if watcher.namespace and about.get("namespace") != watcher.namespace:
        return False
    labels, fields = watcher.query.get("labelSelector", ""), watcher.query.get("fieldSelector", "")
    for term in filter(None, labels.split(",")):
        key, _, value = term.partition("=")
        if about.get("labels", {}).get(key) != value:
            return False
    for term in filter(None, fields.split(",")):
        key, _, value = term.partition("=")
        assert key == "metadata.name", key
        if about["name"] != value:
            return False
    return True


@asynccontextmanager
async def running_kubernetes(
    absent: Iterable[str] = (), tls: ssl.SSLContext | None = None
) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(absent)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    api.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    with tempfile.TemporaryDirectory() as api.folder:
        try:
            yield api
        finally:
            api.release()
            api.cut()
            await runner.cleanup()


def kubeconfig(api: KubernetesApi, folder: Path, namespace: str = "default") -> Path:
    """A file with which `api` is found."""
    content: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": api.url}}],
        "users": [{"name": "test", "user": {"token": api.token}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
        ],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(content))
    return path
