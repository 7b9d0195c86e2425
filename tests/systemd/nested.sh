#!/bin/bash
# A whole systemd as the first process of namespaces of its own, with our units alone; needs root. What it changes of the
# machine is gone with it: /etc, /run, /var/lib and /var/cache are copies or empty there, and cgroups hang below one of
# this test's own.
#
#   nested.sh FOLDER MACHINE_SCRIPT
#
# FOLDER: where `make install DESTDIR=` has put its files. MACHINE_SCRIPT runs inside once systemd answers; what it prints
# is printed here, and the machine ends with it.
set -eu
export FOLDER=$1 SCRIPT=$2
if [ "${3:-}" != inside ]; then
  name=kvnested$$
  mkdir -p "$FOLDER/machine"
  for controller in /sys/fs/cgroup/*; do
    if [ -w "$controller/cgroup.procs" ]; then
      mkdir -p "$controller/$name"
      { echo $$ > "$controller/$name/cgroup.procs"; } 2>/dev/null || true  # cpuset wants to be set up first: not needed
    fi
  done
  timeout "${NESTED_LIMIT_S:-240}" unshare --pid --fork --mount --mount-proc --cgroup --uts --ipc --kill-child \
    "$0" "$FOLDER" "$SCRIPT" inside || true
  for controller in /sys/fs/cgroup/*; do
    { echo $$ > "$controller/cgroup.procs"; } 2>/dev/null || true
    find "$controller/$name" -depth -type d -exec rmdir {} + 2>/dev/null || true
  done
  cat "$FOLDER/machine/output"
  exit 0
fi

for folder in /etc /var/lib /var/cache; do
  mkdir -p "$FOLDER/machine$folder"
done
cp -a /etc/. "$FOLDER/machine/etc/" 2>/dev/null || true
for folder in /etc /var/lib /var/cache; do
  mount --bind "$FOLDER/machine$folder" "$folder"
done
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system
rm -rf /etc/systemd/system/*
cp -a "$FOLDER/root/etc/." /etc/
for target in basic sysinit shutdown multi-user; do
  printf '[Unit]\nDescription=%s\nDefaultDependencies=no\n' "$target" > "/etc/systemd/system/$target.target"
done
uuidgen 2>/dev/null | tr -d - > /etc/machine-id || tr -d - < /proc/sys/kernel/random/uuid > /etc/machine-id
systemd-sysusers "$FOLDER/root/usr/lib/sysusers.d/kv-autotune.conf"
systemd-tmpfiles --create "$FOLDER/root/usr/lib/tmpfiles.d/kv-autotune.conf"

# What this kernel has of version 1 controllers is mounted anew, so that systemd sees its own branch as the root.
if [ ! -e /sys/fs/cgroup/cgroup.controllers ]; then
  umount -R /sys/fs/cgroup 2>/dev/null || true
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
  mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified || true
  for controller in memory pids cpu; do
    mkdir "/sys/fs/cgroup/$controller"
    mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller" || rmdir "/sys/fs/cgroup/$controller"
  done
fi

(
  for _ in $(seq 200); do
    [ -S /run/systemd/private ] && systemctl show -p Version >/dev/null 2>&1 && break
    sleep 0.1
  done
  bash "$SCRIPT" > "$FOLDER/machine/output" 2>&1
  systemctl --force exit 0 || kill -s RTMIN+14 1
) &
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=nested SYSTEMD_UNIT_PATH=/etc/systemd/system \
  /lib/systemd/systemd --system --unit=multi-user.target --log-target=console --show-status=false \
  > "$FOLDER/machine/log" 2>&1
