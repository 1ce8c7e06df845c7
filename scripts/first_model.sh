#!/usr/bin/env bash
# From weights of one's own to a served answer, by the wheel alone: five commands in a folder away from the repository, timed; then the
# pixels of 104 images against torchvision's own transform. Takes some minutes, most of them to install PyTorch and to train a ResNet-18.
#   bash scripts/first_model.sh [FOLDER]      what is there of an earlier run is used again; default: a new folder
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
rm -rf "$folder"/*.whl "$folder"/served
"${VENV:-.venv}/bin/python" -m hatchling build -t wheel -d "$folder" >/dev/null 2>&1
scripts=$PWD/scripts configs=$PWD/configs
cd "$folder"

step() {
  echo; echo "\$ $*"
  local start=$EPOCHREALTIME
  eval "$@"
  awk "BEGIN { printf \"  (%.1f s)\n\", ${EPOCHREALTIME/,/.} - ${start/,/.} }"
}

# A pair that was built together, also where requirements.txt gives a PyTorch for the CPU.
[[ -e env ]] || step 'python3 -m venv env'
step "env/bin/pip install -q '$(echo ./*.whl)[server,client]' torch==2.14.1 torchvision==0.29.1"

if [[ ! -e mine.pt ]]; then
  echo; echo "(what a user has: a trained ResNet-18, its labels, images)"
  env/bin/pip install -q tqdm
  env/bin/python "$scripts/run.py" textures --out data --train 20 --val 13
  env/bin/python "$scripts/train.py" --data data --toml "$configs/preprocess_cpu.toml" --arch resnet18 --epochs 3 --batch-size 16 --device cpu --checkpoint mine.pt
  ls data/train > labels.txt
fi

mkdir -p served
step 'env/bin/torchpipe export resnet18 --weights mine.pt --labels labels.txt --out served/model'
step 'env/bin/torchpipe-serve served/model.toml --port 0 > service.log 2>&1 & service=$!'
trap 'kill "$service" 2>/dev/null || true' EXIT
start=$EPOCHREALTIME
until grep -q '^serving ' service.log; do
  kill -0 "$service" || { cat service.log; exit 1; }
  sleep 0.05
done
awk "BEGIN { printf \"  (ready after %.1f s)\n\", ${EPOCHREALTIME/,/.} - ${start/,/.} }"
port=$(sed -n 's/^serving .* on .*:\([0-9]*\) .*/\1/p' service.log)
image=$(find data/val -name '*.jpg' | sort | head -1)
step "env/bin/python -c 'import sys; from torchpipe_client import Client; print(Client(sys.argv[1]).infer_batch(open(sys.argv[2], \"rb\").read()))' 127.0.0.1:$port $image"
kill -TERM "$service"
wait "$service"

echo
env/bin/torchpipe parity served/model.toml --torchvision ResNet18_Weights.DEFAULT --img_dir data/val --max-mean 0.1
