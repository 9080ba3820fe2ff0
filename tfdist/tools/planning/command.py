"""`python -m tfdist plan ...`: whether a model fits on some devices, how fast a step is, and which plan is best."""

import argparse
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from tfdist.tools.launch.arguments import add_command, output_file, positive_int, publish
from tfdist.tools.planning.builders import arguments_of, named_builder
from tfdist.tools.planning.data_sheets import DATA_SHEETS
from tfdist.tools.planning.decoder import decoder_builder
from tfdist.tools.planning.known_models import KNOWN_MODELS, known_model
from tfdist.tools.planning.planner import plan

_DESCRIPTION = """\
Traces the training step of a model without data and without memory for its weights, and says for every way to spread it over
the devices what the fullest device holds and how long a step takes: what fits, the fastest first, what does not and by how much,
and the line of Python that runs the best plan."""

_EPILOG = """\
examples:
  python -m tfdist plan --model mypackage.models:build --devices 16 --memory 80GB --batch-size 256
  python -m tfdist plan --config llama3-70b --sequence-length 4096 --devices 64 --hosts 8 --memory 80GB --batch-size 512
  python -m tfdist plan --model keras_hub.models.Llama3Backbone --arguments '{"vocabulary_size": 128256, ...}' ...
  python -m tfdist plan ... --calibration hardware.json     # times of your devices: python -m tfdist calibrate

exit code: 0 when a plan fits, 1 when none does; 2 for wrong arguments."""


def add_plan(commands: Any) -> None:
    """Adds the command to those of the program."""
    summary = "say whether a model fits, how fast a step is, and which plan is best"
    parser = add_command(commands, "plan", _plan, help=summary, description=_DESCRIPTION, epilog=_EPILOG)
    add, model = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="NAME", help='"package.module:build" or "package.Class": makes a built Keras model')
    model.add_argument("--config", metavar="NAME", help=f"a known decoder: {', '.join(KNOWN_MODELS)}")
    add("--arguments", metavar="JSON", help="keyword arguments of --model, as a JSON object")
    add("--sequence-length", type=positive_int, metavar="N", help="tokens of an example, where the model leaves it open")
    add("--devices", type=positive_int, required=True, metavar="N", help="devices in all")
    add("--hosts", type=positive_int, default=1, metavar="H", help="machines, with as many devices each (default: 1)")
    add("--memory", required=True, metavar="SIZE", help='of each device, such as "80 GB", 80GiB or 8e10')
    add("--batch-size", type=positive_int, required=True, metavar="B", help="examples of a step, all devices together")
    add("--optimizer", metavar="NAME", help="such as adamw (default: that of the compiled model, or adam)")
    hardware = parser.add_mutually_exclusive_group()
    hardware.add_argument("--hardware", metavar="NAME", help=f"a data sheet: {', '.join(DATA_SHEETS)} (default: h100)")
    hardware.add_argument("--calibration", metavar="FILE", type=pathlib.Path, help="what `python -m tfdist calibrate` measured")
    add("--zero-stages", type=int, nargs="+", choices=range(4), default=(0, 1, 2, 3), metavar="Z", help="some of 0 to 3")
    add("--compress", nargs="+", default=[], metavar="NAME", help="consider gradients in int8, int4, top_k or bfloat16")
    add(
        "--compress-parameters", nargs="+", default=[], metavar="NAME", help="consider parameters in int8 or bfloat16, at stage 3"
    )
    add("--tokens", metavar="D", help="of a whole training, such as 1.4T: what it takes")
    add("--flops", metavar="C", help="of a whole training, such as 2e23: how many tokens these are")
    add(
        "--dry-run",
        action=argparse.BooleanOptionalAction,
        help="confirm the best plan by tracing a rank of its strategy (default: for models of up to 400 weights)",
    )
    add("--top", type=positive_int, default=5, metavar="N", help="how many plans to show (default: 5)")
    add("--png", type=pathlib.Path, metavar="FILE", help="draw their memory to this file; needs matplotlib")
    add("--json", type=output_file, metavar="FILE", help="write all plans as JSON; -: to the standard output, and no text")


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        plans = plan(
            _builder(args),
            devices=args.devices,
            memory_per_device=args.memory,
            batch_size=args.batch_size,
            optimizer=args.optimizer,
            hosts=args.hosts,
            hardware=args.calibration or args.hardware,
            sequence_length=args.sequence_length,
            zero_stages=tuple(args.zero_stages),
            gradient_compressions=(None, *args.compress),
            parameter_compressions=(None, *args.compress_parameters),
            tokens=args.tokens,
            flops=args.flops,
            dry_run=args.dry_run,
            shown=args.top,
            progress=lambda line: print(f"{line} ...", file=sys.stderr, flush=True),
        )
        if args.png:
            plans.draw(args.png)
    except (ValueError, NotImplementedError, ImportError) as error:
        parser.error(str(error))
    publish(plans, args.json)
    return 0 if plans.fitting else 1


def _builder(args: argparse.Namespace) -> Callable[[], Any]:
    if args.config:
        return decoder_builder(known_model(args.config), args.sequence_length)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return named_builder(args.model, arguments_of(args.arguments) if args.arguments else None)
