import contextlib
import json
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import field_validator

from mtpjax.config import Config, json_schema, load_config, merge, parse_overrides, replace, to_yaml
from mtpjax.config.dialect import MAX_DEPTH, MAX_FILE_BYTES, dump_yaml, parse_yaml
from mtpjax.errors import UserError


class Adam(Config):
    learning_rate: float = 1e-3
    """Peak of the schedule, per step."""
    kind: Literal["adam", "sgd"] = "adam"
    betas: tuple[float, ...] = (0.9, 0.95)


class Named(Config):
    name: str = "x"


class Train(Config):
    steps: int = 10
    label: str = ""
    resume: bool = False
    optimizer: Adam = Adam()
    stages: tuple[Adam, ...] = ()
    either: Adam | Named | None = None
    number_or_word: int | str = 1

    @field_validator("steps")
    @classmethod
    def _not_negative(cls, steps: int) -> int:
        if steps < 0:
            raise ValueError("steps must be 0 or more")
        return steps


class Needs(Config):
    width: int


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, text: str | bytes):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def message(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def of_overrides(*overrides: str) -> str:
    return message(load_config, Train, None, overrides)


# --- values


def test_a_file_and_overrides_make_a_config(write):
    path = write("a.yaml", "steps: 1_000\noptimizer: {learning_rate: 1e-3, betas: [0.5, 1]}\nstages:\n- kind: sgd\n")
    config = load_config(Train, path, ["optimizer.learning_rate=3e-4", "label=no", "resume=true"])
    assert config == Train(
        steps=1000,
        label="no",
        resume=True,
        optimizer=Adam(learning_rate=3e-4, betas=(0.5, 1.0)),
        stages=(Adam(kind="sgd"),),
    )
    assert isinstance(config.optimizer.betas[1], float)


def test_an_empty_file_and_no_file_give_the_defaults(write):
    assert load_config(Train, write("a.yaml", "# nothing\n")) == load_config(Train, None) == Train()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-1E5", -1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("010", 10),
        ("1_000", 1000),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("0x10", "0x10"),
        ("'1e-3'", "1e-3"),
        ("null", None),
        ("~", None),
        ("true", True),
        ("[1, [a, {b: 2.5}]]", [1, ["a", {"b": 2.5}]]),
        ("1e", "1e"),
        ("é", "é"),
        ("a\nb", "a b"),
    ],
)
def test_what_yaml_means(text, value):
    parsed = parse_yaml(text, "test")
    assert parsed == value
    assert type(parsed) is type(value)


def test_null_is_a_value(write):
    assert load_config(Train, write("a.yaml", "either: {name: y}"), ["either=null"]).either is None
    assert load_config(Train, write("a.yaml", "either:\n")).either is None


def test_overrides_nest_and_the_last_wins():
    assert parse_overrides(["a.b=3", "c=[1, 2]", "a.d={e: x}", "a.b=4", "t=a=b"]) == {
        "a": {"b": 4, "d": {"e": "x"}},
        "c": [1, 2],
        "t": "a=b",
    }


def test_merge_leaves_its_arguments_alone():
    below, above = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2, 3]}
    assert merge(below, above) == {"a": {"b": 3, "c": 2}, "d": [2, 3]}
    assert (below, above) == ({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2, 3]})


