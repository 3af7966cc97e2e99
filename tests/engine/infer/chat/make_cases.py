#!/usr/bin/env python3
"""make_cases.py > cases.json: templates, chats and the texts that Jinja2 makes of them with the options and functions of
transformers' apply_chat_template; null where it refuses. Templates in the style of published ones, then random ones."""
import json
import random

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception

CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "What's \"2 + 2\"?\n"},
     {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"}, {"role": "user", "content": "é漢🙂 "}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [],
    {"messages": [{"role": "user", "content": "weather?"},
                  {"role": "assistant", "content": None, "tool_calls": [
                      {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"city": "Köln", "days": 2, "p": 0.5}}}]},
                  {"role": "tool", "content": "sunny", "name": "look"}],
     "tools": [{"type": "function", "function": {"name": "look", "description": "It's <fine>", "parameters": {
         "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"], "x": []}}}],
     "enable_thinking": False},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}]}], "add_generation_prompt": False},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = [
    # ChatML
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    # Llama 3
    "{{ bos_token }}{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    # Mistral
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}",
    # Llama 2, with a system message in the first turn
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for m in loop_messages %}"
    "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m.content %}"
    "{% else %}{% set content = m.content %}{% endif %}{{ m.role ~ ': ' ~ content.strip() ~ eos_token }}{% endfor %}",
    # Qwen 3: tools, thoughts removed from earlier turns
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    # Llama 3.1 and 3.2: dates, macros, indented JSON
    """{{- bos_token }}
{#- a date if there is one -#}
{% if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{% endif %}
{% macro show(message, mark='*', end="\\n") -%}
  {{ mark }}{{ message.role | upper }}:{{ message.get('content', '-') }}{{ end }}
{%- endmacro %}
  {% for message in messages %}
  {{ show(message) }}
    {%- if message.tool_calls is defined and message.tool_calls is not none -%}
      {{ message.tool_calls | tojson(indent=2) }}
    {% else %}
 -- {{ show(message, end='', mark="+") }}
    {% endif %}
  {% else %}
nothing on {{ date_string }}
  {% endfor %}
end
""",
    # Content as a list
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is iterable and m.content is not mapping %}"
    "{% for part in m.content if part.type == 'text' %}[{{ part['text'] }}|{{ loop.length }}]{% endfor %}{% else %}none{% endif %}{% endfor %}",
    # Loops
    "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}{% continue %}{% endif %}{{ loop.index }}/"
    "{{ loop.length }}/{{ loop.revindex }}{{ ',' if not loop.last }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "{% set x = 1 %}{% for i in range(3) %}{% set x = x + i %}{{ x }};{% endfor %}{{ x }}{% if true %}{% set x = 7 %}{% endif %}{{ x }}",
    "{% for k, v in {'a': 1, 'b': [1, 'x'], 'c': {'d': none}}.items() %}{{ k }}={{ v }} {% endfor %}{% for (a, b) in [[1, 2], [3, 4]] %}{{ a + b }}{% endfor %}",
    "{% set block %}  {{ messages | length }}\n{% endset %}[{{ block }}] {{ block | trim | int + 1 }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
    # Expressions
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2 ** 3 }} {{ 1 + 2 * 3 - 4 }} {{ 1.5 + 1 }} {{ 3.0 }} {{ 2 * 'ab' if false else 'ab' * 2 }}",
    "{{ [1, 2, 3][-1] }} {{ 'héllo'[1:3] }} {{ 'héllo'[::-1] }} {{ [1, 2, 3, 4][1:] }} {{ [1, 2, 3, 4][:-1] }} {{ [1, 2, 3, 4][::2] }} {{ 'abc'[5:] }}|{{ [1][4] }}|",
    "{{ none }} {{ true }} {{ [none, false, 'it\\'s', \"a\\\"b\\n\", 1.0, {}] }} {{ nothing }}| {{ nothing is defined }} {{ nothing | default('d') }} {{ '' | default('e', true) }}",
    "{{ 'a' in 'abc' and 2 not in [1] and 'k' in {'k': 1} }} {{ not 1 == 2 }} {{ 1 < 2 or x.y }} {{ 'b' > 'a' }} {{ [1] + [2] == [1, 2] }}",
    "{{ ['b', 'a'] | join(', ') }} {{ [{'n': 1}, {'n': 2}] | map(attribute='n') | join('-') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} "
    "{{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | list }} {{ ['x', 'y'] | first }}{{ ['x', 'y'] | last }} {{ ['a b', 'c'] | map('upper') | list }}",
    "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a-b-c'.split('-', 1) }} {{ 'xxaxx'.strip('x') }} {{ 'hello wORLD'.title() }} {{ 'hELLO' | capitalize }} {{ 'a.b' | replace('.', '\\\\') }}",
    "{{ 'l1\nl2\n\nl3' | indent(2) }}|{{ 'l1\nl2' | indent(2, true) }}|{{ {'b': 1, 'a': [1, {'c': 'é<'}]} | tojson }}|{{ [] | tojson(indent=4) }}|{{ {'a': [1, {}], 'b': {'c': 2}} | tojson(indent=4) }}",
    "{{ messages[0].nothing }}|{{ messages[0]['nothing'] is undefined }}|{{ (messages | last)['role'] if messages else 'none' }}|{{ 5 is odd }} {{ 4 is divisibleby 2 }} {{ 'x' is string }} {{ {} is mapping }} {{ 1 is number }} {{ true is number }} {{ none is none }}",
    # Blocks, calls and arguments
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set (a, b) = [1, [2]] %}{{ a }}{{ b }}",
    "{% set ns = namespace(x=1) %}{% set ns.x, y = 5, 6 %}{{ ns.x }}{{ y }}",
    "{% set ns = namespace({'q': 3}, z=2) %}{{ ns.q }}{{ ns.z }}{{ ns.nope }}",
    "{% set x %}abc{% endset %}{{ x }}",
    "{% set x | upper | replace('A', 'z') %}abc{% endset %}{{ x }}",
    "{% set ns = namespace() %}{% set ns.t %}hey{% endset %}{{ ns.t }}",
    "{% filter upper %}a {{ 'b' }}{% endfilter %}",
    "{% filter replace('a', 'b', 1)|indent(2, true) %}aa\na{% endfilter %}",
    "{% macro m(a, b=2, c=a) %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, c=3) }} {{ m() }} {{ m(b=4, a=5) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in{% endcall %}",
    "{% macro m(x) %}{% for i in x %}{{ caller(i, loop.index) }};{% endfor %}{% endmacro %}{% set o = 'out' %}{% call(i, n=9) m([1, 2]) %}{{ i }}{{ n }}{{ o }}{% endcall %}",
    "{% macro m() %}x{% endmacro %}{% call m() %}in{% endcall %}",
    "{% for q in [7] %}{% macro m() %}{{ q }}{% endmacro %}{{ m() }}{% endfor %}",
    "{% macro a(n) %}{{ n }}{% if n %}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(3) }}",
    "{% for x in [1, 2, 3, 4] %}{{ loop.cycle('a', 'b', 'c') }}{% endfor %}",
    "{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }}{% endfor %}",
    "{% for x in [1, 1, 2] %}{% if loop.changed(x, 2) %}c{% else %}s{% endif %}{% endfor %}",
    "{% for n in [{'v': 1, 'c': [{'v': 2, 'c': [{'v': 3}]}, {'v': 4}]}] recursive %}<{{ n.v }}@{{ loop.depth }}{{ loop.depth0 }}{% if n.c %}{{ loop(n.c) }}{% endif %}>{% endfor %}",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }}{% endfor %}",
    "{% for k, (a, b) in [[1, [2, 3]]] %}{{ k }}{{ a }}{{ b }}{% endfor %}",
    "{% for x in [1,2,3,4,5] if x is odd %}{{ loop.index }}{{ x }}{{ loop.length }}{% else %}none{% endfor %}",
    "{% for x in [] %}{% else %}none{% endfor %}",
    "{% for x in 1, 2, 3 %}{{ x }}{% endfor %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}",
    "{% with %}{% set q = 1 %}{{ q }}{% endwith %}[{{ q }}]",
    "{% raw %}{{ x }} {% if %}{% endraw %}!",
    "  {% raw -%}  a {%- endraw %}  b",
    "{{ 'a\\x41\\u00e9\\d\\t\\\\' }}",
    "{{ \"x\\\ny\" }}",
    "{{ [1, 2] * 2 }} {{ 2 * 'ab' }} {{ 'ab' * -1 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7 // -2 }} {{ -7 % 3 }} {{ 7.5 // 2 }} {{ 1 / 3 }}",
    "{{ 1 is sameas true }} {{ none is sameas none }} {{ true is sameas true }} {{ 1 == true }}",
    "{{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }} {{ [true] == [1] }} {{ [1.0] == [1] }}",
    "{{ {'items': 1}['items'] }} {{ {'items': 1}.items is defined }} {{ {'a': {'b': [1, 2]}}.a.b.0 }}",
    "{{ messages|map(attribute='role')|unique|list }} {{ messages|sort(attribute='role')|map(attribute='role')|join }}",
    "{{ [{'a': {'b': 1}}]|selectattr('a.b')|list|length }}{{ [{'a': {'b': 1}}]|selectattr('a.b', '==', 1)|list|length }}{{ [1,2,3]|select('>', 1)|list }}",
    "{{ {'b': [1, {'c': 'é'}], 'a': 1.0}|tojson }}|{{ {'b': [1, {'c': 'é'}], 'a': 1.0}|tojson(indent=2) }}|{{ {'b': 'é', 'a': []}|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}|{{ [1]|tojson(true) }}",
    "{{ \"it's a-b (c) [d] x\" | title }} {{ \"it's a-b\".title() }}",
    "{{ 'x' if false }}|{{ none|default('d') }}|{{ none|d('d', true) }}|{{ nothing|d }}",
    "{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}{{ [1,2,3][-2:] }}{{ 'abc'[0] }}{{ 'abc'[9] }}",
    "{{ 'a' ~ 1 ~ none ~ true }} {{ 'a' in 'abc' }} {{ 1 not in [2] }} {{ 'k' in {'k': 1} }}",
    "{% set x = [1, 2] %}{% set y = x + [3] %}{{ x }}{{ y }}{{ x|length }}{{ y|last }}",
    "{% if messages and messages[0].role == 'user' %}u{% elif x is defined %}x{% else %}e{% endif %}",
    "{% for m in messages %}{% for c in m.role %}{{ loop.index }}{% if c == 's' %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}-{% endfor %}{% endfor %}",
    "{{ raise_exception('no') }}",
    "{{ 'a'.nope() }} ",
    "{{ messages.append(1) }}",
    "{{ [3,1,2]|sort }} {{ ['b','A','c']|sort }} {{ ['b','A','c']|sort(case_sensitive=true, reverse=true) }} {{ {'b':1,'a':2}|dictsort|map('first')|join(',') }}",
    "{% for k, v in {'b':1,'A':2}|dictsort %}{{ k }}={{ v }},{% endfor %}{% for k, v in {'b':1,'A':2}|dictsort(by='value', reverse=true) %}{{ k }}={{ v }},{% endfor %}",
    "{{ [3,1,2]|max }} {{ ['a','B']|max }} {{ [{'n': 1}, {'n': 5}]|max(attribute='n') }} {{ []|min }}|{{ {'a': 1, 'b': 0}|min }}",
    "{{ 'a b c d'.rsplit(' ', 2) }} {{ ' a  b c '.rsplit(none, 1) }} {{ ' a  b c '.split(none, 1) }} {{ 'a-b-c'.rsplit('-') }}",
    "{{ 3.0|int }} {{ '7.9'|int }} {{ 'x'|int(9) }} {{ '3'|float }} {{ 2.567|round(2) }} {{ 2.5|round }} {{ 3.5|round|int }} {{ 7|round }} {{ 2.1|round(0, 'ceil') }} {{ -2|abs }}",
    "{% set f = 'a' %}{% macro m() %}{{ f }}{% endmacro %}{% set f = 'b' %}{{ m() }}",
    "{% macro m(x) %}{{ x.role }}{% endmacro %}{% for x in messages %}{{ m(x) }}{{ m(x=x) }}{% endfor %}",
    "{%- set x = namespace(found=false) -%}{% for m in messages if m.role == 'user' %}{% set x.found = true %}{% endfor %}{{ x.found }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}",
    "{{ messages[-1]['content'].split('</think>')[-1].lstrip('\\n') }}",
    "{{ (messages|length) if messages is iterable and messages is not mapping else 'x' }} {{ loop is defined }}",
    "{% for x in [1,2] %}{% set outer = loop %}{% for y in [1,2] %}{{ outer.index }}.{{ loop.index }}{{ outer.last }} {% endfor %}{% endfor %}",
    "{% for x in [1,2,3] %}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
    "{{ {'a':1}.get('a') }}{{ {'a':1}.get('b') }}{{ {'a':1}.get('b', 2) }}{{ {'a':1}.keys()|list }}{{ {'a':1}.values()|list }}",
    "{{ [1,[2,3]]|string }}{{ 'abc'|list }}{{ {'a':none}|string }}",
    "{{ ['a', 'b']|map('upper')|join(', ') }}{{ [1, 2]|map('string')|join }}{{ [[1,2],[3]]|map('length')|list }}",
    "{{ 'abc' is string and 1 is number and 1.5 is float and 1 is integer and true is boolean }}",
    "{{ [1,2]|sum }} {{ [{'a': 1}, {'a': 2}]|sum(attribute='a') }} {{ [1,2]|sum(start=10) }}",
    "{{ 'aaa'.replace('a', 'b', 1) }} {{ 'aaa'|replace('a', 'b', 2) }} {{ 'x'|int(7) }} {{ 'x'|int(default=5) }} {{ '0x1f'|int(base=16) }}",
    "{{ 'abc'.startswith('b', 1) }} {{ 'a\\n\\nb'|indent(2, blank=true) }} {{ 'a　b'.split()|join('|') }} {{ 1 is sameas true }}",
    "{{ 'abcabc'.find('c') }} {{ 'abcabc'.rfind('c', 0, 5) }} {{ 'abcabc'.count('bc', 2) }} {{ 'abc'.index('z') }}",
    "{{ 'héllo'.center(9, '*') }} {{ 'x'.ljust(3) }}| {{ '-7'.zfill(4) }} {{ 'abc'.removeprefix('a').removesuffix('c') }} {{ 'aXb'.swapcase() }}",
    "{{ 'a=b=c'.partition('=')|list }} {{ 'a=b=c'.rpartition('=')|join('|') }} {{ 'a\\r\\nb\\x0bc'.splitlines() }} {{ 'x'.isdigit() }}{{ '12'.isdigit() }}",
    "{{ 'the quick brown fox'|truncate(12) }} {{ 'the quick brown fox'|truncate(12, true, '!', 0) }} {{ [1,2,3,4,5]|batch(2, 0)|list }} {{ [1,2,3,4,5]|slice(2)|list }}",
    "{{ ['a','A','b']|unique|list }} {{ ['a','A','b']|unique(true)|list }} {{ 'x'|center(5) }}| {{ ' xx '|trim }} {{ 'xxa'|trim('x') }}",
    "{{ 'abc'|upper is upper }} {{ 'abc' is lower }} {{ 3 is ge 3 }} {{ 3 is le(2) }} {{ nothing is callable }} {{ nothing is sequence }}",
    "{{ 'a'|nofilter }}",
    "{{ 'a'|upper(1) }}",
    "{{ 'a'|replace('a') }}",
    "{{ 'a'|indent(bogus=1) }}",
    "{{ 'a'.split(',', maxsplits=1) }}",
    "{{ 1 is divisibleby }}",
    "{{ 1 is notest }}",
    "{{ range(1, 2, 3, 4) }}",
    "{{ 'a'|join(1, 2, 3) }}",
    # White space
    "  {% if true %}  \n  a\n  {%- if true -%}  \n b {%+ if true +%}\n c {% endif %} {% endif %}\n{% endif %}\n  {# note #}\nd {#- x -#} \n e\n\n",
    "a\n   {{ 'b' }}   \n {{- 'c' -}} \n d\n  {% set x = 1 %}\n\n {% set x = 2 -%}\n  z",
    # Tuples, views of dictionaries, formats, unpacked arguments, groups, texts of addresses
    "{{ (1, 'a') }}{{ (1,) }}{{ () }}{% set t = 1, [2], (3,) %}{{ t }}{{ t[1:] }}{{ t + (4,) }}{{ t * 2 }}{{ t|list }}{{ t|tojson }}{{ (1, 2) == [1, 2] }}{{ (1, 2) < (1, 3) }}",
    "{{ {'a': 1, 'b': (2,)}.items() }}{{ {'a': 1}.keys() }}{{ {'a': 1}.values() }}{{ {'a': 1}|items|list }}{{ {'b': 2, 'a': 1}|dictsort }}{{ 'a-b'.partition('-') }}"
    "{{ 'ab'.startswith(('x', 'a')) }}",
    "{{ '%s %d %05.2f|%-5s|%5s|%x %X %o %e %g %% %r %c %i' % ('é', 7.9, 2.345, 'ab', 'cd', 255, 255, 8, 12345.678, 0.0001, 'it', 'c', true) }}{{ '%(a)s %(b)+d' % {'a': [1], 'b': 3} }}"
    "{{ '%*d|%.*f|%.2s' % (5, 3, 1, 2.55, 'abc') }}{{ '%s' % messages|length }}{{ '%#x % d %+.1e' % (10, 4, 1500) }}",
    "{{ '{} {}|{0}' }}{{ '{} {} {{}}'.format(1, 'b') }}{{ '{1}{0}{n!r}'.format('a', 2, n='x') }}{{ '{:>5}|{:<5}|{:^5}|{:*^7}|{:05d}|{:+.2f}|{:,}|{:.1%}|{:x}|{:e}'.format('a', 'b', 'c', 'd', 42, 2.5, 1234567, 0.256, 255, 1500.0) }}"
    "{{ '{0.a} {0[b]} {1[0]}'.format({'a': 1, 'b': 2}, [3]) }}{{ '{:{w}}|{:>{}}'.format('a', 'b', 4, w=3) }}{{ '%s-%s'|format('a', 1) }}",
    "{% macro f(a, b=2, c=3) %}{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(*[1, 4, 5, 6]) }}{{ f(1, **{'c': 7, 'd': 8}) }}{{ f(*(9,), **{}) }}{{ f(0, c=1, *[5]) }}",
    "{% for role, group in messages|groupby('role') %}{{ role }}={{ group|map(attribute='content')|list }};{% endfor %}"
    "{% for g in [{'k': 'B', 'n': 1}, {'k': 'a'}, {'k': 'b', 'n': 2}]|groupby('k') %}{{ g.grouper }}:{{ g.list|length }}{{ g|length }}{% endfor %}{{ [{'n': 1}, {}]|groupby('n', default=0) }}",
    "{{ 'a b/é?&=~'|urlencode }}{{ {'q w': 'x/y', 'n': 1}|urlencode }}{{ [('a', 'b c')]|urlencode }}{{ 7|urlencode }}",
    "{{ 'Straße ﬁ éÀ Ως'|upper }}{{ 'ÉCOLE ΟΔΟΣ ΣΑΣ.'|lower }}{{ 'été à paris'|title }}{{ 'éTÉ'|capitalize }}{{ \"l'été о МИРЕ\".title() }}{{ 'Éé'.swapcase() }}{{ 'ßΣ'.casefold() }}"
    "{{ 'ÉA'.isupper() }}{{ 'été'.islower() }}{{ '漢字'.isalpha() }}{{ '٣'.isdecimal() }}{{ 'é1'.isalnum() }}{{ 1e3 }}{{ 2.5e-7 }}",
    # Refused
    "{{ nothing.x }}", "{{ 1 + 'a' }}", "{% for x in 5 %}{% endfor %}", "{{ raise_exception('no') }}", "{% if %}{% endif %}", "{{ 'a' }", "{% for m in messages %}",
    "{{ x | nofilter }}", "{% endif %}", "{{ f(1) }}", "{{ messages.nomethod() }}", "{{ 1 // 0 }}",
    "{{ '%d' % 'a' }}", "{{ '%s' % (1, 2) }}", "{{ '%s %s' % 1 }}", "{{ '%y' % 1 }}", "{{ '{}'.format() }}", "{{ '{x}'.format(1) }}", "{{ '{:d}'.format('a') }}", "{{ '{'.format() }}",
    "{% macro f(a) %}{% endmacro %}{{ f(**[1]) }}", "{% macro f(a) %}{{ kwargs }}{% endmacro %}{{ f(b=1, **{'b': 2}) }}", "{{ (1, 2) + [3] }}", "{{ 'a'.startswith(['a']) }}",
    "{{ (1, 2).copy() }}", "{{ {}.items()|tojson }}",
]

