"""The composition root: every choice is made here, by which object is passed.

`engine` builds an engine in this process (imports torch), `text` what the rim needs, `front` the server, `child` is
the engine's own process. They are apart so that a front never imports torch.
"""
