"""Training of the model that ships with Quire, and of models like it on any plain text.

Needs torch, numpy, tokenizers and safetensors (matplotlib for the plot); it does not import the engine,
so a model can be trained on a machine where only these four are installed. Start at README.md.
"""
