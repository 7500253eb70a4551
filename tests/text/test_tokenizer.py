"""Text to ids and back, chats to text, and what hostile templates may do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.tiny import CHAT_TEMPLATE, tiny_tokenizer, write_gguf_model, write_hf_model
from text.byte_tokenizer import ByteTokenizer
from text.chat_template import ChatTemplate
from text.detokenizer import Detokenizer
from text.models import resolve
from text.tokenizer import ChatTemplateError, Tokenizer
from worker.files.gguf_file import read_gguf
from worker.loader import ModelError, open_model

SAMPLES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return open_model(resolve("smollm2-135m")).tokenizer()


# SmolLM2


@pytest.mark.parametrize("sample", SAMPLES["prompts"], ids=lambda sample: sample["text"][:12])
def test_smollm2_reads_and_writes_the_recorded_ids(smollm2, sample):
    if "messages" in sample:
        text = smollm2.render_chat(sample["messages"])
        assert text == sample["prompt_text"]
        assert smollm2.encode(text, add_special_tokens=False) == sample["prompt_ids"]
    else:
        assert smollm2.encode(sample["prompt"]) == sample["prompt_ids"]
    assert smollm2.decode(sample["new_ids"], skip_special_tokens=False) == sample["text"]
    assert smollm2.decode(sample["new_ids"]) == sample["text_without_special_tokens"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1234 5678", [33, 34, 35, 36, 216, 37, 38, 39, 40]),
        ("def f(x):\n    return x", [1604, 275, 24, 104, 727, 472, 1003, 1792]),
        ("  two  spaces\t\n", [216, 827, 216, 5600, 197, 198]),
        ("Größe café", [27302, 7466, 34878, 85, 37366]),
        ("日本語", [23274, 115, 40993, 179, 120, 248]),
        ("😀 👩\u200d👧", [10813, 242, 218, 15107, 235, 119, 321, 231, 10813, 235, 117]),
        ("½ Ⅳ", [16738, 216, 173, 223, 113]),
        ("it's don't WE'LL", [269, 506, 1326, 982, 26587, 23, 16421]),
        ("<|im_start|>x<|im_end|>", [1, 104, 2]),
        ("", []),
    ],
)
def test_smollm2_splits_text_as_it_was_trained_to(smollm2, text, ids):
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_knows_its_special_tokens(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_ids == {2}
    assert smollm2.bos_id == 1
    assert smollm2.token(2) == "<|im_end|>"
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.token(3575) == "Ġcapital"
    assert smollm2.token_bytes(3575) == b" capital"
    assert smollm2.has_chat_template


# SmolLM2 has no tokens for some bytes, among them those that begin characters this rare.
MISSING = "\x04\x06\x13\x14\x16\x1d"


ALPHABET = st.characters(codec="utf-8", max_codepoint=0x1FFFF, exclude_characters=MISSING)


@given(text=st.text(ALPHABET))
@settings(max_examples=200, deadline=None)
def test_text_survives_the_way_through_ids(smollm2, text):
    ids = smollm2.encode(text, add_special_tokens=False)
    assert b"".join(map(smollm2.token_bytes, ids)).decode() == text
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_half_a_surrogate_pair_is_text_too(smollm2):
    assert smollm2.decode(smollm2.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("token_id", [-1, 49152, 2**40])
def test_ids_out_of_the_vocabulary_stand_for_nothing(smollm2, token_id):
    assert smollm2.token(token_id) == ""
    assert smollm2.token_bytes(token_id) == b""
    assert smollm2.decode([504, token_id]) == "The"


# Tokenizers of other kinds of files


def test_a_hugging_face_directory_and_its_gguf_give_the_same_tokenizer(tmp_path):
    write_hf_model(tmp_path / "hf", changes={"eos_token_id": 7})
    write_gguf_model(tmp_path / "m.gguf")
    hf = open_model(tmp_path / "hf").tokenizer()
    ggml = open_model(tmp_path / "m.gguf").tokenizer()
    text = "the quick <|im_end|> fox is 100 é\n\n"
    assert hf.encode(text) == ggml.encode(text) == tiny_tokenizer().encode(text).ids
    assert hf.eos_ids == {0, 2}  # as generation_config.json says, and not config.json
    assert ggml.eos_ids == {2}
    assert hf.bos_id == ggml.bos_id == 1
    assert hf.render_chat([USER]) == ggml.render_chat([USER])


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path):
    write_hf_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    assert open_model(tmp_path).tokenizer().render_chat([USER]) == "<|im_end|>Hi"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    write_hf_model(tmp_path)
    settings_file = tmp_path / "tokenizer_config.json"
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    settings_file.write_text(json.dumps({"chat_template": named}))
    assert open_model(tmp_path).tokenizer().render_chat([USER]) == "plain"


def test_a_model_without_a_template_says_so(tmp_path):
    write_hf_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = open_model(tmp_path).tokenizer()
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([USER])


def write_metadata(path: Path, add: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(pre: str, *, add_bos: bool | None = None) -> Any:
    """All bytes, two long tokens and a special one, split in the way called `pre`."""

    def add(writer: GGUFWriter) -> None:
        alphabet = [token for token in sorted(tiny_tokenizer().get_vocab()) if len(token) == 1]
        tokens = ["<s>", *alphabet, "12", "123", "45", "whole"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
        writer.add_token_merges(["1 2", "12 3", "4 5"])
        writer.add_bos_token_id(0)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    return add


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["<s>", "123", "45"]),  # three digits stay together, and a text begins so
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("gpt-2", ["123", "45"]),
    ],
)
def test_each_way_of_splitting_digits(tmp_path, pre, pieces):
    path = write_metadata(tmp_path / "m.gguf", byte_level(pre))
    tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
    assert [tokenizer.token(each) for each in tokenizer.encode("12345")] == pieces
    assert (
        tokenizer.encode("12345", add_special_tokens=False)
        == tokenizer.encode("12345")[pieces[0] == "<s>" :]
    )


def test_llama_3_takes_a_word_that_no_merges_make(tmp_path):
    for pre, count in (("llama-bpe", 1), ("qwen2", 5)):
        path = write_metadata(tmp_path / "m.gguf", byte_level(pre))
        tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
        assert len(tokenizer.encode("whole", add_special_tokens=False)) == count


def test_a_file_may_ask_for_a_beginning_of_text(tmp_path):
    for add_bos in (True, False):
        path = write_metadata(tmp_path / "m.gguf", byte_level("llama-bpe", add_bos=add_bos))
        tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
        assert (tokenizer.encode("a")[0] == tokenizer.bos_id) is add_bos


def test_qwen_composes_accents(tmp_path):
    path = write_metadata(tmp_path / "m.gguf", byte_level("qwen2"))
    tokenizer = Tokenizer.from_gguf(read_gguf(path).metadata)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.fixture
def sentencepiece(tmp_path) -> Tokenizer:
    def add(writer: GGUFWriter) -> None:
        pieces = ["▁the", "▁t", "he", "eh", "▁", "t", "h", "e"]
        bytes_ = [f"<0x{value:02X}>" for value in range(256)]
        tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-3.0, -1.0, -2.0, -4.0, -5.0, -6.0, -7.0, -8.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 8)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    return Tokenizer.from_gguf(read_gguf(write_metadata(tmp_path / "m.gguf", add)).metadata)


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(sentencepiece):
    ids = sentencepiece.encode("the thé ehe")
    pieces = [sentencepiece.token(each) for each in ids]
    assert pieces[:6] == ["<s>", "▁the", "▁t", "h", "<0xC3>", "<0xA9>"]
    assert pieces[6:] == ["▁", "e", "he"]  # and not eh, e: its score is lower
    assert sentencepiece.decode(ids) == "the thé ehe"
    assert sentencepiece.decode(ids) == sentencepiece.backend.decode(ids)
    assert [sentencepiece.token_bytes(each) for each in ids[1:6]] == [
        *(b" the", b" t", b"h", b"\xc3", b"\xa9")
    ]
    assert sentencepiece.eos_ids == {2}


def test_sentencepieces_first_space_is_not_part_of_a_text(sentencepiece):
    ids = sentencepiece.encode("the the", add_special_tokens=False)
    alone = Detokenizer(sentencepiece, [1])
    assert [alone.push(each) for each in ids] == ["the", " the"]
    continued = Detokenizer(sentencepiece, [1, *ids])
    assert [continued.push(each) for each in ids] == [" the", " the"]


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (byte_level("tekken"), "tekken"),
        (lambda writer: writer.add_tokenizer_model("t5"), "tokens is missing"),
        (
            lambda writer: [writer.add_tokenizer_model("t5"), writer.add_token_list(["a"])],
            "kind 't5'",
        ),
        (
            lambda writer: [
                writer.add_tokenizer_model("gpt2"),
                writer.add_token_list(["a", "b"]),
                writer.add_token_merges(["a b"]),
            ],
            "merge 'a b'",
        ),
        (
            lambda writer: [
                writer.add_tokenizer_model("llama"),
                writer.add_token_list(["a", "b"]),
                writer.add_token_scores([1.0]),
            ],
            "scores",
        ),
        (
            lambda writer: [
                writer.add_tokenizer_model("gpt2"),
                writer.add_token_list(["a", "a"]),
                writer.add_token_merges(["a a"]),
            ],
            "repeats",
        ),
    ],
)
def test_vocabularies_that_make_no_sense_are_refused(tmp_path, add, message):
    path = write_metadata(tmp_path / "m.gguf", add)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(read_gguf(path).metadata)


def edit_tokenizer(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "Nonsense"}}, "no valid tokenizer"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
        ({"added_tokens": "x"}, "no valid tokenizer"),
    ],
)
def test_tokenizer_files_that_make_no_sense_are_refused(tmp_path, changes, message):
    write_hf_model(tmp_path)
    edit_tokenizer(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path).tokenizer()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    write_hf_model(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["one more"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="knows 321 tokens, its model only 320"):
        open_model(tmp_path).tokenizer()


def test_limits_of_length_in_a_tokenizer_file_are_not_obeyed(tmp_path):
    write_hf_model(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = open_model(tmp_path).tokenizer()
    assert len(loaded.encode("xyzw")) == 4


# Chats


def render(template: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(template, special).render(messages or [USER], **options)


def test_templates_see_what_hugging_face_shows_them():
    assert render("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}") == "<s>Hi</s>"
    assert render("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert render("{% if tools %}x{% endif %}{{ tools is none }}") == "True"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert (
        render(
            "{% for m in messages %}{% if loop.last %}{{ loop.length }}{% endif %}\n"
            "{%- break %}{% endfor %}"
        )
        == "1"
    )
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_the_generation_prompt_can_be_left_out():
    assert render(CHAT_TEMPLATE).endswith("<|im_start|>assistant\n")
    assert render(CHAT_TEMPLATE, add_generation_prompt=False).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize("filter_", ["", " | trim"])
def test_a_final_message_can_be_continued(filter_):
    template = CHAT_TEMPLATE.replace("['content']", f"['content']{filter_}")
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    text = render(template, messages, continue_final_message=True)
    wanted = "The answer is " if not filter_ else "The answer is"
    assert text.endswith("<|im_start|>assistant\n" + wanted)


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": 7}]])
def test_there_must_be_a_final_text_to_continue(messages):
    template = ChatTemplate(CHAT_TEMPLATE, {})
    with pytest.raises(ChatTemplateError, match="no final message"):
        template.render(messages, continue_final_message=True)


def test_text_parts_are_joined_unless_the_template_wants_parts():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert render("{{ messages[0].content }}", [message]) == "one\ntwo"
    handles = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert render(handles, [message]) == "[one][two]"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    with pytest.raises(ChatTemplateError, match=r"only text parts.*image_url"):
        render(handles, [image])


def test_tool_calls_reach_the_template_as_objects():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments.x + 1 }}"
    assert render(template, [message]) == "2"
    assert message["content"] is None  # the caller's own are left alone
    assert call["function"]["arguments"] == '{"x": 1}'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "broken"),
        ("{{ raise_exception('roles must alternate') }}", "refused.*: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused"),
        ("{{ nothing.at.all }}", "refused.*undefined"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ ''.__class__.__mro__ }}", "refused|unsafe"),
        ("{{ messages.__init__.__globals__ }}", "refused"),
        ("{% include '/etc/passwd' %}", "refused"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurses"),
        ("{% if " + "(" * 5000 + "1" + ")" * 5000 + " %}x{% endif %}", "broken"),
    ],
)
def test_bad_templates_give_one_clear_line(template, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        render(template)
    assert "\n" not in str(caught.value)


DOUBLE = "{%% set n = namespace(s='x') %%}{%% for a in range(60) %%}%s{%% endfor %%}"
LOOP = "{%% for a in range(99999) %%}{%% for b in range(99999) %%}%s{%% endfor %%}{%% endfor %%}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP % "",
        "{% set many = range(99999) %}" + "{% for each in many %}" * 3 + "{% endfor %}" * 3,
        LOOP % "xxxxxxxx",
        LOOP % "{{ messages[0].content }}",
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        DOUBLE % "{% set n.s = n.s + n.s %}",
        DOUBLE % "{% set n.s = n.s ~ n.s %}",
        DOUBLE % "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}",
    ],
)
def test_hostile_templates_end_soon(template):
    started = time.perf_counter()
    with pytest.raises(ChatTemplateError):
        render(template)
    assert time.perf_counter() - started < 10


# Bytes as tokens


@given(text=st.text(max_size=40))
def test_bytes_survive(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= each < tokenizer.vocab_size for each in ids)


def test_byte_chats_use_special_tokens():
    tokenizer = ByteTokenizer()
    text = tokenizer.render_chat(
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "Yo"}]}],
        tools=[{"name": "f"}],
    )
    assert text == (
        '<|im_start|>system\nTools: [{"name": "f"}]<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n'
        "<|im_start|>assistant\nYo<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 257
    assert tokenizer.decode(ids).startswith("system\n")
    assert [tokenizer.token(each) for each in (65, 258)] == ["<0x41>", "<|im_end|>"]
    assert 258 in tokenizer.eos_ids
    continued = tokenizer.render_chat([USER], continue_final_message=True)
    assert continued == "<|im_start|>user\nHi"


def test_a_simulated_worker_loads_nothing_heavy():
    heavy = "torch numpy gguf safetensors tokenizers jinja2"
    code = (
        "import sys, text.byte_tokenizer, text.detokenizer\n"
        f"sys.exit(', '.join(set('{heavy}'.split()) & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
