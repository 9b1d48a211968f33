"""The `quire` command. Each subcommand's module is imported when it is called, so that the rest starts at once."""

from __future__ import annotations

from quire.cli.lazy import LazyGroup, Root

main = Root(
    name="quire",
    help="Quire: an LLM inference engine and OpenAI-compatible server that is small enough to be read.",
    members={
        "serve": ("quire.cli.serve", "Serve a model over HTTP, in OpenAI's API."),
        "generate": ("quire.cli.generate", "Print one completion."),
        "chat": ("quire.cli.chat", "Talk to a model, here or behind a server's address."),
        "bench": LazyGroup(
            name="bench",
            help="Measure.",
            short_help="Measure.",
            members={
                "engine": ("quire.bench.engine", "Measure the engine alone, on a synthetic executor."),
                "serve": ("quire.bench.serve", "Load-test a server that runs, by users, by rate, or along a trace."),
                "report": ("quire.bench.report", "Draw what load tests found, several side by side."),
                "gpu": ("quire.bench.gpu", "Measure workloads of real size on this GPU, beside a recorded peer."),
                "speculate": ("quire.bench.speculate", "Measure a draft model of real size on this GPU, on and off."),
                "drafts": ("quire.bench.drafts", "Measure speculation with the embedded model, on and off."),
                "http": ("quire.bench.http", "Measure a server on this GPU from several client processes."),
                "front": ("quire.bench.front", "Measure what a streamed token costs on its way, by simulated steps."),
                "batches": ("quire.bench.batches", "Measure what a batch in the gaps costs those who ask meanwhile."),
                "pair": ("quire.bench.pair", "Measure a server directly and through Quire, side by side."),
                "viewers": ("quire.bench.viewers", "Measure what watching the live page costs those being answered."),
                "structured": ("quire.bench.structured", "Measure what JSON schemas cost, on the embedded model."),
                "cpu": ("quire.bench.cpu", "Measure decode on this CPU, beside transformers."),
                "checkpoint": ("quire.bench.checkpoint", "Measure loading a checkpoint, beside what the disk can do."),
                "ladder": ("quire.bench.ladder", "Add one optimisation at a time and measure each on its workload."),
                "logits": ("quire.bench.logits", "How far logits of real-size models are off."),
                "profile": (
                    "quire.bench.profile",
                    "Profile steps: operators, TFLOP/s, and the share of the machine's.",
                ),
                "paging": ("quire.bench.paging", "Compare K/V memory in one piece a sequence and in pages."),
                "doors": ("quire.bench.doors", "Measure decode through each executor, beside our own."),
                "kernels": ("quire.bench.kernels", "Check and time every kernel on a CUDA device."),
            },
        ),
        "export-onnx": ("quire.cli.export_onnx", "Write a model as graphs for ONNX Runtime."),
        "executor": ("quire.cli.executor", "Run a model's steps for an engine elsewhere, over gRPC."),
        "inspect": ("quire.cli.inspect", "Print what a model is, from headers alone."),
        "plan": ("quire.cli.plan", "Print what serving a model takes, and the smallest change that fits."),
        "diff": ("quire.cli.diff", "Compare a model's activations with transformers', layer by layer."),
        "verify": ("quire.cli.verify", "Prove that answers do not depend on load, cache, chunks or drafts."),
        "replay": ("quire.cli.replay", "Make a recording's decisions again, and say why each was made."),
        "demo": ("quire.sim.demo", "Show the engine's loop, step by step."),
        "config": ("quire.cli.show", "Print the effective settings and where each came from."),
        "version": ("quire.cli.version", "Print versions."),
    },
)
