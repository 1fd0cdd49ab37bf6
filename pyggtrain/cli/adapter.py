"""`pyggtrain adapter info|scale|add|to-peft|from-peft ...`: look at adapters, combine and convert them."""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pyggtrain.cli.merge import scaled
from pyggtrain.cli.tables import facts_table, table
from pyggtrain.cli.train import say

if TYPE_CHECKING:
    from pyggtrain.adapters import AdapterFile


def run(arguments: Sequence[str]) -> int:
    """Do one of the sub-commands; return 0."""
    parsed = _parser().parse_args(arguments)

    from pyggtrain.adapters import arithmetic, gguf_adapter

    if parsed.command == "info":
        _show(gguf_adapter.load(parsed.adapter))
    elif parsed.command == "scale":
        made = arithmetic.scale(gguf_adapter.load(parsed.adapter), parsed.factor)
        gguf_adapter.write(parsed.output, made, overwrite=parsed.overwrite)
    elif parsed.command == "add":
        _add(parsed)
    else:
        _convert(parsed)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyggtrain adapter", description="Look at adapters, combine and convert them.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="show what an adapter changes")
    info.add_argument("adapter", help="GGUF adapter")
    scale = commands.add_parser("scale", help="make an adapter stronger or weaker; exact")
    scale.add_argument("adapter", help="GGUF adapter")
    scale.add_argument("factor", type=float, help="how many times as strong")
    add = commands.add_parser("add", help="sum adapters by joining their ranks; exact unless --rank cuts them")
    add.add_argument("adapters", nargs="+", metavar="ADAPTER[:SCALE]", help="GGUF adapters of one model")
    add.add_argument(
        "--rank", type=int, help="cut the sum to this rank by SVD, which loses something; it says how much"
    )
    to_peft = commands.add_parser("to-peft", help="write a PEFT folder for the original Hugging Face model")
    from_peft = commands.add_parser("from-peft", help="read a PEFT folder")
    for command in (to_peft, from_peft):
        command.add_argument("model", help="GGUF file of the base model, in any quantisation")
    to_peft.add_argument("adapter", help="GGUF adapter")
    from_peft.add_argument("folder", help="holds adapter_config.json and adapter_model.safetensors")
    to_peft.add_argument(
        "--prefix",
        default="model",
        help='module that holds the layers, such as "model.language_model" (default: model)',
    )
    to_peft.add_argument("--base-model", metavar="NAME", help="Hugging Face model, written into adapter_config.json")
    for command in (scale, add, from_peft):
        command.add_argument("output", help="GGUF adapter to write")
    to_peft.add_argument("output", help="folder to write")
    for command in (scale, add, to_peft, from_peft):
        command.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser


def _show(adapter: "AdapterFile") -> None:
    from pyggtrain.adapters.arithmetic import update_norm

    kinds: dict[str, list[str]] = defaultdict(list)
    for name in adapter.pairs:
        kinds[re.sub(r"^blk\.\d+\.", "", name)].append(name)
    rows = [["weights", "pairs", "rank", "factor", "parameters", "norm of the update"]]
    for kind, names in kinds.items():
        pairs = [adapter.pairs[name] for name in names]
        rows.append(
            [
                kind,
                str(len(names)),
                _span(pair[1].shape[-1] for pair in pairs),
                _span(adapter.scale(name) for name in names),
                f"{sum(half.numel() for pair in pairs for half in pair):,}",
                _span(update_norm(adapter, name) for name in names),
            ]
        )
    alpha = f"{adapter.alpha:g}" if adapter.alpha else "none (every factor is 1)"
    facts = {"file": str(adapter.path), "architecture": adapter.architecture, "alpha": alpha}
    if "version" in adapter.provenance:
        facts["trained with"] = f"pyggtrain {adapter.provenance['version']}"
    if "base.header_sha256" in adapter.provenance:
        facts["base"] = f"header {adapter.provenance['base.header_sha256'][:12]}"
    say(facts_table(facts), "", table(rows))


def _span(numbers: Iterable[float]) -> str:
    """One number, or the lowest and highest of several."""
    found = sorted(numbers)
    lowest, highest = found[0], found[-1]
    return f"{lowest:.4g}" if lowest == highest else f"{lowest:.4g} to {highest:.4g}"


def _add(parsed: argparse.Namespace) -> None:
    from pyggtrain.adapters import arithmetic, gguf_adapter

    parts = [scaled(text) for text in parsed.adapters]
    total = arithmetic.add([gguf_adapter.load(path) for path, _ in parts], [factor for _, factor in parts])
    if parsed.rank is not None:
        reduction = arithmetic.reduce_rank(total, parsed.rank)
        total = reduction.adapter
        say(
            f"Cut to rank {parsed.rank}: {100 * reduction.relative_error:.2f} % of the update's norm is lost, "
            f"most in {reduction.worst_pair}: {100 * reduction.worst_relative_error:.2f} %"
        )
    gguf_adapter.write(parsed.output, total, overwrite=parsed.overwrite)


def _convert(parsed: argparse.Namespace) -> None:
    from pyggtrain.adapters import gguf_adapter, peft
    from pyggtrain.gguf import GGUFFile

    base = GGUFFile.open(parsed.model)
    if parsed.command == "from-peft":
        gguf_adapter.write(parsed.output, peft.from_peft(parsed.folder, base), overwrite=parsed.overwrite)
        return
    peft.to_peft(
        gguf_adapter.load(parsed.adapter),
        base,
        parsed.output,
        prefix=parsed.prefix,
        base_model=parsed.base_model,
        overwrite=parsed.overwrite,
    )
