"""Several engines behind one server: each a replica of a Ray Serve deployment.

`client` is how the server sees them: one `EngineClient`, so that everything above it is the server of one engine.
`engine_replica` runs in each replica, `router` chooses one for a request, `autoscaler` says how many there are,
`application` makes the deployment (`quire.replicas.application:app` for `serve deploy`), and `local` runs it on this
machine. All but `client` need the extra `ray`.
"""
