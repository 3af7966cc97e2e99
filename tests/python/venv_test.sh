#!/usr/bin/env bash
# venv_test.sh PYTHON PACKAGES PROGRAM: runs PROGRAM on two ranks, as docs/guide/python.md starts it in a
# virtual environment that sees the system's PyTorch. PACKAGES: the folder with tandem. Exit status
# 77 if that PyTorch cannot launch processes.
set -euo pipefail
python=$1 packages=$2 program=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv --without-pip --system-site-packages "$folder/venv"
# Emulates an installation by pip.
ln -s "$packages/tandem" "$("$folder/venv/bin/python3" -c 'import site; print(site.getsitepackages()[0])')/tandem"
unset PYTHONPATH
# shellcheck disable=SC1091
. "$folder/venv/bin/activate"

start() {  # OPTION|PROGRAM...
  python3 -m torch.distributed.run --redirects 1 --tee 1 --nproc_per_node 2 \
    --master_port $((20000 + $$ % 20000)) --log_dir "$folder/log" "$@"
}
said=$(start "$program" 2>&1) && [[ $said == *"]:ok"* ]] && exit 0
start --no_python true >/dev/null 2>&1 || { echo "skipped: torchrun does not even start true"; exit 77; }
echo "$said"
exit 1
