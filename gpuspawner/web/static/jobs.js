"use strict";
// Keeps the figures of what runs in the background up to date, and loads the page again when
// something has begun or ended. All of it is text; nothing that comes is taken for HTML.
(() => {
  const list = document.querySelector("[data-jobs]");
  if (!list) return;
  const SECONDS = 3;
  const headers = { "X-XSRFToken": document.querySelector("input[name=_xsrf]").value };
  const UNITS = ["bytes", "kB", "MB", "GB", "TB", "PB"];
  const items = new Map([...list.querySelectorAll("[data-job]")].map((it) => [it.dataset.job, it]));

  // As format_bytes in core/units.py.
  const size = (bytes) => {
    let [value, unit] = [bytes, 0];
    while (value >= 1023.95 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
    return unit ? `${value.toFixed(1)} ${UNITS[unit]}` : `${bytes} bytes`;
  };
  const isTyping = () => {
    const field = document.activeElement;
    return field instanceof HTMLInputElement && field.value !== field.defaultValue;
  };

  const look = async () => {
    let jobs = null;
    try {
      const answer = document.hidden
        ? null
        : await fetch(list.dataset.jobs, { cache: "no-store", headers });
      jobs = answer && answer.ok ? (await answer.json()).jobs : null;
    } catch {
      // The service is not responding yet.
    }
    if (jobs && !isTyping()) {
      const same = (job) => items.get(String(job.id))?.dataset.state === job.state;
      if (jobs.length !== items.size || !jobs.every(same)) {
        const address = new URL(location);
        address.hash = "";
        address.searchParams.delete("done"); // what the form did that led here is old news
        location.replace(address);
        return;
      }
      for (const job of jobs) {
        const place = items.get(String(job.id)).querySelector("[data-bytes]");
        if (place) place.textContent = size(job.bytes);
      }
    }
    setTimeout(look, 1000 * SECONDS);
  };
  setTimeout(look, 1000 * SECONDS);
})();
