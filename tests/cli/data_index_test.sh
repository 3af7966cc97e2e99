#!/usr/bin/env bash
# data_index_test.sh TANDEM CONFIG: a manifest is written, used by a run and by its resumption, and names files
# that differ.
set -u
tandem=$1 config=$2
here=$(cd "$(dirname "$0")" && pwd)
. "$here/expect.sh"

truncate -s 20M x.bin y.bin
expect 0 'data.json: 2 files, 41.9 MB' data index x.bin y.bin --out data.json
expect 0 'data.json: 2 files, 41.9 MB, as recorded' data verify data.json
run=(train "$config" --out out --set 'data.paths=["x.bin", "y.bin"]' model.layers=1 train.seq=16)
expect 0 'Done at step 2.*: the model is in out/final$' "${run[@]}" train.steps=2 data.manifest=data.json
expect 0 'data.json: 2 files, 41.9 MB, as recorded' data verify out/data.json
expect 0 'the model was trained on token files: text is read as bytes' eval out --data "$config" --seq 16
printf x | dd of=y.bin bs=1 seek=100001 conv=notrunc status=none # between samples
expect 1 '/y.bin: holds other bytes: expected those it had$' data verify data.json
expect 0 'y.bin was written to after out/data.json was made; its samples are the same' \
  "${run[@]}" train.steps=3 --resume
printf x | dd of=y.bin bs=1 seek=0 conv=notrunc status=none
expect 3 '/y.bin: holds other bytes: expected those it had, as out/data.json says' "${run[@]}" train.steps=4 --resume
rm y.bin
expect 1 'y.bin: cannot open: No such file' data verify data.json
echo '{' >broken.json
expect 3 'broken.json: no manifest of data' data verify broken.json
expect 3 'y.bin: no such file' "${run[@]}" train.steps=4 --resume
expect 3 'broken.json: no manifest of data' "${run[@]}" data.paths=x.bin data.manifest=broken.json
expect 2 'paths' data index --out data.json
exit $((failures > 0))
