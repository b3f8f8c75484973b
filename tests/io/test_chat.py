import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpjax.errors import UserError
from mtpjax.io.chat import render

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  héllo <b> "},
    {"role": "assistant", "content": "<think>x</think>\n yes"},
]


def run(template, messages=MESSAGES, **variables):
    return render(template, {"messages": messages, "add_generation_prompt": True, "bos_token": "<s>", **variables})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% endfor %}", "<s>[system][user][assistant]"),
        ("{% for m in messages %}\n {{ m.role | trim }}|\n{% endfor %}", " system|\n user|\n assistant|\n"),
        ("{{ messages[1].content }}", "  héllo <b> "),
        ("{{ messages[1].content | tojson }}", '"  héllo <b> "'),
        ("{{ {'a': [1, 2]} | tojson(indent=2) }}", '{\n  "a": [\n    1,\n    2\n  ]\n}'),
        ("{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}", " yes"),
        (
            "{% set a = namespace(n=0) %}{% for m in messages[::-1] %}{% set a.n = a.n + 2 %}{% endfor %}{{ a.n }}",
            "6",
        ),
        ("{% for m in messages %}{% if loop.last %}L{% elif loop.first %}F{% else %}-{% endif %}{% endfor %}", "F-L"),
        ("{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}x{% endfor %}", "x"),
        ("{% if tools is not none and tools %}t{% else %}no{% endif %}", "no"),
        ("{% if tools is defined %}d{% else %}u{% endif %}", "u"),
        ("{% macro say(x, y='!') %}{{ x ~ y }}{% endmacro %}{{ say('a') + say('b', y=1) }}", "a!b1"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "system, user, assistant"),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list | length) }}", "1"),
        ("{% generation %}{{ 'a' * 3 }}{% endgeneration %}", "aaa"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a-b' | replace('-', '+') }}", "a+ba+b"),
        ("{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ range(3) | list }}", "3332[0, 1, 2]"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}", "[('a', 2), ('b', 1)]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{%- for k, v in {'a': 1}.items() -%} {{ k }}={{ v }} {%- endfor -%}", "a=1"),
        ("{% set x %}one{% endset %}{{ x | upper }}", "ONE"),
        (
            "{% for i in [[1,[2]],[]] recursive %}{% if i is number %}-{% else %}<{{loop(i)}}>{% endif %}{% endfor %}",
            "<-<->><>",
        ),
    ],
)
def test_what_templates_do(template, text):
    assert run(template) == text


def test_blocks_leave_no_lines():
    assert run("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].role }}", "no element 9"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{% for %}", "Expected"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages | nofilter }}", "nofilter"),
        ("{% include 'x' %}", "other templates"),
        ("{% extends 'x' %}", "other templates"),
        ("{% import 'x' as y %}", "other templates"),
    ],
)
def test_failures_are_one_line(template, words):
    with pytest.raises(UserError, match=words) as error:
        run(template)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("the chat template failed: ")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['os'] }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__ }}",
    "{{ loop.__class__ }}{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ '%s' % messages }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ 'x'.encode('utf-8') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages | attr('__class__') }}",
    "{{ dict.__subclasses__() }}",
    "{{ dict.fromkeys('ab') }}",
    "{% set x = messages.clear %}{{ x() }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_stays_inside(template):
    with pytest.raises(UserError):
        run(template)
    assert len(MESSAGES) == 3


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(999999999) %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' * 99 }}{% endfor %}",
    "{{ 'a' * 999999999999 }}",
    "{{ 999999999999 * 'a' }}",
    "{{ [0] * 999999999999 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 2 ** 9999999999 }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('', ns.x) %}{% endfor %}",
    (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}"
    ),
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set a = namespace(x=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% endfor %}{{ a.x | tojson }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns ~ 'a' }}",
    (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ {'a': ns.x}.values() }}"
    ),
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "{% for x in [[[]]] recursive %}{{ loop([[[]]]) }}{% endfor %}",
    "{{ 'a' | center(99999999999) }}",
    "{{ 'a'.ljust(99999999999) }}",
    "{{ 'a'.zfill(99999999999) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:99999999999}'.format(1) }}",
    "{{ 'a' | format(1) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ lipsum(n=99999999) }}",
    "{{ 1.5 | round(999999999, 'ceil') }}",
    "{{ 'a\tb'.expandtabs(99999999999) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "+".join(["1"] * 20000) + " }}",
    "x" * 200_000,
    (
        "{% set ns = namespace(x='ab') %}{% for i in range(18) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
        "{% for i in range(90000) %}{% if ns.x == ns.x ~ 'a' %}{% endif %}{% endfor %}"
    ),
    (
        "{% set ns = namespace(x='ab') %}{% for i in range(18) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
        "{% for i in range(90000) %}{% if 'c' in ns.x %}{% endif %}{% set y = ns.x[1:] %}{% endfor %}"
    ),
]


@pytest.mark.parametrize("template", BOMBS, ids=range(len(BOMBS)))
def test_a_template_ends_soon_and_stays_small(template):
    start = time.monotonic()
    with pytest.raises(UserError):
        run(template)
    assert time.monotonic() - start < 8


def test_long_conversations_fit():
    messages = [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "yes " * 100}] * 300
    template = "{% for m in messages %}{{ '<' + m['role'] + '>\n' + m['content'] | trim + '\n' }}{% endfor %}"
    assert len(run(template, messages)) > 600_000


@settings(max_examples=60, deadline=None)
@given(st.text("{%}x.'|_[]() \n", max_size=40))
def test_any_text_is_a_template_or_refused(template):
    with contextlib.suppress(UserError):
        run(template)