# --- bad values, one line each


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("step=3", "unknown key 'step'; did you mean 'steps'?"),
        ("optimizer.lerning_rate=3", "unknown key 'optimizer.lerning_rate'; did you mean 'optimizer.learning_rate'?"),
        ("stages=[{}, {betaz: 1}]", "unknown key 'stages[1].betaz'; did you mean 'stages[1].betas'?"),
        ("learning_rate=3", "unknown key 'learning_rate'; did you mean 'optimizer.learning_rate'?"),
        ("either.nam=y", "unknown key 'either.nam'; did you mean 'either.name'?"),
        ("optimizer.zzz=1", "unknown key 'optimizer.zzz'; known keys: betas, kind, learning_rate"),
        ("steps=true", "steps: expected a valid integer, got true (boolean)"),
        ("steps=1.0", "steps: expected a valid integer, got 1.0 (float)"),
        ("steps=1e3", "steps: expected a valid integer, got 1000.0 (float)"),
        ("steps='3'", 'steps: expected a valid integer, got "3" (string)'),
        ("steps=null", "steps: expected a valid integer, got null"),
        ("steps=-1", "steps: steps must be 0 or more"),
        ("label=3", "label: expected a valid string, got 3 (integer)"),
        ("resume=1", "resume: expected a valid boolean, got 1 (integer)"),
        ("resume=yes", 'resume: expected a valid boolean, got "yes" (string)'),
        ("optimizer=null", "optimizer: expected a mapping, got null"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: expected a finite number, got Infinity (float)"),
        ("optimizer.betas=0.9", "optimizer.betas: expected a valid tuple, got 0.9 (float)"),
        ("optimizer.betas=[0.9, x]", 'optimizer.betas[1]: expected a valid number, got "x" (string)'),
        ("optimizer.kind=adan", "optimizer.kind: expected 'adam' or 'sgd', got \"adan\" (string)"),
        ("number_or_word=1.5", "number_or_word: expected a valid integer or a valid string, got 1.5 (float)"),
        ("either={kind: 3}", "either.kind: expected 'adam' or 'sgd', got 3 (integer)"),
    ],
)
def test_a_bad_value_is_one_line(override, said):
    assert of_overrides(override).removesuffix(" (and 1 more)") == f"override '{override}': {said}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("a..b=3", "expected key.path=value"),
        (".".join("a" * (MAX_DEPTH + 1)) + "=3", "expected key.path=value"),
        ("steps=", "no value; write steps=null or steps=''"),
        ("steps=[1", "override 'steps=[1': "),
        ("steps=@x", "cannot start any token"),
        ("label=\0", "special characters are not allowed"),
        ("steps=&a 3", "anchors (&) and aliases (*) are not read"),
        ("steps=!!python/object:os.system x", "tags (!) are not read"),
        ("steps=" + "9" * 5000, "a number of over 100 digits"),
        ("steps=" + "[" * 50_000, "nested deeper than 32 levels"),
        ("steps=" + "{a: " * 50_000, "nested deeper than 32 levels"),
        ('label="\\UFFFFFFFF"', "override 'label="),
    ],
)
def test_a_malformed_override_is_one_line(override, said):
    text = of_overrides(override)
    assert said in text
    assert len(text) < 250


def test_the_message_names_the_layer_that_set_the_value(write):
    write("base.yaml", "steps: x\nlabel: 3")
    path = write("top.yaml", "base: base.yaml\nlabel: good")
    assert message(load_config, Train, path).startswith(f"{path.parent / 'base.yaml'}: steps: expected")
    assert message(load_config, Train, path, ["steps=y"]).startswith("override 'steps=y': steps: expected")
    assert message(load_config, Needs, write("n.yaml", "{}")) == f"{path.parent / 'n.yaml'}: the key 'width' is missing"


def test_construction_in_python_says_the_same():
    def make(cls: type[Config], **values: Any) -> str:
        return message(lambda: cls(**values))

    assert make(Train, stpes=1) == "Train: unknown key 'stpes'; did you mean 'steps'?"
    assert make(Train, steps=True) == "Train: steps: expected a valid integer, got true (boolean)"
    assert make(Needs, widht=1) == "Needs: unknown key 'widht'; did you mean 'width'? (and 1 more)"
    assert make(Train, optimizer={"kindd": "sgd"}).startswith("Train: unknown key 'optimizer.kindd'; did you mean")


# --- files


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nsteps: 2\nsteps: 3\n", " line 3: the key 'steps' stands twice"),
        ("optimizer:\n  kind: sgd\n  kind: sgd\n", " line 3: the key 'kind' stands twice"),
        ("3: x", " line 1: the key 3 (integer) is not a name"),
        ("[a]: x", " line 1: the key "),
        ("steps: [1\nlabel: x", " line 2: "),
        ("a: &x [1]\nb: *x", " line 1: anchors"),
        ("a: 1\n<<: *x", " line 2: anchors"),
        ("steps: !!int 3", " line 1: tags"),
        ("- 1", " expected `key: value` lines, got [1] (list)"),
        ("just words", ' expected `key: value` lines, got "just words" (string)'),
        ("a: 1\n---\nb: 2", " line 2: "),
        ("a: \x07", " "),
        ("a: [" * 40, " line 1: nested deeper than 32 levels"),
        (b"\xff\xfe\xfa", " not UTF-8 text"),
        ("#" * (MAX_FILE_BYTES + 1), " over 1,048,576 bytes"),
        ("base: [a.yaml]", " `base:` must be the name of one YAML file, got"),
        ("base: absent.yaml", " `base:` names"),
        ("base: a.txt", " `base:` must name a .yaml file inside"),
        ("base: ../a.yaml", " `base:` must name a .yaml file inside"),
        ("base: /etc/a.yaml", " `base:` must name a .yaml file inside"),
        ('base: "a\\0.yaml"', " `base:` names"),
    ],
)
def test_a_bad_file_is_one_line(write, text, said):
    path = write("bad.yaml", text)
    assert message(load_config, Train, path).startswith(f"{path}:{said}")


