#!/usr/bin/env bash
# deploy_test.sh TANDEM SOURCE_DIR: the scripts of deploy/ start ranks as two nodes of this machine; a failed rank ends
# all; the files name what exists.
set -u
tandem=$(realpath "$1") source=$(realpath "$2")
. "$(dirname "$0")/../cli/expect.sh"
PATH=$dir/bin:$PATH
mkdir bin
ln -s "$tandem" bin/tandem
small=(--set model.hidden=16 model.head_dim=4 model.ffn=32 train.seq=32 train.steps=4 "data.paths=$source/include")
# A port that nothing listens on now.
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
secret=a-secret-of-this-test

# Two nodes with two ranks each, as pods of Kubernetes start them.
nodes() { # COMMAND...: exit codes of both
  local first second port
  port=$(free_port)
  MASTER_ADDR=127.0.0.1 MASTER_PORT=$port TANDEM_SECRET=$secret "$source/deploy/tandem-ranks.sh" 2 1 2 "$@" >second.log 2>&1 &
  MASTER_PORT=$port TANDEM_SECRET=$secret "$source/deploy/tandem-ranks.sh" 2 0 2 "$@" >first.log 2>&1
  first=$?
  wait $!
  second=$?
  codes="$first $second"
}
nodes tandem train "$source/configs/tiny.toml" --tp 2 --dp 2 --out ranks "${small[@]}" --resume
[ "$codes" = '0 0' ] && [ -f ranks/final/model.safetensors ] || fail "tandem-ranks: exit codes $codes: $(cat first.log second.log)"
nodes sh -c '[ $RANK != 3 ] || exit 5; [ $RANK = 2 ] || exit 0; exec sleep 60'
[ "$(cut -d' ' -f2 <<<"$codes")" = 5 ] || fail "a failed rank: exit codes $codes, expected 5 on its node"
# The exit code of the rank that failed, though all end at once.
for _ in $(seq 20); do
  "$source/deploy/tandem-ranks.sh" 1 0 3 sh -c '[ $RANK != 1 ] || exit 5'
  status=$?
  [ "$status" = 5 ] || fail "a failed rank among ended ones: exit code $status, expected 5"
done
# stops CODE RANKS 'SHELL': SHELL of each rank, whose parent is told to stop once all wait in `stay`.
stay='stay() { touch started.$RANK; until [ -f end.$RANK ]; do sleep 0.05; done; }'
stops() {
  local expected=$1 ranks=$2 status deadline
  rm -f started.* end.* told.*
  "$source/deploy/tandem-ranks.sh" 1 0 "$ranks" sh -c "$stay; $3" &
  deadline=$((SECONDS + 30))
  until [ "$(find . -maxdepth 1 -name 'started.*' | wc -l)" = "$ranks" ] || [ $SECONDS -ge $deadline ]; do sleep 0.05; done
  kill $!
  wait $!
  status=$?
  [ "$status" = "$expected" ] || fail "$3, told to stop: exit code $status, expected $expected"
}
stops 7 2 'trap "exit 7" TERM; stay'
# A rank that still saves after another has failed is told once.
stops 7 2 'trap "echo told >>told.$RANK; touch end.$RANK" TERM; stay; [ $RANK = 1 ] && exit 7; sleep 2'
[ "$(cat told.0)" = told ] || fail "a rank that saves was told to stop $(wc -l <told.0) times"
# Ranks start once the name of node 0 has an address.
printf '#!/bin/sh\necho "$@" >>asked\n[ "$(wc -l <asked)" -ge 3 ]\n' >bin/getent
chmod +x bin/getent
MASTER_ADDR=node-0.tandem "$source/deploy/tandem-ranks.sh" 2 1 1 sh -c 'exit "$(wc -l <asked)"'
status=$?
[ "$status" = 3 ] && [ "$(sort -u asked)" = 'ahosts node-0.tandem' ] || fail "a name without an address: exit code $status: $(cat asked)"
rm bin/getent
# A signal that comes as the ranks start is passed on, too.
for _ in $(seq 10); do
  "$source/deploy/tandem-ranks.sh" 1 0 1 sh -c 'trap "exit 7" TERM; kill $PPID; while :; do sleep 0.05; done'
  status=$?
  [ "$status" = 7 ] || fail "a signal at the start: exit code $status, expected 7"
