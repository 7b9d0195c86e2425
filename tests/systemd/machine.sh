# Runs inside the nested machine: start, reload, freeze and stop both services; one line per fact.
say() { echo "FACT $1=$2"; }
show() { systemctl show -P "$2" "$1"; }
says() { for _ in $(seq 150); do case "$(show "$1" StatusText)" in *"$2"*) return 0 ;; esac; sleep 0.2; done; return 1; }
wait_for() { for _ in $(seq "$3"); do [ "$(show "$1" "$2")" "$4" "$5" ] && return 0; sleep 0.2; done; return 1; }

systemctl start autotune-engine autotune; say start $?
for unit in autotune-engine autotune; do
  say "$unit.active" "$(show $unit ActiveState)"
  say "$unit.status" "$(show $unit StatusText)"
  pid=$(show $unit MainPID)
  say "$unit.user" "$(ps -o user= -p "$pid")"
  say "$unit.no_new_privs" "$(awk '/NoNewPrivs/ {print $2}' "/proc/$pid/status")"
  say "$unit.seccomp" "$(awk '/^Seccomp:/ {print $2}' "/proc/$pid/status")"
done
say socket "$(stat -c '%a %U' /run/kv-autotune/engine.sock)"
say answer "$(curl -s -m 60 http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
  -d '{"prompt": "once upon", "max_tokens": 4, "ignore_eos": true}' | tr -d '\n' | head -c 300)"
for _ in $(seq 100); do curl -sf http://127.0.0.1:9466/healthz >/dev/null && break; sleep 0.2; done
say daemon_health "$(curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:9466/healthz)"

sed -i 's/^tick_s: .*/tick_s: 0.5/' /etc/kv-autotune/autotune.yaml
systemctl reload autotune; say reload $?
says autotune 'reload: applied'; say reload_status "$(show autotune StatusText)"
echo 'nonsense: 1' >> /etc/kv-autotune/autotune.yaml
systemctl reload autotune; says autotune 'reload refused'
say bad_reload_status "$(show autotune StatusText)"
say bad_reload_active "$(show autotune ActiveState)"
sed -i '/^nonsense/d' /etc/kv-autotune/autotune.yaml

# A frozen process sends no pings: the manager kills it and starts another.
for unit in autotune autotune-engine; do
  before=$(show $unit MainPID)
  systemctl kill -s SIGSTOP $unit
  wait_for $unit NRestarts 300 -ge 1; say "$unit.restarted" $?
  wait_for $unit ActiveState 600 = active; say "$unit.back" $?
  say "$unit.other_process" "$([ "$(show $unit MainPID)" != "$before" ]; echo $?)"
done

systemctl kill -s SIGKILL autotune-engine
wait_for autotune-engine NRestarts 100 -ge 2; wait_for autotune-engine ActiveState 600 = active; say killed_engine_back $?
say daemon_stayed "$(show autotune NRestarts)"
systemctl stop autotune autotune-engine; say stop $?
say autotune.result "$(show autotune Result)"
say autotune-engine.result "$(show autotune-engine Result)"
