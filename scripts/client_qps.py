#!/usr/bin/env python3
"""Load tester of the inference service, as ``torchpipe load``: closed or open loop, one connection per client.

    python scripts/client_qps.py --img_dir DIR --port 8888 --request_client 20 --request_batch 1 --total_number 10000
    python scripts/client_qps.py --img_dir DIR --rate 200 --arrivals poisson --duration 30 --slo-p99 50 --html run.html
    python scripts/client_qps.py --img_dir DIR --slo-p99 50 --search
    python scripts/client_qps.py --img_dir DIR --sweep clients=1,2,5,10,20
    python scripts/client_qps.py compare A.json B.json

In a closed loop a client sends its next call when the last one is answered. In an open loop calls are due at times that
do not depend on the answers, and latency counts from then: a server that stalls is charged for all calls that would
have been sent meanwhile, not only for those that were (coordinated omission). Latency from the actual send is reported
beside it.

Exit status: 0 every image has a result, the run is stable and the SLO met; 1 it could not run; 2 some images have no
result, or an open loop was unstable (or the arguments are wrong); 3 the SLO was missed; 130 interrupted.
"""

from __future__ import annotations

import sys

from torchpipe_py.tools.load.run import main

if __name__ == "__main__":
    sys.exit(main(program="client_qps.py"))
