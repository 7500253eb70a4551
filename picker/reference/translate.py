"""An EndpointPickerConfig in the terms of warmpath.yaml, by the rules of its own loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from picker.convert import converted
from picker.document import ConfigError, Document, Place, nearest, shown
from picker.reference.data import DATA
from picker.reference.filters import FILTERS, PICKERS, Concurrency, Utilization
from picker.reference.flow import admission, flow_control
from picker.reference.others import OTHERS, REFUSED
from picker.reference.plugin import Data, Plugin, Refused, Role
from picker.reference.quantity import hook
from picker.reference.schema import GIE, KIND, LLM_D, DataLayer, Detector, File, Profile
from picker.reference.scorers import SCORERS

PLUGINS: Mapping[str, type[Plugin]] = {**SCORERS, **FILTERS, **PICKERS, **DATA, **OTHERS}
GATES = {
    "flowControl": "",
    "dataLayer": "",  # always on
    "prepareDataPlugins": "",
    "enableLegacyMetrics": "metrics have the names that are documented, whatever the gate says",
}
IMPLIED = {  # may be referred to without being in `plugins`
    "openai-parser",
    "utilization-detector",
    "fcfs-ordering-policy",
    "global-strict-fairness-policy",
    "static-usage-limit-policy",
    "approx-prefix-cache-producer",
    "inflight-load-producer",
}
MAX_PLUGINS = 200
NAMED = {  # where a role is asked for
    Role.SOURCE: "a data source",
    Role.EXTRACTOR: "an extractor",
    Role.DETECTOR: "a saturation detector",
    Role.FAIRNESS: "a fairness policy",
    Role.ORDERING: "an ordering policy",
    Role.USAGE_LIMIT: "a usage limit policy",
    Role.PARSER: "a parser",
}


class Translated(NamedTuple):
    data: Data  # as it would stand in warmpath.yaml
    notes: list[str]  # what is ignored, each with its place


class _Used(NamedTuple):
    """A plugin of the file."""

    type: str
    plugin: Plugin
    place: Place


def is_reference(document: Document) -> bool:
    """Whether a document is an EndpointPickerConfig, or would be an object of Kubernetes.

    Raises:
        ConfigError: it is one, but of a kind that is not known.
    """
    data = document.data
    if not isinstance(data, dict) or not data.keys() & {"apiVersion", "kind"}:
        return False
    for key, known in (("kind", (KIND,)), ("apiVersion", (GIE, LLM_D))):
        value = data.get(key)
        if value is None:
            raise document.error((), f"the key {key!r} is missing: write {' or '.join(known)}")
        if value not in known:
            raise document.error((key,), f"{shown(value)} is unknown; {nearest(str(value), known)}")
    return True


def translate(document: Document) -> Translated:
    """What an EndpointPickerConfig says.

    Raises:
        ConfigError: its own loader would refuse it, or there is no equivalent.
    """
    return _Translation(document).all()


class _Translation:
    """One file on its way."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._file = converted(document, document.data, File, hook)
        self._notes: list[str] = []
        self._plugins: dict[str, _Used] = {}

    def all(self) -> Translated:
        gates = self._gates()
        self._read_plugins()
        data: Data = {"scheduling": self._scheduling()}
        for name, used in self._plugins.items():
            self._merge(data, self._asked(used.plugin.settings, used.place), used.place, name)
            for what in used.plugin.notes():
                self._note((*used.place, "parameters"), f"{used.type}: {what}")
        self._producers()
        self._data_layer()
        self._parsers()
        self._flow(data, enabled="flowControl" in gates)
        return Translated(data, self._notes)

    # Errors and notes

    def _error(self, place: Place, what: str) -> ConfigError:
        return self._document.error(place, what)

    def _note(self, place: Place, what: str) -> None:
        self._notes.append(str(self._error(place, what)))

    def _asked(self, method: Any, place: Place) -> Any:
        try:
            return method()
        except Refused as problem:
            key = str(problem).partition(":")[0].partition(".")[0].partition(" ")[0]
            inner = (*place, "parameters", key)
            place = inner if self._document.at(inner) is not None else place
            raise self._error(place, str(problem)) from None

    def _merge(self, data: Data, more: Data, place: Place, name: str) -> None:
        """Add what a plugin sets; there is one place for each setting."""
        for key, value in more.items():
            known = data.setdefault(key, value)
            if known is value or known == value:
                continue
            if not (isinstance(known, dict) and isinstance(value, dict)):
                what = f"{name!r} and another plugin want {key} to be {known} and {value}"
                raise self._error(place, f"{what}: there is one for all")
            data[key] = known = dict(known)
            self._merge(known, value, place, name)

    # Gates and plugins

    def _gates(self) -> set[str]:
        on: set[str] = set()
        for i, written in enumerate(self._file.feature_gates):
            name, _, value = written.partition("=")
            place = ("featureGates", i)
            if name not in GATES:
                raise self._error(place, f"unknown gate {name!r}; {nearest(name, GATES)}")
            if value not in ("", "true", "false"):
                raise self._error(place, f"a gate is =true or =false, not {value!r}")
            if value == "false":
                on.discard(name)
                continue
            on.add(name)
            if GATES[name]:
                self._note(place, GATES[name])
        return on

    def _read_plugins(self) -> None:
        if len(self._file.plugins) > MAX_PLUGINS:
            raise self._error(("plugins",), f"more than {MAX_PLUGINS} plugins")
        for i, spec in enumerate(self._file.plugins):
            place: Place = ("plugins", i)
            if spec.type in REFUSED:
                raise self._error((*place, "type"), f"{spec.type}: {REFUSED[spec.type]}")
            kind = PLUGINS.get(spec.type)
            if kind is None:
                what = f"unknown plugin {spec.type!r}; {_nearest_plugin(spec.type)}"
                raise self._error((*place, "type"), what)
            name = spec.name or spec.type
            if name in self._plugins:
                where = (*place, "name") if spec.name else (*place, "type")
                raise self._error(where, f"there are two plugins called {name!r}")
            plugin = self._plugin(kind, spec.type, spec.parameters, (*place, "parameters"))
            self._plugins[name] = _Used(spec.type, plugin, place)

    def _plugin(self, kind: type[Plugin], name: str, told: Any, place: Place) -> Plugin:
        told = {} if told is None else told
        if not isinstance(told, dict):
            raise self._error(place, f"expected keys with values, got {shown(told)}")
        if kind.any_parameters:
            return kind()
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        for key in told:
            if key not in known:  # as the reference picker does, which does not look at them
                what = f"{name} has no such parameter, it is ignored; {nearest(key, known)}"
                self._note((*place, key), what)
        own = {key: value for key, value in told.items() if key in known}
        return converted(self._document, own, kind, hook, place)

    def _find(self, ref: str, place: Place, role: Role) -> _Used:
        """The plugin that is meant at a place, where it must have a role."""
        used = self._plugins.get(ref)
        if used is None and ref in IMPLIED:
            used = _Used(ref, PLUGINS[ref](), place)
        if used is None:
            what = f"no plugin is called {ref!r}; {nearest(ref, self._plugins)}"
            raise self._error(place, what)
        if role not in used.plugin.roles:
            raise self._error(place, f"{ref!r} ({used.type}) is not {NAMED[role]}")
        return used

    # The profile

    def _scheduling(self) -> Data:
        profile = self._profile()
        scorers: Data = {}
        filters: list[Data] = []
        pickers: list[Data] = []
        for i, part in enumerate(profile.plugins):
            place: Place = ("schedulingProfiles", 0, "plugins", i, "pluginRef")
            used = self._plugins.get(part.plugin_ref)
            if used is None:
                what = f"no plugin is called {part.plugin_ref!r}"
                raise self._error(place, f"{what}; {nearest(part.plugin_ref, self._plugins)}")
            plugin, roles = used.plugin, used.plugin.roles
            if roles == {Role.PRODUCER}:
                what = f"{part.plugin_ref!r} ({used.type}) is ignored: a producer needs no profile"
                self._note(place, what)
                continue
            if not roles & {Role.FILTER, Role.SCORER, Role.PICKER}:
                what = f"{part.plugin_ref!r} ({used.type}) is no filter, scorer or picker"
                raise self._error(place, what)
            if Role.FILTER in roles:
                filters.append(self._asked(plugin.filter, used.place))
            if Role.PICKER in roles:
                if pickers:
                    raise self._error(place, "a profile has one picker, and this is the second")
                pickers.append(self._asked(plugin.picker, used.place))
            if Role.SCORER in roles:
                weight = part.weight + scorers.get(part.plugin_ref, {}).get("weight", 0)
                if not weight >= 0:
                    raise self._error((*place[:-1], "weight"), "must be 0 or more")
                scorer = self._asked(plugin.scorer, used.place)
                scorers[part.plugin_ref] = {**scorer, "weight": weight}
        # No scorer: all pods are equal, which is not what no scorer means in warmpath.yaml.
        return {
            "filters": filters,
            "scorers": scorers or {"none": {"type": "prefix", "weight": 0}},
            "picker": (pickers or [self._default_picker()])[0],
        }

    def _profile(self) -> Profile:
        profiles = self._file.scheduling_profiles
        handlers = [used for used in self._plugins.values() if Role.HANDLER in used.plugin.roles]
        if len(handlers) > 1:
            what = "there is one profile handler, and this is the second"
            raise self._error((*handlers[1].place, "type"), what)
        names: set[str] = set()
        for i, profile in enumerate(profiles):
            place: Place = ("schedulingProfiles", i, "name")
            if not profile.name:
                raise self._error(place, "a profile needs a name")
            if profile.name in names:
                raise self._error(place, f"there are two profiles called {profile.name!r}")
            names.add(profile.name)
        if len(profiles) > 1:
            why = "requests are scheduled once: keep one profile"
            if handlers:
                why = f"single-profile-handler has one profile, not {len(profiles)}"
            raise self._error(("schedulingProfiles", 1), why)
        if profiles:
            return profiles[0]
        wanted = {Role.FILTER, Role.SCORER, Role.PICKER}
        every = [name for name, used in self._plugins.items() if used.plugin.roles & wanted]
        parts = [{"pluginRef": name} for name in every]
        return msgspec.convert({"name": "default", "plugins": parts}, Profile)

    def _default_picker(self) -> Data:
        """Any that is defined, else the highest score."""
        for used in self._plugins.values():
            if Role.PICKER in used.plugin.roles:
                picked: Data = self._asked(used.plugin.picker, used.place)
                return picked
        return {"type": "maxScore", "fallbacks": 0}

    def _producers(self) -> None:
        """Those that plugins name as their sources must exist: none is put in another's place."""
        for used in self._plugins.values():
            for key in ("prefix_match_info_producer_name", "in_flight_load_producer_name"):
                name = getattr(used.plugin, key, "")
                if name and name not in self._plugins and name not in IMPLIED:
                    camel = "prefixMatchInfo" if key.startswith("prefix") else "inFlightLoad"
                    place = (*used.place, "parameters", f"{camel}ProducerName")
                    what = f"no plugin is called {name!r}; {nearest(name, self._plugins)}"
                    raise self._error(place, what)

    # What is around

    def _data_layer(self) -> None:
        for key, layer in (("dataLayer", self._file.data_layer), ("data", self._file.data)):
            told = self._document.at((key,))
            if told is None:
                continue
            self._sources(key, layer)
            if told == {} or (not layer.inject_defaults and not layer.sources):
                self._note((key,), "pods' metrics are read all the same")
            if layer.discovery is not None:
                what = "list the pods in warmpath.yaml, as pool.endpoints"
                raise self._error((key, "discovery"), what)
            if layer.peer_discovery is not None or layer.cross_replica_syncer_plugin_ref:
                what = "use `replicas` of warmpath.yaml, by which pickers tell each other"
                raise self._error((key,), what)

    def _sources(self, key: str, layer: DataLayer) -> None:
        for i, source in enumerate(layer.sources):
            place: Place = (key, "sources", i)
            self._find(source.plugin_ref, (*place, "pluginRef"), Role.SOURCE)
            for j, extractor in enumerate(source.extractors):
                inner = (*place, "extractors", j, "pluginRef")
                self._find(extractor.plugin_ref, inner, Role.EXTRACTOR)

    def _parsers(self) -> None:
        if ref := self._file.parser.plugin_ref:
            self._find(ref, ("parser", "pluginRef"), Role.PARSER)
        for i, parser in enumerate(self._file.request_handler.parsers):
            place = ("requestHandler", "parsers", i, "pluginRef")
            self._find(parser.plugin_ref, place, Role.PARSER)

    def _flow(self, data: Data, *, enabled: bool) -> None:
        detector = self._detector()
        told = self._file.flow_control
        llm_d = self._file.api_version == LLM_D
        if not enabled:
            if self._document.at(("flowControl",)) is not None:
                self._note(("flowControl",), "it is ignored without the feature gate flowControl")
            data.update(self._asked(lambda: admission(detector, llm_d=llm_d), ()))
            return
        if ref := told.usage_limit_policy_plugin_ref:
            self._find(ref, ("flowControl", "usageLimitPolicyPluginRef"), Role.USAGE_LIMIT)

        def type_of(role: Role) -> Any:
            return lambda ref, place: self._find(ref, place, role).type if ref else ""

        fairness, ordering = type_of(Role.FAIRNESS), type_of(Role.ORDERING)
        data.update(
            self._asked(
                lambda: flow_control(told, detector, self._note, fairness, ordering, llm_d=llm_d),
                (),
            )
        )

    def _detector(self) -> Utilization | Concurrency:
        """The one that is referred to, in the place that counts; else the default."""
        new, old = ("flowControl", "saturationDetector"), ("saturationDetector",)
        told = self._file.flow_control.saturation_detector
        place: Place = new
        if self._document.at(new) is None:
            told, place = self._file.saturation_detector, old
        if told.plugin_ref:
            found = self._find(told.plugin_ref, (*place, "pluginRef"), Role.DETECTOR)
            assert isinstance(found.plugin, Utilization | Concurrency)
            self._asked(found.plugin.saturation, found.place)
            return found.plugin
        numbers = self._numbers(told, place)
        self._asked(numbers.saturation, place)
        return numbers

    def _numbers(self, told: Detector, place: Place) -> Utilization:
        """A detector as it was before there were plugins for it."""
        given = {
            "queueDepthThreshold": told.queue_depth_threshold,
            "kvCacheUtilThreshold": told.kv_cache_util_threshold,
            "metricsStalenessThreshold": told.metrics_staleness_threshold,
        }
        given = {key: value for key, value in given.items() if value is not None}
        detector = converted(self._document, given, Utilization, hook, place)
        for what in detector.notes():
            self._note(place, what)
        return detector


def _nearest_plugin(name: str) -> str:
    """The nearest that is known; all of them are too many for a line."""
    near = nearest(name, PLUGINS)
    return near if near.startswith("did you mean") else "see docs/reference-picker.md for those"
