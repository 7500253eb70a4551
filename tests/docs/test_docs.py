"""README.md and docs/*.md are true: what they show runs, and what they name exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner

from picker import config, flow_gauges, gauges, metrics, reload, tls
from picker.admin import Pages
from picker.admin import make_app as make_admin_app
from picker.cli import main
from picker.exposition import Spec
from picker.filters import FILTERS
from picker.kubernetes import leader
from picker.kubernetes import view as kubernetes_gauges
from picker.names import PICK_PATH
from picker.prefix import gauges as prefix_gauges
from picker.quota import gauges as quota_gauges
from picker.replicas import gauges as replica_gauges
from picker.schedule import DEFAULT_SCORERS, FRESH
from picker.service import check_config
from scorers import SCORERS
from tests.docs.pages import NOT_RUN, PAGES, ROOT, Block, blocks_of, matches, prose_of
from tests.docs.running import DEFAULT_FLAGS, Runner, Server, server_command
from worker.api.protocol import ChatRequest, CompletionRequest
from worker.files.architecture import ARCHITECTURES
from worker.profiles import PROFILES
from worker.server import make_app

MODULES = {  # imported by the tests, not before: tests/kernels must be first to import Triton
    "python -m bench.engine": "bench.engine",
    "python -m kernels.bench": "kernels.bench",
    "python -m bench.simulated": "bench.simulated",
    "python -m bench.picker": "bench.picker",
    "python -m bench.routing": "bench.routing",
    "python -m bench.schedule": "bench.schedule",
    "python -m bench.policies": "bench.policies",
    "python -m bench.index": "bench.index",
    "python -m bench.quota": "bench.quota",
    "python -m bench.fairness": "bench.fairness",
    "python -m bench.gate": "bench.gate",
    "python -m bench.replicas": "bench.replicas",
}
OTHERS_FLAGS = {  # of other programs
    "--disable-hot-restart",
    "--enable-prompt-tokens-details",
    "--kv-events-config",
    "--merge",
}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]


@cache
def commands() -> dict[str, click.Command]:
    """Every documented command that can be imported; some need the extra `bench`."""
    found: dict[str, click.Command] = {"warmpath": main}
    for command, module in MODULES.items():
        with suppress(ImportError):
            found[command] = import_module(module).main
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("workers"))
    try:
        yield runner
    finally:
        runner.keep([])


@pytest.fixture(scope="module")
def looked_up_at(runner: Runner) -> list[Server]:
    """A worker and a picker, for all that is only looked up."""
    runner.keep([])
    runner.write(
        "listen: {grpc: 9002, health: 9003, http: 9004, admin: 9090}\n"
        'pool: {endpoints: [{address: "127.0.0.1:8000"}]}\n'
        "prefix: {mode: events, tokenizer: simulated}\n",
        "looked-up-at.yaml",
    )
    return [
        runner.serve(command, runner.directory)
        for command in (
            "warmpath work --simulate instant --port 8000",
            "warmpath pick -c looked-up-at.yaml",
        )
    ]


@pytest.fixture(scope="module")
def worker(looked_up_at: list[Server]) -> Server:
    return looked_up_at[0]


@pytest.fixture(scope="module")
def picker(looked_up_at: list[Server]) -> Server:
    return looked_up_at[1]


def test_every_command_and_flag_of_quota_is_documented_and_every_command_is_run() -> None:
    pages = [ROOT / "docs/quota.md", ROOT / "docs/fairness.md"]
    blocks = [block for page in pages for block in blocks_of(page)]
    run = [line for block in blocks if block.is_run for line in block.code.splitlines()]
    text = "".join(page.read_text() for page in pages)
    for words in leaves("", command_called("quota")):
        example = re.compile(rf"warmpath quota (--\S+ \S+ )*{words}\b")
        assert any(map(example.search, run)), f"warmpath quota {words} is not run"
    for flag in flags_of(command_called("quota")) - {"--help"}:
        assert flag[:2] != "--" or re.search(rf"{flag}\b(?!-)", text), flag


def leaves(words: str, command: click.Command) -> Iterator[str]:
    """The commands below one that do something, as the words after it."""
    if not isinstance(command, click.Group):
        yield words.strip()
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaves(f"{words} {name}", inner)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs_and_prints_what_the_page_says(
    page: Path, runner: Runner, tmp_path: Path
) -> None:
    blocks = [block for block in blocks_of(page) if block.is_run]
    (tmp_path / "envoy").symlink_to(ROOT / "envoy")
    runner.keep(command for block in blocks if (command := server_command(block)))
    for block in blocks:
        command = server_command(block)
        if command is None:
            printed = runner.run(block, tmp_path)
        else:
            printed = runner.shown(runner.serve(command, tmp_path).ready_log)
        if block.output is not None:
            assert matches(block.output, printed), (
                f"{block.place} should print\n{block.output}\nbut printed\n{printed}"
            )


def test_all_pages_are_looked_at_and_linked_from_the_first() -> None:
    assert len(PAGES) == 1 + len(list(ROOT.glob("docs/*.md")))
    first = PAGES[0].read_text()
    for page in PAGES[1:]:
        assert f"({name_of(page)})" in first


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.not_run], ids=lambda block: block.place
)
def test_blocks_that_are_not_run_say_why_and_could_run(block: Block) -> None:
    assert block.not_run in NOT_RUN
    for line in block.commands:
        check_arguments(line)


def test_each_reason_not_to_run_is_needed() -> None:
    assert {block.not_run for block in BLOCKS if block.not_run} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_text_exist(page: Path) -> None:
    for code in re.findall(r"`([^`]+)`", " ".join(prose_of(page).split())):
        if code.startswith(tuple(commands())):
            check_arguments(code, complete=False)


def check_arguments(line: str, complete: bool = True) -> None:
    """Parse a command line as its command does, without running it."""
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    plain = " ".join(words)
    for prefix, command in commands().items():
        if plain == prefix or plain.startswith(prefix + " "):
            parse(command, words[len(prefix.split()) :], complete)


def parse(command: click.Command, arguments: list[str], complete: bool) -> None:
    context = command.make_context(
        command.name, list(arguments), resilient_parsing=not complete or "--help" in arguments
    )
    if isinstance(command, click.Group) and arguments and arguments[0][0] != "-":
        subcommand = command.get_command(context, arguments[0])
        assert subcommand is not None, f"there is no command {arguments[0]!r}"
        parse(subcommand, arguments[1:], complete)


def flags_of(command: click.Command) -> set[str]:
    flags = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            flags |= flags_of(subcommand)
    return flags | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_flags_in_the_text_exist(page: Path) -> None:
    flags = set().union(*map(flags_of, commands().values()))
    named = set(re.findall(r"`(--[a-z][a-z-]*)", prose_of(page)))
    assert not named - flags - OTHERS_FLAGS


@pytest.mark.parametrize("name", ["up", "work"])
def test_default_flags_are_the_defaults(name: str) -> None:
    command = command_called(name)
    simulated = ["--simulate", "instant"]
    defaults = command.make_context(name, [*simulated]).params
    written = [*simulated, *DEFAULT_FLAGS[name].split()]
    assert defaults == command.make_context(name, written).params


def test_default_flags_of_the_picker_are_its_configurations() -> None:
    given = command_called("pick").make_context("pick", DEFAULT_FLAGS["pick"].split()).params
    ports = {name: given[name] for name in ("grpc", "health", "http", "admin")}
    assert config.Listen(**ports) == config.Listen()


def command_called(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


@pytest.mark.parametrize(
    ("name", "pages"),
    [
        ("up", "docs/quick-start.md"),
        ("pick", "docs/operate.md docs/reference-picker.md"),
        ("explain", "docs/operate.md"),
        ("index", "docs/prefix.md"),
        ("envoy", "docs/envoy.md"),
    ],
)
def test_every_flag_of_the_picker_is_documented(name: str, pages: str) -> None:
    text = "".join((ROOT / page).read_text() for page in pages.split())
    for flag in flags_of(command_called(name)) - {"--config", "--help"}:  # -c, as everybody writes
        if flag.startswith("--"):
            assert re.search(rf"{flag}\b(?!-)", text), f"{pages} do not tell of {flag}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors_of(file), f"{page} links to {target}"


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def specs_of(*modules: ModuleType) -> list[Spec]:
    return [
        value
        for module in modules
        for found in vars(module).values()
        for value in (found.values() if isinstance(found, dict) else [found])
        if isinstance(value, Spec)
    ]


def test_metrics_exist(worker: Server, picker: Server) -> None:
    worker.ask("GET", "/v1/models")  # so that there are series about HTTP
    page = worker.ask("GET", "/metrics")[1].decode() + picker.ask("GET", "/metrics")[1].decode()
    exported = set(re.findall(r"^(?:# TYPE )?([\w:]+)[ {]", page, re.MULTILINE))
    histograms = re.findall(r"^# TYPE (\w+) histogram", page, re.MULTILINE)
    # Exported where these are switched on
    for spec in specs_of(flow_gauges, quota_gauges, kubernetes_gauges, tls, leader, replica_gauges):
        exported.add(spec.name)
        histograms += [spec.name] * (spec.kind == "histogram")
    for histogram in histograms:
        exported |= {f"{histogram}_{part}" for part in ("bucket", "sum", "count")}
    name = re.compile(
        r"\b(?:vllm|warmpath):\w+|\b(?:process|http_request)_\w+|\bhttp_requests\w+"
        r"|\b(?:inference|warmpath)_[a-z]\w+"
    )
    for path in PAGES:
        assert not set(name.findall(path.read_text())) - exported, path


def test_every_metric_of_the_picker_is_documented() -> None:
    specs = specs_of(
        metrics,
        gauges,
        reload,
        flow_gauges,
        prefix_gauges,
        quota_gauges,
        kubernetes_gauges,
        replica_gauges,
        tls,
        leader,
    )
    assert len(specs) > 60
    rows = re.findall(r"^\| (`.+?`) \| (\w+) \|", page_text("operate"), re.MULTILINE)
    kinds = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    for spec in specs:
        assert kinds.get(spec.name) == spec.kind, spec.name


def test_paths_are_routed(worker: Server, picker: Server) -> None:
    paths = {path for page in PAGES for path in paths_in(page)}
    assert {"/v1/chat/completions", "/ready", "/debug/state"} <= paths
    for path in paths:
        answers = {server.ask("OPTIONS", path)[0] for server in (worker, picker)}
        assert 405 in answers, f"{path} is not routed"


def paths_in(page: Path) -> set[str]:
    """The HTTP paths that a page names: in code, in URLs and in configuration."""
    text = page.read_text()
    named = re.findall(r"`(?:(?:GET|POST) )?(/[a-z0-9_/]*)`", prose_of(page))
    named += re.findall(r"http://127\.0\.0\.1:[^\s/]+(/[\w/]+)", text)
    named += re.findall(r"path: (/[a-z0-9_/]+)", text)
    known = {path.removeprefix(PICK_PATH) or "/" for path in named}  # which the lean profile adds
    return known - {"/v1"}  # which clients are told as their base URL


def test_every_admin_page_is_documented() -> None:
    source = Path(make_admin_app.__code__.co_filename).read_text()
    paths = re.findall(r'web\.(get|post)\("([^"]+)", pages\.(\w+)\)', source)
    assert len(paths) > 5
    for verb, path, method in paths:
        assert hasattr(Pages, method)
        assert f"| `{verb.upper()} {path}` |" in page_text("operate")


def page_text(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text()


def rows_of(name: str, heading: str) -> dict[str, str]:
    """The rows of the tables of a part of a page, by what stands first in them, in code."""
    part = re.split(r"^#+ ", page_text(name).partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]
    assert part, f"docs/{name}.md has no part {heading!r}"
    return {
        key: row
        for row in part.splitlines()
        if row.startswith("| `")
        for key in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    }


def keys_of(section: type, before: str = "") -> Iterator[str]:
    """The keys of warmpath.yaml as the page writes them."""
    for field in msgspec.structs.fields(section):
        key = before + field.encode_name
        if isinstance(field.type, type) and issubclass(field.type, config.Section):
            yield from keys_of(field.type, f"{key}.")
        else:
            yield key
            for inner in get_args(field.type):
                if isinstance(inner, type) and issubclass(inner, config.Section):
                    yield from keys_of(inner, f"{key}[].")


def test_the_reference_of_the_configuration_is_whole_and_true() -> None:
    rows = rows_of("operate", "warmpath.yaml")
    assert list(rows) == list(keys_of(config.Config))
    written: dict[str, Any] = {}
    for key, row in rows.items():
        default = row.split(" | ")[1].strip("` ")
        if "[]" in key:
            continue
        section = written
        *sections, last = key.split(".")
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = yaml.safe_load(default)
    assert config.parse(yaml.safe_dump(written)) == config.Config()


def test_the_reference_of_the_configuration_has_all_bounds() -> None:
    rows = rows_of("operate", "warmpath.yaml")
    for key, (least, most) in config.LEAST_AND_MOST.items():
        assert f"{least} to {most}" in rows[key], key


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.code.startswith("# warmpath.yaml\n")],
    ids=lambda block: block.place,
)
def test_configurations_can_be_used(block: Block) -> None:
    check_config(config.parse(block.code, block.place, check_config))


@pytest.mark.parametrize(
    ("heading", "registry"),
    [("Scorers", SCORERS), ("Filters", FILTERS)],
    ids=["scorers", "filters"],
)
def test_the_policy_page_has_every_scorer_and_filter(
    heading: str, registry: dict[str, type]
) -> None:
    rows = rows_of("policy", heading)
    assert set(rows) - {FRESH} == set(registry)
    for name, cls in registry.items():
        parameters = rows[name].rsplit(" | ", 1)[1]
        told = dict(re.findall(r"`(\w+)`(?: \((.+?)\))?", parameters))
        assert told == {
            camel(field.name): shown_default(field.default) for field in dataclasses.fields(cls)
        }, name


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def shown_default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, str | bool):
        return str(value).lower()
    return "none" if value == inf else f"{value:.10g}"


def test_the_policy_page_has_every_chooser_and_the_default() -> None:
    types = get_type_hints(config.PickerSection)["type"]
    assert set(rows_of("policy", "Choosers")) == set(get_args(types))
    default = next(block for block in BLOCKS if "uncached: 1\n" in block.code)
    shown = config.parse(default.code).scheduling
    assert shown.scorers == DEFAULT_SCORERS
    assert shown.picker == config.PickerSection()


def test_the_operating_page_has_every_refusal() -> None:
    table = page_text("operate").partition("## What the picker answers itself")[2]
    told = set(re.findall(r"`(\w+)`", table.partition("## ")[0]))
    for module in (ROOT / "picker").rglob("*.py"):
        if module.name == "admin.py":
            continue  # whose pages are for operators
        made = re.findall(r'(?:Refusal|_refuse|_break)\(\s*(\d{3}),\s*"(\w+)"', module.read_text())
        for _, reason in made:
            assert reason in told, f"{reason} of {module.name}"


def test_the_api_page_has_every_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Path(make_app.__code__.co_filename).read_text()
    routes = re.findall(r'web\.(get|post)\("([^"]+)"', server)
    assert len(routes) > 10
    text = (ROOT / "docs/api.md").read_text()
    for method, path in routes:
        shown = re.sub(r":[^}]*", "", path)  # {name:.+} is what a user knows as {name}
        assert f"`{method.upper()} {shown}`" in text


def test_the_api_page_has_every_field() -> None:
    text = (ROOT / "docs/api.md").read_text().partition("## Fields")[2]
    taken, refused = (
        set(re.findall(r"`(\w+)`", part))
        for part in text.partition("\n| | |")[0].split("**Refused with 400**")
    )
    for request in (CompletionRequest, ChatRequest):
        for field in msgspec.structs.fields(request):
            assert field.name in (refused if field.type is Any else taken)
            assert field.type is Any or field.name not in refused - {"n"}


def test_the_models_page_has_every_architecture() -> None:
    rows = re.findall(
        r"^\| `(\w+ForCausalLM)` \| `(.+)` \|", (ROOT / "docs/models.md").read_text(), re.MULTILINE
    )
    assert {architecture for architecture, _ in rows} == set(ARCHITECTURES.values())
    for architecture, names in rows:
        own = [name for name in names.split("`, `") if name in ARCHITECTURES]
        assert architecture in {ARCHITECTURES[name] for name in own}


def test_the_simulation_page_has_the_profiles_as_they_are() -> None:
    text = (ROOT / "docs/simulate.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    assert [row[0] for row in rows] == list(PROFILES)
    for name, token, step, blocks, longest in rows:
        profile = PROFILES[name]
        assert seconds(token) == pytest.approx(profile.token)
        assert seconds(step) == pytest.approx(profile.step_seconds(1, 0), rel=0.05)
        assert int(blocks.replace(",", "")) == profile.num_blocks
        assert int(longest.replace(",", "")) == profile.max_model_len


def seconds(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * {"": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


def test_every_command_has_help() -> None:
    """Which the pages point to."""
    for command in commands().values():
        assert CliRunner().invoke(command, ["--help"]).exit_code == 0
