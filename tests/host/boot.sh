#!/usr/bin/env bash
# Process 1 of a test host: makes the host's file tree, moves into it, and stays to reap orphans.
#
# Usage: boot.sh DIR NAME TITLE [SOURCE TARGET ro|rw]...
#   DIR     the host's own directory, with lower (the common root), upper, work and root in it
#   NAME    the host name
#   TITLE   argv[0] of the process that stays: it tells from outside that the host is up, and which one it is
# Runs in mount, uts, ipc, net and pid namespaces of its own (see host.py).
set -euo pipefail
dir=$1 name=$2 title=$3
shift 3

# Relative paths: overlayfs would read a comma or a colon in DIR as the end of a value. Volatile: what a host writes is
# thrown away with it, and need not reach the disk first, nor what others write there meanwhile, when the host ends.
cd "$dir"
mount -t overlay -o volatile,lowerdir=lower,upperdir=upper,workdir=work overlay root
cd root

mount -t proc -o nosuid,nodev,noexec proc proc
mount -t sysfs -o nosuid,nodev,noexec sysfs sys
mount -t tmpfs -o nosuid,nodev,noexec,mode=755 tmpfs sys/fs/cgroup
mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs run
mount -t tmpfs -o nosuid,mode=755 tmpfs dev
mkdir dev/pts dev/shm dev/mqueue
mount -t devpts -o nosuid,noexec,newinstance,ptmxmode=666,mode=620,gid=5 devpts dev/pts
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs dev/shm
mount -t mqueue -o nosuid,nodev,noexec mqueue dev/mqueue
while read -r node major minor; do
    mknod -m 666 "dev/$node" c "$major" "$minor"
done <<'NODES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
fuse 10 229
NODES
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr

hostname "$name"
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" >etc/hosts
echo "$name" >etc/hostname

pivot_root . mnt
cd /
hash -r # bash knows programs by where they were outside
while (($#)); do
    if [[ -d /mnt$1 ]]; then
        mkdir -p "$2"
    else
        mkdir -p "$(dirname "$2")"
        touch "$2"
    fi
    mount --bind "/mnt$1" "$2"
    if [[ $3 == ro ]]; then mount -o remount,bind,ro "$2"; fi
    shift 3
done
umount -l /mnt
ip link set lo up
exec -a "$title" catatonit -P
