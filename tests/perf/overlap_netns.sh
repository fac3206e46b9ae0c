#!/bin/bash
# How much of a transfer hides behind compute, on a link slow enough to tell: two ranks in two
# network namespaces, each end limited to 1 Gbit/s, a core each.
#
# Usage: overlap_netns.sh CPATTN [flags of `cpattn bench --suite ring`]
# Needs root, iproute2 (ip, tc), Open MPI. Leaves nothing behind; safe to repeat after a kill.
#
# The default problem computes for longer than its one hop takes on the wire. Prints the table of
# bench and its `hidden` column once more; ends with 1 when less than WANTED is hidden.
set -euo pipefail

readonly WANTED=0.95
readonly RATE=1gbit
readonly BRIDGE=cpbench0
readonly SUBNET=10.77.0
readonly HOSTS=(cpbench-a cpbench-b)

say() { printf '%s\n' "$*" >&2; }

need() {
  command -v "$1" >/dev/null || { say "$1 is missing: apt-get install $2"; exit 3; }
}

# Also what "up" begins with: a killed run leaves its namespaces.
down() {
  local host
  for host in "${HOSTS[@]}"; do ip netns del "$host" 2>/dev/null || true; done
  ip link del "$BRIDGE" 2>/dev/null || true
}

up() {
  down
  ip link add "$BRIDGE" type bridge
  ip addr add "$SUBNET.254/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  local i host
  for i in "${!HOSTS[@]}"; do
    host=${HOSTS[$i]}
    ip netns add "$host"
    ip link add "cpbv$i" type veth peer name eth0 netns "$host"
    ip link set "cpbv$i" master "$BRIDGE" up
    ip -n "$host" addr add "$SUBNET.$((i + 1))/24" dev eth0
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
    ip netns exec "$host" tc qdisc add dev eth0 root tbf rate "$RATE" burst 256kb latency 50ms
  done
}

# Stands in for ssh: mpirun calls it with options, a host and the daemon's command line. A host gets
# its own name, so that session folders do not collide, and its own core.
write_agent() {
  cat >"$1" <<'AGENT'
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1
shift
case $host in
  *-a) core=0 ;;
  *) core=1 ;;
esac
exec ip netns exec "$host" unshare --uts taskset -c "$core" sh -c "hostname $host; $*"
AGENT
  chmod +x "$1"
}

main() {
  [[ $# -ge 1 ]] || { say "usage: $0 CPATTN [flags]"; exit 2; }
  local cpattn
  cpattn=$(realpath "$1")
  shift
  [[ $EUID -eq 0 ]] || { say "needs root: network namespaces"; exit 3; }
  need ip iproute2
  need tc iproute2
  need mpirun openmpi-bin
  need python3 python3

  # Not local: the trap runs after this function.
  workdir=$(mktemp -d)
  trap 'down; rm -rf "$workdir"' EXIT
  trap 'exit 130' INT TERM
  up
  write_agent "$workdir/agent"

  local flags=(--seq-lens 16384 --repetitions 3 --passes forward)
  [[ $# -eq 0 ]] || flags=("$@")
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  mpirun --host "${HOSTS[0]}:1,${HOSTS[1]}:1" -np 2 --bind-to none \
    --mca plm_rsh_agent "$workdir/agent" \
    --mca oob_tcp_if_include "$SUBNET.0/24" \
    --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include "$SUBNET.0/24" \
    -x OMP_NUM_THREADS=1 \
    "$cpattn" bench --suite ring --thread-counts 1 --json "$workdir/bench.json" "${flags[@]}"

  python3 - "$workdir/bench.json" "$WANTED" <<'JUDGE'
import json
import sys

records = json.load(open(sys.argv[1]))["records"]
wanted = float(sys.argv[2])
for record in records:
    compute = record["seconds"] - record["exposed_seconds"]
    steps = record["ranks"]
    longer = compute / steps > record["transfer_seconds"] / (steps - 1)
    print(
        f"{record['name']}: hidden {100 * record['hidden_share']:.1f} % of a transfer of "
        f"{record['transfer_seconds']:.3f} s (compute of a step {compute / steps:.3f} s"
        f"{'' if longer else ', SHORTER than the transfer: no verdict'})"
    )
sys.exit(0 if all(record["hidden_share"] >= wanted for record in records) else 1)
JUDGE
}

main "$@"
