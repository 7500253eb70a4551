"""A client of Kubernetes' API: who we are there, and one call.

Credentials, TLS and proxies are kubernetes-asyncio's; answers are read here, because they must not
be longer than we bear, and because only a few fields of an object are needed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import aiohttp
import yaml
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config
from kubernetes_asyncio.config.incluster_config import SERVICE_HOST_ENV_NAME

from picker.config import Kubernetes
from picker.kubernetes.errors import ApiError, NoAnswer, refused
from picker.kubernetes.resource import Resource

TIMEOUT = 30.0  # seconds for a whole answer
CONNECT_TIMEOUT = 10.0
MAX_ANSWER = 64 << 20  # bytes
RENEW_SECONDS = 10.0  # between two readings of credentials that were refused
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "default"
_METHODS = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "update": "PUT"}


class Api:
    """Kubernetes' API, as one user, with one namespace of our own.

    `await Api.connect(settings)` makes one; it opens no connection yet.
    """

    def __init__(self, client: ApiClient, namespace: str, settings: Kubernetes) -> None:
        self._client = client
        self._settings = settings
        self.namespace = namespace  # as configured, else the kubeconfig's or the pod's own
        self.server = str(client.configuration.host)
        self._renewed = -inf
        self._renewing = asyncio.Lock()

    @classmethod
    async def connect(cls, settings: Kubernetes) -> Api:
        """The client for a configuration: by its kubeconfig, in a pod by its service account, else
        by $KUBECONFIG or ~/.kube/config.

        Raises:
            ValueError: there are no credentials, or they cannot be used.
        """
        configuration, namespace = await _identity(settings)
        try:
            client = ApiClient(configuration)
        except OSError as problem:  # certificates; ssl.SSLError is one
            raise ValueError(f"the certificates for Kubernetes cannot be used: {problem}") from None
        client.user_agent = "warmpath"
        return cls(client, settings.namespace or namespace, settings)

    async def close(self) -> None:
        await self._client.close()

    async def call(
        self,
        verb: str,
        resource: Resource,
        name: str = "",
        *,
        query: Mapping[str, str | int] | None = None,
        body: object = None,
    ) -> bytes:
        """An answer's body, JSON.

        Args:
            verb: as RBAC names it: get, list, create, update.
            body: of the request, as msgspec's or json's builtin types.

        Raises:
            ApiError: it failed; KindAbsent if there is no such kind.
        """
        limits = aiohttp.ClientTimeout(total=TIMEOUT, connect=CONNECT_TIMEOUT)
        with _explained(verb, resource, self.server):
            response = await self._ask(verb, resource, name, query, body, limits)
            async with response:
                return await _all_of(response)

    @asynccontextmanager
    async def watch(
        self, resource: Resource, query: Mapping[str, str | int], *, silence: float
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """A watch's bytes, as they come.

        Args:
            silence: seconds without a byte after which the connection is dead.

        Raises:
            ApiError: it failed, also later.
        """
        limits = aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT, sock_read=silence)
        with _explained("watch", resource, self.server):
            response = await self._ask("watch", resource, "", query, None, limits)
            try:
                yield response.content
            finally:
                response.close()  # what comes after is of no use to another call

    async def _ask(
        self,
        verb: str,
        resource: Resource,
        name: str,
        query: Mapping[str, str | int] | None,
        body: object,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        async def send() -> aiohttp.ClientResponse:
            response: aiohttp.ClientResponse = await self._client.call_api(
                resource.path(name),
                _METHODS[verb],
                query_params=[] if query is None else list(query.items()),
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=limits,
            )
            return response

        response = await send()
        if response.status == 401 and await self._renew():
            response.close()
            response = await send()
        if not 200 <= response.status < 300:
            async with response:
                raise refused(verb, resource, response.status, await _all_of(response))
        return response

    async def _renew(self) -> bool:
        """Read the credentials again, for tokens expire; whether there is another one."""
        async with self._renewing:
            if time.monotonic() < self._renewed + RENEW_SECONDS:
                return False
            self._renewed = time.monotonic()
            try:
                fresh, _ = await _identity(self._settings)
            except ValueError:
                return False
            mine = self._client.configuration
            before = mine.api_key.get("BearerToken")
            mine.api_key = fresh.api_key
            mine.refresh_api_key_hook = fresh.refresh_api_key_hook
            return bool(fresh.api_key.get("BearerToken") != before)


class _explained:
    """Any failure of a call as an ApiError."""

    def __init__(self, verb: str, resource: Resource, server: str) -> None:
        self._what = f"cannot {verb} {resource}"
        self._server = server

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        if isinstance(problem, TimeoutError):
            raise NoAnswer(f"{self._what}: {self._server} does not answer in time") from None
        if isinstance(problem, aiohttp.ClientError | OSError | ConfigException):
            why = str(problem) or type(problem).__name__
            raise NoAnswer(f"{self._what} at {self._server}: {why}") from problem


async def _all_of(response: aiohttp.ClientResponse) -> bytes:
    """A body, not longer than MAX_ANSWER."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER:
            response.close()
            raise ApiError(f"an answer of more than {MAX_ANSWER} bytes", response.status)
    return bytes(body)


async def _identity(settings: Kubernetes) -> tuple[Configuration, str]:
    """Who we are, where the API server is, and the namespace that is ours there.

    Raises:
        ValueError: that is not told, or cannot be used.
    """
    configuration = Configuration()
    if not settings.kubeconfig and os.environ.get(SERVICE_HOST_ENV_NAME):
        try:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
            return configuration, _pods_namespace()
        except (ConfigException, OSError) as problem:
            raise ValueError(
                f"pool.kubernetes: the service account cannot be used: {problem}"
            ) from None
    path = _kubeconfig(settings)
    try:
        loader = await load_kube_config(
            config_file=path, client_configuration=configuration, persist_config=False
        )
        context = loader.current_context or {}
        return configuration, str(context["context"].get("namespace") or DEFAULT_NAMESPACE)
    except (ConfigException, OSError, yaml.YAMLError, ValueError) as problem:
        raise ValueError(f"pool.kubernetes: kubeconfig {path} cannot be used: {problem}") from None
    except (AttributeError, AssertionError, KeyError, TypeError) as problem:
        raise ValueError(f"pool.kubernetes: {path} has not the shape of a kubeconfig") from problem


def _kubeconfig(settings: Kubernetes) -> str:
    """A file, or several with colons between them. Raises ValueError where there is none."""
    if settings.kubeconfig:
        if not Path(settings.kubeconfig).is_file():
            raise ValueError(
                f"pool.kubernetes: kubeconfig {settings.kubeconfig}: there is no such file"
            )
        return settings.kubeconfig
    path = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if not any(Path(each).expanduser().is_file() for each in path.split(os.pathsep) if each):
        raise ValueError(
            f"pool.kubernetes: this is no pod, and there is no {path}; name a kubeconfig by "
            "pool.kubernetes.kubeconfig or $KUBECONFIG"
        )
    return path


def _pods_namespace() -> str:
    """Of the pod that we are in."""
    try:
        return NAMESPACE_FILE.read_text().strip() or DEFAULT_NAMESPACE
    except OSError:
        return DEFAULT_NAMESPACE
