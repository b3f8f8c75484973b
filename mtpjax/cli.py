"""The command line: `mtpjax demo | generate | train | config`.

The only place that reads the environment and the arguments. Heavy imports happen inside the verbs, so that help comes
at once. Bad input is one line on standard error and exit code 2; Ctrl-C is 130; a fault of ours keeps its traceback.
Results go to standard output, progress and figures about it to standard error.
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mtpjax.errors import UserError

if TYPE_CHECKING:
    from mtpjax.config import Config
    from mtpjax.decoding.generate import Stream
    from mtpjax.decoding.result import Generation
    from mtpjax.io.lm import LM

CONFIGS = {
    "demo": ("mtpjax.evaluation.demo", "DemoConfig"),
    "train": ("mtpjax.training.config", "TrainConfig"),
}
"""Config classes by name: module and class."""

ACCEPTED = "\x1b[30;42m"
PLAIN = "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _replace_what_cannot_be_printed()
    try:
        args = _parse(arguments)
        code = args.verb(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _forget_stdout()
        return 1


def demo(args: argparse.Namespace) -> int:
    """`mtpjax demo`."""
    from rich.console import Console

    from mtpjax.config import load_config
    from mtpjax.evaluation import demo as room
    from mtpjax.evaluation.terminal import show

    config = load_config(room.DemoConfig, args.config, args.overrides)
    _prepare_jax(args)
    console = Console(highlight=False)
    results, folder = room.run_to_folder(
        config,
        args.model,
        args.runs / "demo",
        command=args.command,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    show(results, console)
    console.print(f"\nreport: {folder / 'report.html'}", soft_wrap=True)
    return 0


def generate(args: argparse.Namespace) -> int:
    """`mtpjax generate`."""
    prompt = _prompt(args)
    drafter = args.drafter or ("ngram" if args.depth else None)
    from mtpjax.decoding.generate import stream
    from mtpjax.decoding.request import find_drafter, settings_per_row
    from mtpjax.io.lm import load
    from mtpjax.quant.policy import find_precision

    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    settings = {name: getattr(args, name) for name in names}
    find_precision(args.precision)
    find_drafter(drafter, args.depth)
    settings_per_row(1, **settings)  # whatever needs no model is refused before one is loaded
    _prepare_jax(args)
    lm = load(args.model, precision=args.precision)
    run = stream(lm, prompt, drafter=drafter, depth=args.depth, chat=args.chat, **settings)
    if args.json:
        return _print_json(lm, run)
    for text in _coloured(lm, run) if _colours() else _chunks(run):
        print(text, end="", flush=True)
    print()
    out = cast("Generation", run.result)
    print(f"[{out.stats}, ended by {out.finish_reason[0]}]", file=sys.stderr)
    return 0


def train(args: argparse.Namespace) -> int:
    """`mtpjax train`."""
    from mtpjax.config import load_config
    from mtpjax.training.config import TrainConfig
    from mtpjax.training.fit import train as fit

    config = load_config(TrainConfig, args.config, args.overrides)
    _prepare_jax(args)
    done = fit(config, run_dir=args.runs / "train" / args.config.stem)
    print(done.message)
    return 0 if done.finished else 130


def config_show(args: argparse.Namespace) -> int:
    """`mtpjax config show`."""
    from mtpjax.config import load_config, to_yaml

    named = args.config if args.config in CONFIGS else None
    path = None if named else Path(args.config)
    cls = _config_class(named) if named else _class_for(Path(args.config))
    print(to_yaml(load_config(cls, path, args.overrides)), end="")
    return 0


def config_schema(args: argparse.Namespace) -> int:
    """`mtpjax config schema`."""
    from mtpjax.config import json_schema

    if args.name is not None and args.name not in CONFIGS:
        raise UserError(f"unknown config {args.name!r}, expected one of: {', '.join(CONFIGS)}")
    names = CONFIGS if args.name is None else [args.name]
    schemas = {name: json_schema(_config_class(name)) for name in names}
    print(json.dumps(schemas if args.name is None else schemas[args.name], indent=2))
    return 0


def _config_class(name: str) -> "type[Config]":
    module, cls = CONFIGS[name]
    return getattr(importlib.import_module(module), cls)


def _class_for(path: Path) -> "type[Config]":
    """The config class that reads the file; where none does, the one that knows most of its keys, for its complaint."""
    from mtpjax.config import load_config
    from mtpjax.config.dialect import read_yaml

    classes = [_config_class(name) for name in CONFIGS]
    for cls in classes:
        with contextlib.suppress(UserError):
            load_config(cls, path)
            return cls
    values = read_yaml(path)
    keys = set(values) if isinstance(values, dict) else set()
    return max(classes, key=lambda cls: len(keys & set(cls.model_fields)))


def _prompt(args: argparse.Namespace) -> str:
    """The prompt given on the command line, in a file, or (`-`) on standard input."""
    if args.prompt is not None:
        text, source = args.prompt, "--prompt"
    else:
        source = "standard input" if args.prompt_file == "-" else args.prompt_file
        try:
            data = sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()
            text = data.decode("utf-8")
        except OSError as error:
            raise UserError(f"{source}: can't read the prompt ({error.strerror or error})") from None
        except UnicodeDecodeError:
            raise UserError(f"{source}: the prompt isn't UTF-8 text") from None
        text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise UserError(f"the prompt ({source}) is empty: expected some text")
    return text


def _chunks(run: "Stream") -> Iterator[str]:
    """The text as it comes; while the first part is awaited (compiling, prefill) progress is shown."""
    from mtpjax.progress import progress

    chunks = iter(run)
    with progress("preparing"):
        first = next(chunks, "")
    yield first
    yield from chunks


def _coloured(lm: "LM", run: "Stream") -> Iterator[str]:
    """The text as it comes, accepted drafts coloured, with nothing in it that could steer the terminal."""
    from mtpjax.evaluation.terminal import printable

    decoder, done = lm.tokenizer.stream(continuation=True), 0
    for _ in _chunks(run):
        for token, drafted in zip(run.ids[done:], run.drafted[done:], strict=True):
            text = printable(decoder.push([token]))
            yield f"{ACCEPTED}{text}{PLAIN}" if drafted and text else text
        done = len(run.ids)
    yield printable(decoder.push(run.ids[done:]) + decoder.flush())


def _print_json(lm: "LM", run: "Stream") -> int:
    from mtpjax.evaluation.throughput import figures

    for _ in _chunks(run):
        pass
    out = cast("Generation", run.result)
    values = {
        "model": lm.name,
        "precision": lm.precision,
        "text": out.text[0],
        "ids": out.ids[0],
        "drafted": out.drafted[0],
        "finish_reason": out.finish_reason[0],
        "stats": figures(out.stats),
    }
    print(json.dumps(values))
    return 0


def _colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _prepare_jax(args: argparse.Namespace) -> None:
    if args.compile_cache:
        from mtpjax.compile_cache import keep_compiled

        home = os.environ.get("XDG_CACHE_HOME", "")
        keep_compiled(Path(home) / "mtpjax" / "jax" if os.path.isabs(home) else None)


def _replace_what_cannot_be_printed() -> None:
    """An output that isn't UTF-8 shows `?` where it lacks a character, and does not end the program."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        cast(Any, sys.stdout).reconfigure(errors="replace")


