#!/usr/bin/env bash
# The tests that need a CUDA device; without one every test is skipped, with the reason.
#   bash scripts/gpu_test.sh [1|2|3] [pytest arguments]
# 1: decoding, video, streams, tensors, training, without TensorRT; 2: TensorrtTensor; 3: its cache and precisions. Default: all.
# PYTHON names the interpreter (default: .venv's, else python3). TORCHPIPE_GPU_CACHE names a folder that keeps engines
# from run to run; it may be carried to another machine with the same GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
[[ -n $python ]] || { [[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3; }
in=tests/gpu
case ${1:-} in
  1) files="$in/test_decode_gpu.py $in/test_nvdec_gpu.py $in/test_streams_gpu.py $in/test_tensor_backends_gpu.py $in/test_torch_model_gpu.py $in/test_training_gpu.py" ;;
  2) files=$in/test_tensorrt.py ;;
  3) files="$in/test_engine_cache_gpu.py $in/test_precision_gpu.py" ;;
  *) files=$in; set -- all "$@" ;;
esac
shift
# shellcheck disable=SC2086 # a list of files
PYTHONPATH=".:server${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pytest $files "$@"