def test_a_billion_laughs_are_not_laughed(write):
    lines = ["a0: &a0 [ha, ha]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    assert "anchors" in message(load_config, Train, write("lol.yaml", "\n".join(lines)))


def test_missing_files_and_folders(tmp_path):
    assert message(load_config, Train, tmp_path / "a.yaml").endswith(
        "cannot read the config: No such file or directory"
    )
    assert message(load_config, Train, tmp_path).endswith("not a file; expected a YAML file")


def test_bases_chain_across_the_configs_tree(write):
    write("configs/common.yaml", "steps: 1\noptimizer: {kind: sgd, learning_rate: 1}")
    write("configs/study/middle.yaml", "base: ../common.yaml\noptimizer: {learning_rate: 2}\nstages: [{}, {}]")
    path = write("configs/study/top.yaml", "base: middle.yaml\nlabel: top\nstages: [{kind: sgd}]")
    expected = Train(steps=1, label="top", optimizer=Adam(kind="sgd", learning_rate=2), stages=(Adam(kind="sgd"),))
    assert load_config(Train, path) == expected


def test_a_base_does_not_leave_the_tree(write, tmp_path):
    outside = write("outside.yaml", "steps: 1")
    path = write("configs/top.yaml", "base: ../outside.yaml")
    assert "inside" in message(load_config, Train, path)
    (tmp_path / "configs" / "link.yaml").symlink_to(outside)
    assert "inside" in message(load_config, Train, write("configs/top.yaml", "base: link.yaml"))


def test_bases_in_a_circle(write, tmp_path):
    path = write("a.yaml", "base: b.yaml")
    write("b.yaml", "base: c.yaml")
    write("c.yaml", "base: a.yaml")
    assert "leads in a circle (a.yaml -> b.yaml -> c.yaml -> a.yaml)" in message(load_config, Train, path)
    assert "circle" in message(load_config, Train, write("self.yaml", "base: ./self.yaml"))
    (tmp_path / "x.yaml").symlink_to(tmp_path / "y.yaml")
    (tmp_path / "y.yaml").symlink_to(tmp_path / "x.yaml")
    assert "cannot read" in message(load_config, Train, tmp_path / "x.yaml")


def test_a_chain_of_bases_is_bounded(write):
    for i in range(40):
        write(f"{i}.yaml", f"base: {i + 1}.yaml")
    assert "more than 32 files" in message(load_config, Train, write("0.yaml", "base: 1.yaml"))


# --- the objects


def test_configs_are_frozen_and_hash():
    stages: Any = [Adam(), {"kind": "sgd"}]
    config = Train(stages=stages)
    assert isinstance(config.stages, tuple)
    assert hash(config) == hash(Train(stages=(Adam(), Adam(kind="sgd"))))
    assert hash(Adam(learning_rate=1)) == hash(Adam(learning_rate=1.0))
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, "steps", 3)  # noqa: B010


@pytest.mark.parametrize("copy", [replace, lambda config, **changes: config.model_copy(update=changes)])
def test_a_copy_with_changes_is_validated(copy):
    config = Train(label="x")
    assert copy(config, steps=3) == Train(label="x", steps=3)
    assert config.steps == 10
    assert "steps: expected a valid integer" in message(lambda: copy(config, steps="3"))
    assert "did you mean 'steps'" in message(lambda: copy(config, step=3))
    assert copy(config, stages=[{"kind": "sgd"}]).stages == (Adam(kind="sgd"),)


def test_the_schema_describes_what_a_file_may_hold():
    schema = json_schema(Train)
    json.dumps(schema)
    assert list(schema["properties"])[:2] == ["base", "steps"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Adam"]["properties"]["learning_rate"]["description"] == "Peak of the schedule, per step."


@given(
    steps=st.integers(0, 2**63),
    label=st.text(),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    betas=st.lists(st.floats(-1, 1), max_size=3),
    either=st.sampled_from([None, Named(name="null"), Adam()]),
)
@example(steps=0, label="1e-3", rate=1e-300, betas=[], either=None)
@example(steps=0, label="no", rate=5e-324, betas=[1e-7], either=None)
@example(steps=0, label="2024-01-01", rate=-0.0, betas=[], either=None)
def test_to_yaml_reads_back_equal(tmp_path_factory, steps, label, rate, betas, either):
    config = Train(steps=steps, label=label, optimizer=Adam(learning_rate=rate, betas=betas), either=either)
    path = tmp_path_factory.mktemp("config") / "a.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(Train, path) == config


def test_to_yaml_is_short_and_plain():
    assert to_yaml(Adam(learning_rate=3e-4)) == "learning_rate: 0.0003\nkind: adam\nbetas: [0.9, 0.95]\n"
    assert dump_yaml({"a": "yes", "b": "1e-3"}) == "a: 'yes'\nb: '1e-3'\n"


@given(st.text(alphabet="ab:-?[]{},#&*!|>'\"%@`\n\t \\Ux0.e1~<", max_size=40))
def test_no_text_gets_past_the_error_type(text):
    with contextlib.suppress(UserError):
        parse_yaml(text, "text")