def _forget_stdout() -> None:
    """The reader has gone: what is left in the buffer must not be tried again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    """Complains as everything else does: in one line, by exception."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The arguments as attributes; unlike with argparse alone, `key=value` may stand behind options too."""
    parser = _parser()
    args, extra = parser.parse_known_args(arguments)
    known = getattr(args, "overrides", None)
    strange = [text for text in extra if known is None or text.startswith("-")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if known is not None:
        args.overrides = [*known, *extra]
    args.command = ["mtpjax", *arguments]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mtpjax",
        description="Speculative decoding, multi-token prediction and FP8 for language models in JAX.",
        epilog="`mtpjax demo` shows it all on a real model.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    _demo_parser(_verb(verbs, "demo", demo, "generate plainly and speculatively, in bf16 and FP8, and measure it all"))
    _generate_parser(_verb(verbs, "generate", generate, "continue a prompt"))
    _train_parser(_verb(verbs, "train", train, "train a model from a config, or go on with its run"))
    configs = verbs.add_parser("config", help="show configs and their schemas", allow_abbrev=False)
    actions = configs.add_subparsers(metavar="ACTION", required=True, parser_class=_Parser)
    show = _verb(actions, "show", config_show, "print a config with every default filled in")
    show.add_argument("config", metavar="CONFIG", help=f"a YAML file, or a name: {', '.join(CONFIGS)}")
    _add_overrides(show)
    schema = _verb(actions, "schema", config_schema, "print the JSON schema of a config, for editors")
    schema.add_argument("name", metavar="NAME", nargs="?", help=f"{' or '.join(CONFIGS)}; all of them without it")
    return parser


def _verb(verbs: Any, name: str, run: Callable[[argparse.Namespace], int], says: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".", allow_abbrev=False)
    parser.set_defaults(verb=run)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        try:
            version = importlib.metadata.version("mtpjax")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed: run from its folder)"
        print(f"mtpjax {version}")
        parser.exit()


def _demo_parser(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_runs(parser, "DIR/demo/<time>/")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a YAML file, such as configs/demo.yaml")
    _add_overrides(parser)
    _add_compile_cache(parser)


def _generate_parser(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    given.add_argument("--prompt-file", metavar="FILE", help="a file with the text (- for standard input)")
    _add_model(parser)
    parser.add_argument("--chat", action="store_true", help="put the model's chat template around the prompt")
    parser.add_argument("--precision", default="bf16", help="f32, bf16, f16 or fp8 (default: bf16)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="the most tokens (default: 128)")
    parser.add_argument(
        "--drafter", metavar="NAME", help="who drafts: ngram (default: nobody, unless --depth is given)"
    )
    parser.add_argument("--depth", type=int, metavar="N", help="drafted tokens per step; 0 is plain decoding")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample among the K likeliest (default: off)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (default: 1, off)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="least share of the top (default: 0, off)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampler (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: text, ids, finish_reason, stats")
    _add_compile_cache(parser)


def _train_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, such as configs/tiny_qat.yaml")
    _add_overrides(parser)
    _add_runs(parser, "DIR/train/<name of the config>/; a run found there goes on")
    _add_compile_cache(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="a .gguf file or a Hugging Face folder (default: SmolLM2-135M)"
    )


def _add_runs(parser: argparse.ArgumentParser, where: str) -> None:
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help=f"results go to {where} (default: runs)"
    )


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values laid over the config, such as fp8.prompts=1"
    )


def _add_compile_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-compile-cache",
        dest="compile_cache",
        action="store_false",
        help="keep no compiled programs for the next start",
    )
