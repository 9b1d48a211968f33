"""The composition root: every choice is made here, by which object is passed.

`engine` builds an engine in this process (imports torch), `text` what the rim needs, `server` the server,
`engine_child` is the engine's own process. They are apart so that a server never imports torch.
"""
