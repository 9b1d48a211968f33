"""The loss curves of trained models as a picture: `python -m training.plot --out FILE.png FOLDER...`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def plot(folders: list[Path], out: Path) -> None:
    """One panel a model: the loss it was trained on, and bits a byte on the validation stories."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(folders), figsize=(5.5 * len(folders), 3.8), squeeze=False)
    for folder, panel in zip(folders, panels[0], strict=True):
        record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        curve, sizes = record["curve"], record["settings"]["model"]
        title = f"{sizes['num_hidden_layers']} layers of width {sizes['hidden_size']}"
        panel.plot(curve["steps"], curve["train_loss"], color="tab:gray", label="training loss (nats a token)")
        panel.set(title=title, xlabel="step", ylabel="training loss (nats a token)")
        bits = panel.twinx()
        bits.plot(curve["validation_steps"], curve["validation_bits"], color="tab:blue", marker="o", markersize=3)
        bits.set_ylabel("validation stories (bits a byte)", color="tab:blue")
        best = min(curve["validation_bits"])
        bits.axhline(best, color="tab:blue", linestyle=":", linewidth=1)
        bits.annotate(f"{best:.3f}", (curve["validation_steps"][-1], best), (0, 6), textcoords="offset points")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="folders that train.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    plot(options.folders, options.out)


if __name__ == "__main__":
    main()
