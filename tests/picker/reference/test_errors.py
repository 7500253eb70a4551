"""Files that the reference picker's loader refuses, those that ask for too much, hostile ones."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from picker.document import MAX_NODES, ConfigError
from picker.reference.load import parse
from picker.reference.others import REFUSED
from picker.reference.translate import PLUGINS
from picker.service import check_config

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def problem(text: str, head: str = HEAD) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(head + text, "e.yaml", check_config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def notes(text: str) -> list[str]:
    return [note.partition(": ")[2] for note in parse(HEAD + text, "e.yaml", check_config).notes]


ONE = "schedulingProfiles: [{name: one, plugins: [{pluginRef: queue-scorer}]}]\n"
PROFILE = "schedulingProfiles:\n- name: one\n  plugins:\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # What its loader refuses
        ("plugins:\n- testing 1 2 3\n", "e.yaml:4: plugins[0]: expected keys with values, got 'te"),
        ("plugins: [", "e.yaml:3: this is not YAML"),
        ("featureGates: [flowcontrol]\n", "unknown gate 'flowcontrol'; did you mean 'flowControl'"),
        ("featureGates: [flowControl=no]\n", "[0]: a gate is =true or =false, not 'no'"),
        ("plugins: [{parameters: {a: 1}}]\n", "plugins[0]: the key 'type' is missing"),
        (
            "plugins:\n- type: queue-scorer\n- type: queue-scorer2\n",
            "e.yaml:5: plugins[1].type: unknown plugin 'queue-scorer2'; did you mean 'queue-",
        ),
        ("plugins: [{type: test}]\n", "unknown plugin 'test'; see docs/reference-picker.md for"),
        (
            "plugins:\n- type: max-score-picker\n  parameters: {maxNumOfEndpoints: two}\n",
            "e.yaml:5: plugins[0].parameters.maxNumOfEndpoints: expected a whole number, got 'two'",
        ),
        (
            "plugins: [{type: max-score-picker, parameters: 7}]\n",
            "plugins[0].parameters: expected keys with values, got 7",
        ),
        (
            "plugins:\n- {name: a, type: queue-scorer}\n- {name: a, type: random-picker}\n",
            "e.yaml:5: plugins[1].name: there are two plugins called 'a'",
        ),
        (
            "plugins: [{type: queue-scorer}, {type: queue-scorer}]\n",
            "plugins[1].type: there are two plugins called 'queue-scorer'",
        ),
        (
            "schedulingProfiles: [{plugins: []}]\n",
            "schedulingProfiles[0]: the key 'name' is missing",
        ),
        ("schedulingProfiles: [{name: ''}]\n", "schedulingProfiles[0].name: a profile needs a"),
        (
            PROFILE + "  - weight: 10\n",
            "e.yaml:6: schedulingProfiles[0].plugins[0]: the key 'pluginRef' is missing",
        ),
        (
            "plugins: [{type: queue-scorer}]\n" + PROFILE + "  - pluginRef: queue-score\n",
            "e.yaml:7: schedulingProfiles[0].plugins[0].pluginRef: no plugin is called "
            "'queue-score'; did you mean 'queue-scorer'?",
        ),
        (
            "schedulingProfiles: [{name: a}, {name: a}]\n",
            "schedulingProfiles[1].name: there are two profiles called 'a'",
        ),
        (
            "plugins: [{type: max-score-picker}, {type: random-picker}]\n"
            + PROFILE
            + "  - pluginRef: max-score-picker\n  - pluginRef: random-picker\n",
            "e.yaml:8: schedulingProfiles[0].plugins[1].pluginRef: a profile has one picker",
        ),
        (
            "plugins: [{type: max-score-picker}, {type: random-picker}]\n",  # in the one of all
            "a profile has one picker, and this is the second",
        ),
        (
            "plugins: [{type: single-profile-handler}, {name: b, type: single-profile-handler}]\n",
            "plugins[1].type: there is one profile handler, and this is the second",
        ),
        (
            "schedulingProfiles: [{name: a}, {name: b}]\n",
            "schedulingProfiles[1]: requests are scheduled once: keep one profile",
        ),
        (
            "plugins: [{type: single-profile-handler}]\n"
            "schedulingProfiles: [{name: a}, {name: b}]\n",
            "schedulingProfiles[1]: single-profile-handler has one profile, not 2",
        ),
        (
            "plugins: [{type: openai-parser}]\n" + PROFILE + "  - pluginRef: openai-parser\n",
            "'openai-parser' (openai-parser) is no filter, scorer or picker",
        ),
        (
            "plugins: [{type: queue-scorer}]\ndataLayer: {sources: [{pluginRef: queue-scorer}]}\n",
            "dataLayer.sources[0].pluginRef: 'queue-scorer' (queue-scorer) is not a data source",
        ),
        (
            "plugins: [{type: metrics-data-source}, {type: queue-scorer}]\ndata:\n  sources:\n"
            "  - pluginRef: metrics-data-source\n    extractors: [{pluginRef: queue-scorer}]\n",
            "e.yaml:7: data.sources[0].extractors[0].pluginRef: 'queue-scorer' (queue-scorer) is "
            "not an extractor",
        ),
        (
            "plugins: [{type: metrics-data-source}]\ndata: {sources: [{pluginRef: "
            "metrics-data-source, extractors: [queue]}]}\n",
            "data.sources[0].extractors[0]: expected keys with values, got 'queue'",
        ),
        (
            "featureGates: [flowControl]\nflowControl:\n  priorityBands:\n"
            "  - {priority: 1, orderingPolicyRef: nothing}\n",
            "e.yaml:6: flowControl.priorityBands[0].orderingPolicyRef: no plugin is called",
        ),
        (
            "featureGates: [flowControl]\nplugins: [{type: queue-scorer}]\n"
            "flowControl: {defaultPriorityBand: {fairnessPolicyRef: queue-scorer}}\n",
            "'queue-scorer' (queue-scorer) is not a fairness policy",
        ),
        (
            "featureGates: [flowControl]\nflowControl: {usageLimitPolicyPluginRef: nothing}\n",
            "flowControl.usageLimitPolicyPluginRef: no plugin is called 'nothing'",
        ),
        ("parser: {pluginRef: my-parser}\n", "parser.pluginRef: no plugin is called 'my-parser'"),
        ("parser: {}\n", "parser: the key 'pluginRef' is missing"),
        (
            "plugins: [{type: queue-scorer}]\nparser: {pluginRef: queue-scorer}\n",
            "'queue-scorer' (queue-scorer) is not a parser",
        ),
        (
            "requestHandler: {parsers: [{pluginRef: mine}]}\n",
            "requestHandler.parsers[0].pluginRef: no plugin is called 'mine'",
        ),
        (
            "saturationDetector: {pluginRef: mine}\n",
            "saturationDetector.pluginRef: no plugin is called 'mine'",
        ),
        (
            "plugins: [{type: random-picker}]\nsaturationDetector: {pluginRef: random-picker}\n",
            "is not a saturation detector",
        ),
        ("plugin: []\n", "e.yaml:3: plugin: unknown key; did you mean 'plugins'?"),
        (
            "plugins:\n- {type: queue-scorer, params: {}}\n",
            "e.yaml:4: plugins[0].params: unknown key; ",
        ),
        (
            "dataLayer: {sources: [{pluginref: a}]}\n",
            "dataLayer.sources[0].pluginref: unknown key; did you mean 'pluginRef'?",
        ),
        ("flowControl: {maxBytes: 4GiB}\n", "flowControl.maxBytes: '4GiB' is not a quantity"),
        ("flowControl: {maxRequests: -1}\n", "flowControl.maxRequests: '-1' must be between 0 and"),
        ("flowControl: {defaultRequestTTL: 30}\n", "defaultRequestTTL: 30 is not a duration"),
        # What cannot be done here
        (
            "plugins: [{type: session-affinity-scorer}]\n",
            "plugins[0]: strategy encoded_endpoint_header: no response header is written here; set "
            "strategy: session_id",
        ),
        (
            "plugins:\n- type: context-length-aware\n  parameters: {enableFiltering: true}\n",
            "e.yaml:5: plugins[0].parameters.enableFiltering: enableFiltering: pods out of range",
        ),
        (
            "plugins: [{type: concurrency-detector, parameters: {concurrencyMode: tokens}}]\n"
            "saturationDetector: {pluginRef: concurrency-detector}\n",
            "parameters.concurrencyMode: concurrencyMode: tokens in flight are no limit here",
        ),
        (
            "plugins: [{type: max-score-picker, parameters: {maxNumOfEndpoints: 40}}]\n",
            "maxNumOfEndpoints: must be from 1 to 17",
        ),
        (
            "plugins: [{type: core-metrics-extractor, parameters: {defaultEngine: mine}}]\n",
            "defaultEngine: 'mine' is not among engineConfigs",
        ),
        (
            "plugins: [{type: core-metrics-extractor, parameters: {engineConfigs: "
            "[{name: a, kvUsageSpec: 'a{b'}]}}]\n",
            "metrics.engines.a: 'a{b' is no metric",
        ),
        (
            "plugins:\n- {name: a, type: session-affinity-scorer, parameters: {algorithm: "
            "session_id_header, headerName: x-a}}\n- {name: b, type: session-affinity-filter, "
            "parameters: {algorithm: session_id_header, headerName: x-b}}\n",
            "e.yaml:5: plugins[1]: 'b' and another plugin want header to be x-a and x-b",
        ),
        (
            "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: "
            "precise-prefix-cache-producer}}]\n",
            "prefixMatchInfoProducerName: no plugin is called 'precise-prefix-cache-producer'",
        ),
        (
            "dataLayer: {discovery: {pluginRef: file}}\n",
            "dataLayer.discovery: list the pods in warmpath.yaml, as pool.endpoints",
        ),
        (
            "plugins: [{type: queue-scorer}]\n" + PROFILE
            + "  - {pluginRef: queue-scorer, weight: -1}\n",
            "e.yaml:7: schedulingProfiles[0].plugins[0].weight: must be 0 or more",
        ),
        (
            "plugins: [{type: queue-scorer}]\n" + PROFILE
            + "  - {pluginRef: queue-scorer, weight: .inf}\n",
            "weight must be 0 or more, not inf",
        ),
        (
            "saturationDetector: {queueDepthThreshold: 0}\n",
            "saturationDetector: queueDepthThreshold: must be from 1 to",
        ),
    ],
)  # fmt: skip
def test_an_error_says_where_and_what(text: str, message: str) -> None:
    assert message in problem(text)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("ttftSource: latencyPredictor", ".ttftSource: ttftSource: latencyPredictor: latencies"),
        ("ttftSource: guess", ".ttftSource: "),
        ("penaltySource: sessionCost", ".penaltySource: penaltySource: sessionCost is not known"),
        ("maxTTFTPenaltyMs: -1", "maxTTFTPenaltyMs: must be from 0"),
        ("maxTTFTPenaltyMs: .nan", "maxTTFTPenaltyMs: "),
        ("maxTokensInFlightPenalty: -1", "maxTokensInFlightPenalty: must be from 0 to 10^12"),
        ("maxTTFTPenaltyMs: -1, peakPrefillThroughput: -1", "peakPrefillThroughput: must be above"),
    ],
)
def test_penalties_of_the_affinity_filter(parameters: str, message: str) -> None:
    plugin = f"{{type: prefix-cache-affinity-filter, parameters: {{{parameters}}}}}"
    said = problem(f"plugins:\n- {plugin}\n")
    assert said.startswith("e.yaml:4: plugins[0].parameters")
    assert message in said


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("kind: EndpointPickerConfig\n", "e.yaml:1: the key 'apiVersion' is missing"),
        ("apiVersion: llm-d.ai/v1alpha1\n", "e.yaml:1: the key 'kind' is missing"),
        (
            "apiVersion: llm-d.ai/v1alpha2\nkind: EndpointPickerConfig\n",
            "e.yaml:1: apiVersion: 'llm-d.ai/v1alpha2' is unknown; did you mean "
            "'llm-d.ai/v1alpha1'?",
        ),
        ("apiVersion: v1\nkind: ConfigMap\n", "e.yaml:2: kind: 'ConfigMap' is unknown; known: End"),
        ("apiVersion: [a]\nkind: EndpointPickerConfig\n", "e.yaml:1: apiVersion: ['a'] is unknown"),
        ("apiVersion: 1\nkind: EndpointPickerConfig\n", "e.yaml:1: apiVersion: 1 is unknown"),
    ],
)
def test_what_kind_of_file_it_is(head: str, message: str) -> None:
    assert message in problem("", head)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_plugin_without_an_equivalent_says_what_to_do(name: str) -> None:
    message = problem(f"plugins:\n- name: x\n  type: {name}\n")
    assert message.startswith(f"e.yaml:5: plugins[0].type: {name}: ")
    assert len(message) > len(name) + 60
    assert name not in PLUGINS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "flowControl: {maxBytes: 1024}\n",
            ["flowControl: it is ignored without the feature gate"],
        ),
        ("dataLayer: {}\n", ["dataLayer: pods' metrics are read all the same"]),
        (
            "dataLayer: {injectDefaults: false}\n",
            ["dataLayer: pods' metrics are read all the same"],
        ),
        (
            "plugins: [{type: queue-scorer, parameters: {threshold: 3}}]\n",
            ["plugins[0].parameters.threshold: queue-scorer has no such parameter, it is ignored"],
        ),
        (
            "plugins: [{type: prefix-cache-affinity-filter, parameters: "
            "{explorationProbability: 0.01}}]\n",
            ["plugins[0].parameters: prefix-cache-affinity-filter: explorationProbability is igno"],
        ),
        (
            "saturationDetector: {metricsStalenessThreshold: 200ms}\n",
            ["saturationDetector: metricsStalenessThreshold is ignored"],
        ),
        (
            "featureGates: [flowControl]\nflowControl:\n  maxRequests: 100\n"
            "  enableEviction: true\n  noEndpointRequestTTL: 10m\n"
            "  priorityBands: [{priority: 1, maxRequests: 10}]\n",
            [
                "flowControl.noEndpointRequestTTL: requests wait as long as defaultRequestTTL",
                "flowControl.priorityBands[0].maxRequests: queue limits are for all priorities",
                "flowControl.enableEviction: a request that has gone to a pod",
            ],
        ),
        ("featureGates: [enableLegacyMetrics]\n", ["featureGates[0]: metrics have the names"]),
        ("featureGates: [enableLegacyMetrics=false]\n", []),
    ],
)
def test_what_is_harmless_is_noted_once(text: str, expected: list[str]) -> None:
    found = notes(text)
    assert len(found) == len(expected)
    for note, beginning in zip(found, expected, strict=True):
        assert note.startswith(beginning)


def flow_of(text: str, group: str = "llm-d.ai"):
    head = (
        f"apiVersion: {group}/v1alpha1\nkind: EndpointPickerConfig\nfeatureGates: [flowControl]\n"
    )
    return parse(head + text, "e.yaml", check_config).config


def test_how_long_requests_wait_where_the_file_does_not_say() -> None:
    assert flow_of("").flow.ttl == 60
    assert flow_of("", "inference.networking.x-k8s.io").flow.ttl == 0  # until the client leaves
    assert flow_of("flowControl: {defaultRequestTTL: 0s}\n").flow.ttl == 0


def test_strict_fairness_is_first_come_first_served() -> None:
    assert flow_of("").identity.header
    strict = (
        "flowControl: {defaultPriorityBand: {fairnessPolicyRef: global-strict-fairness-policy}}"
    )
    assert flow_of(strict).identity.header == ""


def test_aliases_are_followed_and_bombs_are_not() -> None:
    assert "nested deeper" in problem("plugins: &a [*a]")
    bomb = "x0: &a0 [y, y, y, y, y, y, y, y, y, y]\n" + "".join(
        f"x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
    )
    assert f"more than {MAX_NODES:,} values" in problem(bomb)
    assert "nested deeper" in problem("plugins: " + "[" * 5_000)
    assert "at most 4 MiB" in problem("#" * (4 << 20))
    assert "more than 200 plugins" in problem(
        "plugins: [" + ", ".join(["{type: queue-scorer}"] * 201) + "]\n"
    )


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
types = st.sampled_from([*PLUGINS, *REFUSED])
WORDS = """
    pluginRef weight name type parameters plugins sources extractors queueDepthThreshold maxBytes
    priorityBands strategy engineConfigs label matchExpressions sessionIdConfig kvEventsConfig
    threshold headerName
"""
words = st.sampled_from(WORDS.split())
values = st.recursive(
    leaves | types,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)
plugins = st.lists(
    st.fixed_dictionaries(
        {"type": types},
        optional={"parameters": st.dictionaries(words, values, max_size=3), "name": st.text()},
    )
    | values,
    max_size=3,
)
files = st.fixed_dictionaries(
    {"apiVersion": st.just("llm-d.ai/v1alpha1"), "kind": st.just("EndpointPickerConfig")},
    optional={
        "plugins": plugins,
        "featureGates": st.just(["flowControl"]) | values,
        **dict.fromkeys(
            (
                "schedulingProfiles",
                "saturationDetector",
                "dataLayer",
                "flowControl",
                "parser",
                "requestHandler",
            ),
            values,
        ),
    },
)


@given(files)
def test_any_file_is_a_configuration_or_an_error_in_one_line_that_names_it(file) -> None:
    try:
        parse(yaml.safe_dump(file), "e.yaml", check_config)
    except ConfigError as error:
        assert str(error).startswith("e.yaml")
        assert "\n" not in str(error)