generator = random.Random(6)


def expression(depth):
    choose = generator.choice
    if depth == 0:
        return choose(["1", "0", "7", "-2", "'ab'", "''", "'x y'", "true", "false", "none", "[1, 'b']", "[]", "{'k': 2}", "messages",
                       "messages | length", "add_generation_prompt", "nothing", "bos_token", "2.5"])
    inner = lambda: expression(depth - 1)
    return choose([
        lambda: f"({inner()} {choose(['+', '-', '*', '~', '==', '!=', '<', 'and', 'or', 'in', 'not in', '//', '%'])} {inner()})",
        lambda: f"{inner()} {choose(['and', 'or', '~', '=='])} {inner()} {choose(['or', 'and'])} {inner()}",
        lambda: f"({inner()}) | {choose(['length', 'trim', 'string', 'list', 'first', 'last', 'upper', 'tojson', 'default(3)', 'default(4, true)', 'join(1)', 'int', 'title'])}",
        lambda: f"({inner()}) is {choose(['', 'not '])}{choose(['defined', 'none', 'string', 'number', 'mapping', 'iterable', 'sequence', 'odd', 'boolean', 'integer', 'false'])}",
        lambda: f"({inner()} if {inner()} else {inner()})", lambda: f"({inner()})[{choose(['0', '-1', '1:', ':-1', '::-1', '9', '2:1'])}]",
        lambda: f"[{inner()}, {inner()}]", lambda: f"not {inner()}",
    ])()


