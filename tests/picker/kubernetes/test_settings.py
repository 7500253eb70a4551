"""What `pool.kubernetes` may say, and what is said of the rest."""

from __future__ import annotations

import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from kubernetes_asyncio.config import incluster_config

from picker.config import ConfigError, Kubernetes, parse
from picker.kubernetes import client
from picker.kubernetes.client import Api
from picker.kubernetes.resource import pods
from picker.service import check_config
from tests.kubernetes_api import kubeconfig, running_kubernetes
from tests.kubernetes_objects import pod

POOL = "pool:\n  kubernetes:\n    "


@pytest.mark.parametrize(
    "text",
    [
        "pool: demo",
        "pool: demo\n    namespace: prod\n    group: inference.networking.x-k8s.io",
        "selector: {app: llm, llm-d.ai/role: ''}\n    targetPorts: [8000, 8001]",
    ],
)
def test_a_pool_or_a_selector_says_which_pods(text):
    assert parse(POOL + text, check=check_config).pool.kubernetes != Kubernetes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pool: demo\n  endpoints: [{address: '10.0.0.1:80'}]",
            "w.yaml:2: pool.kubernetes: 'kubernetes' and 'endpoints' of the pool exclude each",
        ),
        ("namespace: prod", "needs the name of an InferencePool as pool.kubernetes.pool, or"),
        ("targetPorts: [8000]", "needs the name of an InferencePool"),
        ("pool: Demo", "w.yaml:3: pool.kubernetes.pool: 'Demo' cannot be"),
        ("pool: demo\n    namespace: a/b", "pool.kubernetes.namespace: 'a/b' cannot be a name"),
        ("pool: demo\n    selector: {a: b}", "w.yaml:4: pool.kubernetes.selector: 'selector' and"),
        ("pool: demo\n    targetPorts: [80]", "leave out them or pool.kubernetes.pool"),
        ("selector: {a: b}", "'targetPorts': [] must be 1 to 8 different ports"),
        ("selector: {a: b}\n    targetPorts: [0]", "w.yaml:4: pool.kubernetes.targetPorts: "),
        ("selector: {a: b}\n    targetPorts: [80, 80]", "[80, 80] must be 1 to 8 different ports"),
        ("selector: {a: 'b,c=d'}\n    targetPorts: [80]", "'a': 'b,c=d' cannot be a label"),
        ("selector: {'a=b': c}\n    targetPorts: [80]", "'a=b': 'c' cannot be a label"),
        ("pool: demo\n    group: example.com", "group: 'example.com' is unknown; known: "),
    ],
)
def test_what_cannot_be_is_named(text, message):
    with pytest.raises(ConfigError) as caught:
        parse(POOL + text, "w.yaml", check_config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("", "has not the shape of a kubeconfig"),
        ("a: [", "cannot be used"),
        ("just words", "has not the shape of a kubeconfig"),
        (
            "current-context: x\ncontexts: []\nclusters: []\nusers: []",
            "Expected object with name x",
        ),
    ],
)
async def test_a_kubeconfig_that_is_none_is_named(tmp_path, content, message):
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        await Api.connect(Kubernetes(kubeconfig=str(path)))
    assert str(path) in str(caught.value)


async def test_without_a_cluster_it_is_said_how_to_name_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"this is no pod.*pool\.kubernetes\.kubeconfig or \$KUBE"):
        await Api.connect(Kubernetes(pool="demo"))


async def test_the_environment_s_kubeconfig_is_used_and_its_namespace(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with running_kubernetes() as server:
        path = kubeconfig(server, Path(server.folder), namespace="prod")
        monkeypatch.setenv("KUBECONFIG", str(path))
        api = await Api.connect(Kubernetes(pool="demo"))
        assert (api.server, api.namespace) == (server.url, "prod")
        await api.close()
        api = await Api.connect(Kubernetes(pool="demo", namespace="test"))
        assert api.namespace == "test"
        await api.close()


async def test_in_a_pod_the_service_account_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ValueError, match="the service account cannot be used: Service token file"):
        await Api.connect(Kubernetes(pool="demo"))


def certificate(folder: Path) -> Path:
    """A file with a key and a certificate for 127.0.0.1 that vouches for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + signed.public_bytes(Encoding.PEM)
    )
    return path


async def test_in_a_pod_the_service_account_is_who_we_are(monkeypatch, tmp_path):
    pem = certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pem)
    async with running_kubernetes(tls=tls) as server:
        server.apply(pod("a", "10.0.0.1", namespace="prod"))
        token, namespace = tmp_path / "token", tmp_path / "namespace"
        token.write_text(server.token)
        namespace.write_text("prod\n")
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(pem))
        monkeypatch.setattr(client, "NAMESPACE_FILE", namespace)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        api = await Api.connect(Kubernetes(pool="demo"))
        assert api.namespace == "prod"
        assert b"10.0.0.1" in await api.call("list", pods(api.namespace))
        server.token = "the next one"
        token.write_text(server.token)
        assert b"10.0.0.1" in await api.call("list", pods(api.namespace)), "tokens are short-lived"
        await api.close()


def test_without_kubernetes_its_package_is_not_loaded_and_with_it_its_absence_is_said(tmp_path):
    program = (
        "import sys; sys.modules['kubernetes_asyncio'] = None\n"
        "from picker.config import parse\n"
        "from picker.service import check_config\n"
        "check_config(parse('pool: {endpoints: [{address: 127.0.0.1:1}]}'))\n"
        "try: check_config(parse('pool: {kubernetes: {pool: demo}}'))\n"
        "except ValueError as problem: print(problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'warmpath[kubernetes]'" in done.stdout
