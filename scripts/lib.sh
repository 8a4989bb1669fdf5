# shellcheck shell=bash
# What the other scripts share: saying what is done, and installing Debian packages.

started=$SECONDS
say() { printf '[%3d s] %s\n' "$((SECONDS - started))" "$*"; }
fail() { printf '\n%s\n' "$*" >&2; exit 1; }

# Run a command with its output in a log; on a terminal its newest line shows. A failure
# prints the end of the log.
quietly() {
    local log line result
    log=$(mktemp)
    set +e  # the result is looked at below
    "$@" 2>&1 < /dev/null | while IFS= read -r line; do
        printf '%s\n' "$line" >> "$log"
        [ -t 1 ] && printf '\r\033[K        %.68s' "$line"
    done
    result=${PIPESTATUS[0]}
    set -e
    [ -t 1 ] && printf '\r\033[K'
    if [ "$result" -ne 0 ]; then
        tail -n 40 "$log" >&2
        rm -f "$log"
        fail "This failed: $*"
    fi
    rm -f "$log"
}

# install_packages NAME...: with apt-get, through sudo when we are not root.
install_packages() {
    command -v apt-get > /dev/null ||
        fail "These are missing, and this machine has no apt-get to install them with: $*"
    local root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo > /dev/null ||
            fail "These packages are missing. Install them as root, then start again: $*"
        root=(sudo)
        "${root[@]}" true  # asks for the password now, where the question can be seen
    fi
    local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q
        -o DPkg::Lock::Timeout=180)
    say "installing packages: $*"
    quietly "${apt[@]}" update
    # What is installed for tests must not start as a service of this machine.
    local policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' | "${root[@]}" tee "$policy" > /dev/null
        "${root[@]}" chmod +x "$policy"
        # shellcheck disable=SC2064 # the words of now are meant
        trap "${root[*]} rm -f $policy" EXIT
    fi
    quietly "${apt[@]}" install --no-install-recommends "$@"
}
