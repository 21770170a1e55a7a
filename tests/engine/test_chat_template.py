"""Chat templates: the text that transformers renders, in a sandbox, and errors that name the template's complaint."""

from __future__ import annotations

import pytest
from torchplug.engine.chat_template import render_chat_template
from torchplug.engine.tokenizer import Tokenizer
from torchplug.errors import RequestError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Größe? <b>"x"</b> & 東京'},
    {"role": "assistant", "content": " Answer. "},
    {"role": "user", "content": "And?"},
]

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": """{{ bos_token }}
{% for m in messages %}
    {%- if m.role == 'system' %}
        {% set ns = namespace(seen=true) %}
[SYS] {{ m.content | trim }}
    {% elif m.role == 'user' %}
[INST] {{ m.content }} [/INST]
    {% else %}
{{ m.content | trim }}{{ eos_token }}
    {% endif %}
{% endfor %}
""",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}|"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}{{ tools is none }}{{ tools is defined }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "macro": "{% macro turn(m) -%}\n  <{{ m.role }}>{{ m.content }}\n{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{{ 'A' if add_generation_prompt else 'B' }}",
    "variables": "{{ thinking }}{{ missing is defined }}{{ messages | length }}",
}


@pytest.fixture(scope="module")
def theirs(backends):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backends["byte_level"](), bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.oracle
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_text_equals_transformers(theirs, backends, name, prompt):
    ours = Tokenizer(backends["byte_level"](), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    given = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt, "thinking": True}
    expected = theirs.apply_chat_template(CHAT, tokenize=False, **given)
    assert ours.apply_chat_template(CHAT, tokenize=False, **given) == expected


@pytest.mark.oracle
def test_the_demo_models_conversations_equal_transformers(demo_checkpoint):
    transformers = pytest.importorskip("transformers")
    path = demo_checkpoint.path
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = Tokenizer.from_checkpoint(demo_checkpoint)
    for conversation in (CHAT, CHAT[1:], CHAT[1:2]):
        text = theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(conversation, add_generation_prompt=True) == text
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.apply_chat_template(conversation, add_generation_prompt=True) == ids


def test_the_current_time_is_available():
    text = render_chat_template("{{ strftime_now('%Y') }}", CHAT)
    assert len(text) == 4 and text.isdigit()


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, "b"]
    assert render_chat_template("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{% for m in %}", "line 1: is not valid Jinja"),
        ("{{ messages[0].content + messages[0].nothing }}", "failed: UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "failed: SecurityError"),
        ("{{ messages.append(1) }}", "failed: SecurityError"),
        ("{{ messages[0].content + 3 }}", "failed: TypeError"),
    ],
)
def test_what_a_template_does_wrong_is_a_request_error(template, says):
    with pytest.raises(RequestError, match=says):
        render_chat_template(template, CHAT)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "expected a list of messages, got str"),
        ({"role": "user"}, "expected a list of messages, got dict"),
        ([], "conversation is empty"),
        (["hello"], r"messages\[0\]: expected a dict with a 'role'"),
        ([CHAT[0], {"content": "x"}], r"messages\[1\]: expected a dict with a 'role'"),
        ([{"role": "user", "content": 3}], "content is int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "content part that is not text"),
    ],
)
def test_malformed_messages_are_named(messages, says):
    with pytest.raises(RequestError, match=says):
        render_chat_template(TEMPLATES["chatml"], messages)


def test_a_model_without_a_template_says_so(backends):
    with pytest.raises(RequestError, match="chat template: the model has none"):
        Tokenizer(backends["byte_level"]()).apply_chat_template(CHAT)


def test_a_template_that_is_no_text_is_refused():
    with pytest.raises(RequestError, match="expected Jinja source, got int"):
        render_chat_template(5, [{"role": "user", "content": "x"}])  # type: ignore[arg-type]
