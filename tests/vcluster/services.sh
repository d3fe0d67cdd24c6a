#!/usr/bin/env bash
# Starts what runs on a host of the test cluster, on that host and as root.
#
# Usage: services.sh controller|login|compute GPUS
# Returns once all daemons are in the background; the first that fails to start ends it with its status.
set -euo pipefail
role=$1 gpus=$2

install -d -o munge -g munge /run/munge /var/log/munge /var/lib/munge
setpriv --reuid=munge --regid=munge --init-groups munged

case $role in
controller)
    install -d -o slurm -g slurm /var/spool/slurmctld /var/log/slurm
    slurmctld
    ;;
compute)
    # Device files without a GPU behind them: enough for Slurm to count GPUs and hand them out.
    for ((index = 0; index < gpus; index++)); do
        mknod -m 666 "/dev/nvidia$index" c 195 "$index"
    done
    install -d /var/spool/slurmd
    slurmd
    ;;
esac

echo '0 2147483647' >/proc/sys/net/ipv4/ping_group_range # users may ping, as systemd has it
install -d /run/sshd
/usr/sbin/sshd