done
for words in '' '2 2 1 true' 'x 0 1 true' '1 0 0 true'; do
  # shellcheck disable=SC2086  # words
  "$source/deploy/tandem-ranks.sh" $words 2>log
  [ $? = 2 ] && [ "$(wc -l <log)" = 1 ] || fail "tandem-ranks $words: $(cat log)"
done

# Slurm: srun and scontrol of an allocation of two nodes, of which each is this machine.
cat >bin/scontrol <<'SH'
#!/bin/sh
printf 'localhost\n127.0.0.1\n'
SH
cat >bin/srun <<'SH'
#!/usr/bin/env bash
for word; do
  case $word in
    --ntasks=*) tasks=${word#*=} ;;
    --ntasks-per-node=*) per=${word#*=} ;;
    --nodelist=*) one=${word#*=} ;;
    --*) ;;
    *) break ;;
  esac
  shift
done
echo "srun ${one:-of all} $*" >>"$SRUN_LOG"
[ -z "${one:-}" ] || exec "$@"
pids=()
trap 'kill "${pids[@]}"' TERM
for ((i = 0; i < tasks; ++i)); do
  SLURM_PROCID=$i SLURM_LOCALID=$((i % per)) SLURM_NODEID=$((i / per)) SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_ID=0 \
    SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE="$per(x$((tasks / per)))" "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
SH
chmod +x bin/scontrol bin/srun
export SRUN_LOG=$dir/srun.log SLURM_JOB_NUM_NODES=2 SLURM_JOB_ID=$RANDOM SLURM_JOB_NODELIST='node[1-2]' RANKS=2
bash -n "$source/deploy/slurm/train.sbatch" || fail 'train.sbatch'
"$source/deploy/slurm/train.sbatch" "$source/configs/tiny.toml" --tp 2 --dp 2 --out slurm "${small[@]}" >log 2>&1 ||
  fail "train.sbatch with srun: $(cat log)"
[ -f slurm/final/model.safetensors ] || fail "srun: no model: $(cat log)"
cmp -s slurm/final/model.safetensors ranks/final/model.safetensors || fail 'srun and tandem-ranks: other weights'
MODE=launch SPARES=1 "$source/deploy/slurm/train.sbatch" "$source/configs/tiny.toml" --tp 1 --dp 3 --out launched "${small[@]}" \
  train.batch=9 >log 2>&1 || fail "train.sbatch with launch: $(cat log)"
[ -f launched/final/model.safetensors ] || fail "launch: no model: $(cat log)"
grep -q 'srun localhost sh -c .*launch --executor' "$SRUN_LOG" && grep -q 'srun 127.0.0.1 sh -c' "$SRUN_LOG" ||
  fail "launch: started by $(cat "$SRUN_LOG")"
ls tandem-hosts.* tandem-shell.* 2>/dev/null && fail 'train.sbatch leaves its files'
# TERM reaches the run, whose exit code is the script's.
cat >bin/stays <<'SH'
#!/usr/bin/env bash
trap 'exit 9' TERM
touch "stays.$SLURM_PROCID"
while :; do sleep 0.05; done
SH
chmod +x bin/stays
TANDEM=$dir/bin/stays "$source/deploy/slurm/train.sbatch" &
deadline=$((SECONDS + 30))
until [ "$(find . -maxdepth 1 -name 'stays.*' | wc -l)" = 4 ] || [ $SECONDS -ge $deadline ]; do sleep 0.05; done
kill $!
wait $!
status=$?
[ "$status" = 9 ] || fail "train.sbatch, told to stop: exit code $status, expected that of the run, 9"
MODE=other "$source/deploy/slurm/train.sbatch" x 2>log && fail 'MODE=other'
grep -q 'MODE=other: expected srun or launch' log || fail "MODE=other: $(cat log)"

