#!/usr/bin/env bash
# netns_run.sh [--hosts N] [--ranks N] [--rate RATE] [--delay TIME] [--mtu BYTES]
#              [--congestion reno|cubic|bbr] [--burst SIZE] [--once] COMMAND [ARG...]
#
# Runs COMMAND under mpirun, one rank (or --ranks) on each of N hosts that share only the processor:
# network namespaces with their own host names, joined by a bridge, each link limited by a token
# bucket (tc tbf) and, with --delay, delayed (tc netem). With --once, COMMAND runs once, on the first
# host 10.77.0.1, and $NETNS_SHELL HOST COMMAND runs another on 10.77.0.1, 10.77.0.2, …. Needs root. Exit status: COMMAND's; 77 if
# this machine cannot create such hosts, with the reason.
set -eu

hosts=2 ranks=1 rate=1gbit delay= mtu=1500 congestion=reno burst= once=
while [ $# -gt 0 ]; do
  case $1 in
    --hosts) hosts=$2; shift 2 ;;
    --ranks) ranks=$2; shift 2 ;;
    --rate) rate=$2; shift 2 ;;
    --delay) delay=$2; shift 2 ;;
    --mtu) mtu=$2; shift 2 ;;
    --congestion) congestion=$2; shift 2 ;;
    --burst) burst=$2; shift 2 ;;
    --once) once=1; shift ;;
    --) shift; break ;;
    -*) echo "netns_run.sh: $1: expected --hosts, --ranks, --rate, --delay, --mtu, --congestion, --burst or --once" >&2; exit 2 ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || { sed -n '2,10s/^# \?//p' "$0" >&2; exit 2; }

skip() { echo "netns_run.sh: skipped: $1" >&2; exit 77; }
[ "$(id -u)" = 0 ] || skip "needs root"
for tool in ip tc unshare mpirun; do
  command -v "$tool" > /dev/null || skip "no $tool here"
done

# A burst smaller than the bytes that pass while a timer is late would lower the rate.
case $rate in
  *gbit) burst=${burst:-256kb} ;;
  *) burst=${burst:-128kb} ;;
esac
name=tdm$$
agent=$(mktemp)
network() {
  for ((i = 1; i <= hosts; ++i)); do
    ip netns add "$name-$i" || return 1
    ip link add "$name.$i" mtu "$mtu" type veth peer name eth0 mtu "$mtu" netns "$name-$i" || return 1
    ip link set "$name.$i" master "$name" up || return 1
    ip -n "$name-$i" addr add "10.77.0.$i/24" dev eth0 || return 1
    ip -n "$name-$i" link set lo up || return 1
    ip -n "$name-$i" link set eth0 up || return 1
    # Some machines default to a congestion control for long-distance links, which paces and probes.
    ip netns exec "$name-$i" sysctl -qw net.ipv4.tcp_congestion_control="$congestion" || return 1
    tc -n "$name-$i" qdisc add dev eth0 root handle 1: tbf rate "$rate" burst "$burst" latency 50ms || return 1
    [ -z "$delay" ] || tc -n "$name-$i" qdisc add dev eth0 parent 1:1 netem delay "$delay" limit 100000 || return 1
  done
}
cleanup() {
  for ((i = 1; i <= hosts; ++i)); do
    ip netns pids "$name-$i" 2> /dev/null | xargs -r kill -9 2> /dev/null || true
    ip link del "$name.$i" 2> /dev/null || true
    ip netns del "$name-$i" 2> /dev/null || true
  done
  ip link del "$name" 2> /dev/null || true
  rm -f "$agent"
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

refusal=$( { ip link add "$name" mtu "$mtu" type bridge && ip link set "$name" up && network; } 2>&1) ||
  skip "cannot make the hosts: $(echo "$refusal" | head -n 1)"

# Replaces ssh for Open MPI: AGENT [OPTION...] HOST COMMAND.
cat > "$agent" << EOF
#!/bin/sh
while case \$1 in -*) true ;; *) false ;; esac; do shift; done
host=\${1##*.}
shift
exec ip netns exec $name-\$host unshare --uts sh -c "hostname $name-\$host; \$*"
EOF
chmod +x "$agent"

if [ -n "$once" ]; then
  export NETNS_SHELL=$agent
  ip netns exec "$name-1" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$name-1" "$@"
  exit
fi
list=$name-1:$ranks  # by name, so that mpirun recognizes its own host
for ((i = 2; i <= hosts; ++i)); do list=$list,10.77.0.$i:$ranks; done
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export TANDEM_LINK="tbf $rate${delay:+ $delay}"
# Open MPI 5 starts daemons through PRRTE, which has its own parameters.
launch=(--mca plm_rsh_agent "$agent" --mca oob_tcp_if_include 10.77.0.0/24)
case $(mpirun --version) in
  *"Open MPI) 4."*) ;;
  *) launch=(--prtemca plm_ssh_agent "$agent" --prtemca prte_if_include 10.77.0.0/24) ;;
esac
ip netns exec "$name-1" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$name-1" \
  mpirun --host "$list" -n "$((hosts * ranks))" --map-by "ppr:$ranks:node" --bind-to none \
  "${launch[@]}" --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include 10.77.0.0/24 \
  -x TANDEM_LINK $(env | sed -n 's/^\(TANDEM_[A-Z_]*\)=.*/-x \1/p' | grep -v TANDEM_LINK) "$@"
