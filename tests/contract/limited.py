"""A server that may have few descriptors: `python -m tests.contract.limited serve ...`, as after `ulimit -n 1024`."""

from __future__ import annotations

import resource

from quire.cli import main

LIMIT = 1024

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    main()
