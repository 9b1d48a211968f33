"""The `quire` command. Each subcommand's module is imported when it is called, so that the rest starts at once."""

from __future__ import annotations

import click

from quire.cli.base import LazyGroup, Root


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Callback of `--version`."""
    if wanted:
        command = main.get_command(context, "version")
        assert command is not None
        context.invoke(command)
        context.exit()


main = Root(
    name="quire",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print versions.",
        )
    ],
    help="Quire: an LLM inference engine and OpenAI-compatible server that is small enough to be read.",
    members={
        "serve": ("quire.cli.serve", "Serve a model over HTTP, in OpenAI's API."),
        "run": ("quire.cli.chat:run", "Ask a model once, or chat with it."),
        "generate": ("quire.cli.chat:generate", "Print one completion."),
        "chat": ("quire.cli.chat", "Chat with a model, in this process or on a server."),
        "pull": ("quire.cli.models:pull", "Download a model, and check it."),
        "list": ("quire.cli.models:list_models", "List the models that are kept on this machine."),
        "rm": ("quire.cli.models:rm", "Remove a downloaded model."),
        "quantize": ("quire.cli.late:quantize", "Write a model as a GGUF file, in 4 to 16 bits a weight."),
        "bench": LazyGroup(
            name="bench",
            prefix="bench ",
            help="Benchmark a server, an engine or this machine.",
            short_help="Benchmark a server, an engine or this machine.",
            members={
                "latency": ("quire.bench.latency", "Measure the time of one batch."),
                "throughput": ("quire.bench.throughput", "Measure requests and tokens a second of many prompts."),
                "startup": ("quire.bench.startup", "Measure the time from process start to the first token."),
                "serve": ("quire.bench.serve", "Load-test a server that runs, by users, by rate, or along a trace."),
                "report": ("quire.bench.report", "Draw what load tests found, several side by side."),
                "engine": ("quire.bench.engine", "Measure the engine alone, on a synthetic executor."),
                "cpu": ("quire.bench.late:cpu", "Measure this CPU beside other engines."),
            },
        ),
        "export-onnx": ("quire.cli.executor:export_onnx", "Write a model as graphs for ONNX Runtime."),
        "executor": ("quire.cli.executor", "Run a model's steps for an engine elsewhere, over gRPC."),
        "inspect": ("quire.cli.late:inspect", "Print what a model is, from headers alone."),
        "plan": ("quire.cli.late:plan", "Print the memory that serving a model takes, and what makes it fit."),
        "simulate": ("quire.bench.simulate", "Simulate a deployment under a load: how many GPUs does it take?"),
        "calibrate": ("quire.bench.late:calibrate", "Measure what steps take on this machine, for `quire simulate`."),
        "check": ("quire.cli.late:check", "Check that a model, or a tiny one of each family, loads and answers."),
        "diff": ("quire.cli.late:diff", "Compare a model's activations with transformers', layer by layer."),
        "verify": ("quire.cli.late:verify", "Check that answers do not depend on load, cache, chunks or drafts."),
        "replay": ("quire.cli.replay", "Make a recording's decisions again, and say why each was made."),
        "demo": ("quire.cli.demo", "Show the engine's loop, step by step."),
        "doctor": ("quire.cli.late:doctor", "Check this machine: what is missing, and how to fix it."),
        "config": ("quire.cli.show", "Print the effective settings and where each came from."),
        "version": ("quire.cli.show:show_version", "Print versions."),
    },
)
