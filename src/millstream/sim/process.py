"""The engine process of `serve --device sim`, `python -m millstream.sim.process`: real but for its workers."""

from __future__ import annotations

import sys

from millstream.engine.process import main
from millstream.sim.device import make_serving_executor

if __name__ == "__main__":
    sys.exit(main(lambda config, _: make_serving_executor(config, hardware=config.parallel.hardware)))