def statement(depth):
    choose = generator.choice
    blank = lambda: choose(["", " ", "\n", "  \n ", "\n\n"])
    mark = lambda: choose(["", "", "-", "+"])
    tag = lambda text: "{%" + mark() + " " + text + " " + choose(["", "", "-", "+"]) + "%}" + blank()
    body = lambda: "".join(statement(depth - 1) for _ in range(generator.randint(1, 2)))
    if depth == 0:
        return choose([lambda: "{{" + choose(["", "-"]) + " " + expression(generator.randint(0, 2)) + " " + choose(["", "-"]) + "}}" + blank(),
                       lambda: choose(["text", " a b ", "\n  c", "{", "%}"]) + blank(), lambda: "{#" + mark() + " n " + choose(["", "-"]) + "#}" + blank(),
                       lambda: tag("set v = " + expression(1)) + "{{ v }}"])()
    return choose([lambda: tag("if " + expression(1)) + body() + tag("else") + body() + tag("endif"),
                   lambda: tag("for e in " + choose(["messages", "range(3)", "'ab'", "[1, [2]]", "{'k': 1}"])) + body() + "{{ e }}{{ loop.index }}" + tag("endfor"),
                   lambda: tag("set v") + body() + tag("endset") + "<{{ v }}>"])()


for _ in range(400):
    TEMPLATES.append("".join(statement(generator.randint(0, 2)) for _ in range(generator.randint(1, 3))))

cases = []
for number, template in enumerate(TEMPLATES):
    for index, chat in enumerate(CHATS):
        if number >= len(TEMPLATES) - 400 and index != number % len(CHATS):
            continue
        variables = {"add_generation_prompt": True} | TOKENS | (chat if isinstance(chat, dict) else {"messages": chat})
        try:
            text = environment.from_string(template).render(variables)
        except Exception:
            text = None
        cases.append({"template": number, "chat": index, "text": text})
print(json.dumps({"random_from": len(TEMPLATES) - 400, "tokens": TOKENS, "templates": TEMPLATES, "chats": CHATS, "cases": cases}, ensure_ascii=False, indent=0))
