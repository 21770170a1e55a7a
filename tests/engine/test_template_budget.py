"""Chat templates come from strangers: none may loop for ever or fill the memory, and honest ones never notice."""

from __future__ import annotations

import resource
import time

import pytest
from torchplug.engine.chat_template import render_chat_template
from torchplug.errors import RequestError

CHAT = [{"role": "user", "content": "hello"}]

BOMBS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that select nothing": "{% set r = range(99999) %}"
    "{% for a in r %}{% for b in r if false %}x{% endfor %}{% endfor %}",
    "a recursive loop": "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a repeated text": "{{ 'x' * 10**10 }}",
    "a repeated text, the other way": "{% set x = 10**10 * 'x' %}{{ x | length }}",
    "a repeated list": "{{ ([1] * 10**10) | length }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "powers of powers": "{% set ns = namespace(n=10**9) %}"
    "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling a list": "{% set ns = namespace(s=[1]) %}"
    "{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by a block": "{% set ns = namespace(s='x') %}{% for i in range(60) %}"
    "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}{% endfor %}",
    "doubling by a filter block": "{% set ns = namespace(s='xx') %}{% for i in range(60) %}"
    "{% set t %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}{% set ns.s = t %}{% endfor %}",
    "lists in lists, shown": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s }}",
    "lists in lists, as JSON": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns.s | tojson | length }}",
    "lists in lists, compared": "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
    "lists in lists, in a dict's view": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ {1: ns.s}.items() }}",
    "a namespace, shown": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
    "{% endfor %}{{ ns }}",
    "center": "{{ 'x' | center(10**9) | length }}",
    "ljust": "{{ 'x'.ljust(10**9) | length }}",
    "zfill": "{{ 'x'.zfill(10**9) | length }}",
    "expandtabs": "{{ '\t\t\t'.expandtabs(10**9) | length }}",
    "indent": "{{ ('x\n' * 1000) | indent(10**7) | length }}",
    "replace": "{% set s = 'x' * 100000 %}{{ s.replace('x', s) | length }}",
    "replace, as a filter": "{% set s = 'x' * 100000 %}{{ s | replace('x', s) | length }}",
    "join": "{% set s = 'x' * 100000 %}{{ s | join(s) | length }}",
    "join, as a method": "{% set s = 'x' * 100000 %}{{ s.join(range(99999) | map('string') | list) | length }}",
    "joining the same text": "{% set s = 'x' * 1000000 %}{{ ([s] * 100000) | join | length }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format, nested": "{{ '{:>{}}'.format(1, 10**9) }}",
    "format, as a filter": "{{ '%1000000000d' | format(1) }}",
    "format, by name": "{{ ('x' | attr('format')) }}{{ 'x'['ljust'](10**9) | length }}",
    "format of one argument many times": "{% set s = 'x' * 1000000 %}{{ ('{0}' * 100000).format(s) | length }}",
    "many lists": "{{ range(9) | slice(10**9) | list | length }}",
    "filling up": "{{ range(9) | batch(10**9, 'x') | list | length }}",
    "JSON, far out": "{{ [[[[1]]]] | tojson(indent=10**9) | length }}",
    "slices": "{% set r = range(99999) | list %}{% for i in r %}{% set x = r[1:] %}{% endfor %}",
    "searches": "{% set s = 'x' * 1000000 %}{% for i in range(99999) %}{% if 'xy' in s %}{% endif %}{% endfor %}",
    "long bodies": "{% for a in range(99999) %}" + "{% set x = a.b %}" * 3000 + "{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_without_end_is_refused_soon_and_in_little_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    with pytest.raises(RequestError, match="chat template: the template loops or grows without end") as caught:
        render_chat_template(BOMBS[name], CHAT)
    assert time.process_time() - begin < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB
    assert "pass another chat_template" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for a in b %}" * 40 + "{% endfor %}" * 40]
)
def test_a_template_too_deep_to_compile_is_refused(source):
    with pytest.raises(RequestError, match="chat template: cannot be compiled"):
        render_chat_template(source, CHAT)


LIKE_QWEN = """
{%- for t in tools or [] %}{{ t | tojson }}\n{% endfor %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages[::-1] %}
  {%- if m.role == 'user' and not (m.content.startswith('<tool>') and m.content.endswith('</tool>')) %}
    {%- set ns.last = messages | length - loop.index %}
  {%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- set content = m.content %}
  {%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
  {%- if m.role == 'user' and loop.index0 > ns.last %}{{ '<|im_start|>' ~ m.role ~ '\\n' }}
  {%- elif messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list | length %}{{ '<|im|>' + m.role }}
  {%- endif %}{{ content | trim }}{{ content.replace('a', 'b') | indent(2) | length }}
{%- endfor %}"""


@pytest.mark.parametrize(("count", "length"), [(1, 5), (1, 3_000_000), (400, 2000), (700, 3)])
def test_honest_templates_have_room_for_long_conversations(count, length):
    chat = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": ("ab" * length)[:length] + "</think>x"}
        for i in range(count)
    ]
    tools = [{"name": f"tool {i}", "parameters": {"a": {"type": "string"}, "b": [1, 2, 3]}} for i in range(50)]
    text = render_chat_template(LIKE_QWEN, chat, tools=tools)
    assert text.count("tool ") == 50