# Files that are copied or named exist.
while read -r _ from _; do
  case $from in
    .) ;;
    --from=*) ;;
    *) [ -e "$source/$from" ] || fail "Dockerfile: COPY $from: no such file" ;;
  esac
done < <(grep '^COPY' "$source/Dockerfile")
sed -n 's/^!//p' "$source/.dockerignore" | while read -r kept; do [ -e "$source/$kept" ] || echo "$kept"; done >missing
[ ! -s missing ] || fail ".dockerignore: no $(cat missing)"
# The image has the libraries of the program that are not of its base.
if command -v dpkg-query >/dev/null && grep -qs 'VERSION_ID="12"' /etc/os-release; then
  packages=$(grep 'RUN apt-get.*libdnnl' "$source/Dockerfile" | tr ' ' '\n')
  for library in $(ldd "$tandem" | grep -oE '(dnnl|mpi|fmt|spdlog|xxhash|libz|zstd)[a-z]*\.so[.0-9]*'); do
    owner=$(dpkg-query -S "*$library" 2>/dev/null | head -n 1 | cut -d: -f1)
    grep -qxF "$owner" <<<"$packages" || fail "Dockerfile: $library is of $owner, which it does not install"
  done
fi
if python3 -c 'import yaml' 2>/dev/null; then
  python3 - "$source/deploy" <<'PY' || fail 'a YAML file of deploy/'
import pathlib, sys, yaml
root = pathlib.Path(sys.argv[1])
files = {path: list(yaml.safe_load_all(path.read_text())) for path in root.rglob("*.yaml")}
assert len(files) >= 6, files.keys()
services = files[root / "compose.yaml"][0]["services"]
ports = {f"{name}:{service['ports'][0].split(':')[-1]}" for name, service in services.items()}
for scraped in files[root / "prometheus.yaml"][0]["scrape_configs"]:
    for target in scraped["static_configs"][0]["targets"]:
        assert target in ports, (target, ports)
for service in services.values():
    for volume in service.get("volumes", []):
        if volume.startswith("./"):
            assert (root / volume.split(":")[0]).exists(), volume
train_pod = next(document for document in files[root / "kubernetes/train.yaml"] if document["kind"] == "Job")["spec"]["template"]["spec"]
for path in (root / "kubernetes").iterdir():
    kinds = {document["kind"]: document for document in files[path]}
    if "JobSet" in kinds:  # the same pods under other names
        name, [job] = kinds["JobSet"]["metadata"]["name"], kinds["JobSet"]["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        pod, [ranks] = spec["template"]["spec"], spec["template"]["spec"]["containers"]
        address = next(each for each in ranks["env"] if each["name"] == "MASTER_ADDR")
        assert address["value"] == f'{name}-{job["name"]}-0-0.{name}', address
        address["value"] = next(each["value"] for each in train_pod["containers"][0]["env"] if each["name"] == "MASTER_ADDR")
        assert pod["containers"] == train_pod["containers"] and pod["volumes"] == train_pod["volumes"], pod
        assert spec["completionMode"] == "Indexed" and ranks["args"][0] == str(spec["completions"]) == str(spec["parallelism"]), spec
        continue
    pod = kinds.get("Job", kinds.get("Deployment"))["spec"]["template"]
    if "Job" in kinds:
        spec = kinds["Job"]["spec"]
        args = pod["spec"]["containers"][0]["args"]
        assert spec["completionMode"] == "Indexed" and args[0] == str(spec["completions"]) == str(spec["parallelism"]), args
        ranks = int(args[0]) * int(args[2])
        assert ranks == int(args[args.index("--tp") + 1]) * int(args[args.index("--dp") + 1]), args
        assert pod["spec"]["subdomain"] == kinds["Service"]["metadata"]["name"], pod
    else:
        selector = kinds["Service"]["spec"]["selector"]
        assert selector.items() <= pod["metadata"]["labels"].items(), (selector, pod)
PY
else
  echo 'deploy_test: no PyYAML: YAML files not checked' >&2
fi
[ "$failures" = 0 ]
