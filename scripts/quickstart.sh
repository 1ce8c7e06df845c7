#!/usr/bin/env bash
# The main job on real input: sets .venv up, serves configs/demo.toml, sends held-out JPEGs through Thrift, prints a load
# test and the accuracy, stops the service.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=${VENV:-.venv}/bin

log=$(mktemp) report=$(mktemp)
"$bin/torchpipe-serve" configs/demo.toml --host 127.0.0.1 --port 0 >"$log" 2>&1 &
service=$!
trap 'kill "$service" 2>/dev/null || true; rm -f "$log" "$report"' EXIT

# The start line names the port; the service prints it when it is ready.
until grep -q '^serving ' "$log"; do
  if ! kill -0 "$service" 2>/dev/null; then cat "$log" >&2; exit 1; fi
  sleep 0.1
done
grep '^serving ' "$log"
port=$(sed -n 's/^serving .* on .*:\([0-9]*\) .*/\1/p' "$log")

echo; echo "load test, 48 held-out images 10,000 times in all, from 10 client processes:"
"$bin/python" scripts/client_qps.py --img_dir configs/demo/images --port "$port" --json "$report" \
  --request_client 10 --request_batch 1 --total_number 10000 --labels_from_names --server_pid "$service" || test $? = 4  # busy: it measured itself
"$bin/python" -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["accuracy"] < 0.95)' "$report"

echo; echo "stopping the service"
kill -TERM "$service"
wait "$service"

cat <<END

What next, after: source $bin/activate
  your own picture   torchpipe-serve configs/demo.toml, and in another terminal: curl --data-binary @PICTURE.jpg 127.0.0.1:8888/infer
  your own model     torchpipe export net.py:build --weights best.pt --labels labels.txt (docs/first-model.md)
  serving it         torchpipe-serve model.toml --workers 2 --http-port 8080 (docs/service.md, docs/deployment.md)
END
