"""The service with its pages in a separate process, with default limits, for `tests/load.py`.

python -m tests.load_server DATABASE CONTENTS
"""

import sys

from fairturn import Queue
from fairturn.contents.local import Folder
from fairturn.dashboard.routes import install
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from fairturn.service.server import ListenAddress, Server, tune_interpreter


def tell(url: str) -> None:
    tune_interpreter()  # as `fairturn serve` does
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def main() -> None:
    with Queue(sys.argv[1], contents=Folder(sys.argv[2])) as queue:
        # Without a rate: an attacker that stays below it has a minute to send its requests in.
        app = make_app(queue, ServiceLimits(rate="1000000000/minute"))
        install(app)
        address = ListenAddress(port=0)
        Server(app, address, on_started=tell).run()


if __name__ == "__main__":
    main()
