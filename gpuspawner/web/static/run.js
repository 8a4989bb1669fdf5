"use strict";
// Follows a run that goes on: adds to its log, shows which cell it executes, and loads the page
// again when its state has changed. All of it is text; nothing that comes is taken for HTML.
(() => {
  const run = document.querySelector("[data-run]");
  if (!run) return;
  const log = document.querySelector("[data-log]");
  if (log) log.scrollTop = log.scrollHeight;
  if (!["waiting", "starting", "running"].includes(run.dataset.state)) return;
  const SECONDS = 3;
  const MOST = 256 * 1024;
  const headers = { "X-XSRFToken": document.querySelector("input[name=_xsrf]")?.value ?? "" };
  const decoder = new TextDecoder();

  // As readable() in runs/run_page.py.
  const COLOUR = /\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g;
  const last = (line) => line.replace(/\r+$/, "").split("\r").pop();
  const readable = (text) => text.replace(COLOUR, "").split("\n").map(last).join("\n");

  const isTyping = () =>
    [...document.querySelectorAll("input:not([type=hidden]), textarea")].some(
      (field) => field.value !== field.defaultValue,
    );
  const get = async (path) => {
    const answer = await fetch(run.dataset.run + path, { cache: "no-store", headers });
    return answer.ok ? answer : null;
  };

  const addToLog = async () => {
    const answer = await get(`/log?offset=${log.dataset.next}`);
    if (!answer) return;
    const next = answer.headers.get("X-Next-Offset");
    const more = decoder.decode(await answer.arrayBuffer(), { stream: true });
    if (next) log.dataset.next = next;
    if (!more) return;
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    log.textContent = readable(log.textContent + more).slice(-MOST);
    if (atEnd) log.scrollTop = log.scrollHeight;
    document.querySelector("[data-empty]").hidden = true;
  };

  const look = async () => {
    try {
      if (!document.hidden) {
        const told = await (await get(""))?.json();
        if (told && told.state !== run.dataset.state && !isTyping()) {
          location.reload();
          return;
        }
        if (told?.cell) {
          const place = run.querySelector("[data-progress]");
          place.hidden = false;
          Object.assign(place.querySelector("progress"), { max: told.cells, value: told.cell });
          place.querySelector("span").textContent = `cell ${told.cell} of ${told.cells}`;
        }
        if (log) await addToLog();
      }
    } catch {
      // The service is not responding yet.
    }
    setTimeout(look, 1000 * SECONDS);
  };
  setTimeout(look, 1000 * SECONDS);
})();
