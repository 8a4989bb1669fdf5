#!/usr/bin/env bash
# Installs the parts that tests run for real, and only those that are missing: a Docker Engine,
# PostgreSQL, OpenLDAP, Chromium, nginx, Prometheus, a C compiler, debootstrap, a Linux kernel as a process with XFS,
# btrfs, Slurm with what it needs (munge, MariaDB), a way out for a machine in a container, a clock that
# is not this machine's.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

missing=()
need() { missing+=("$@"); }
has() { command -v "$1" > /dev/null; }

has dockerd || need docker.io
has iptables || need iptables
has ip || need iproute2
has setpriv || need util-linux
has debootstrap || need debootstrap
has linux.uml || need user-mode-linux
has mkfs.xfs || need xfsprogs
has mkfs.btrfs || need btrfs-progs
has zstd || need zstd
has slurmctld || need slurm-wlm
has slurmdbd || need slurmdbd
has munged || need munge
has mariadbd || need mariadb-server
has busybox || need busybox-static
has faketime || need faketime
has slapd || need slapd
has slirp4netns || need slirp4netns
has nginx || need nginx-light
has promtool || need prometheus
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || need debian-archive-keyring
{ has cc && [ -e "$(cc -print-file-name=libc.a)" ]; } || need gcc libc6-dev
{ compgen -G '/usr/lib/postgresql/*/bin/postgres' > /dev/null || has postgres; } || need postgresql
# A kernel with AppArmor has dockerd load a profile, by a program that docker.io only recommends.
if grep -qs Y /sys/module/apparmor/parameters/enabled; then
    has apparmor_parser || need apparmor
fi

ubuntu=$(. /etc/os-release; [ "${ID:-}" != ubuntu ] || echo yes)
if [ -z "$ubuntu" ]; then
    has chromium || has google-chrome || need chromium
fi

[ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"

# Ubuntu's chromium is a snap, which cannot see a test's folders: Playwright's own build there.
if [ -n "$ubuntu" ] && ! has google-chrome && ! compgen -G "$HOME/.cache/ms-playwright/chromium*" > /dev/null; then
    say "installing Chromium"
    quietly .venv/bin/playwright install --with-deps chromium
fi
