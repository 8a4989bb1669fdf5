"use strict";
// Browser notifications while a page of the hub is open, if the member chose them in this browser:
// it is your turn, your session ends soon, your server was stopped.
(() => {
  const { notices, user } = document.currentScript.dataset;
  const CHOICE = `gpuspawner-notify:${user}`; // "on", if the member wants them here
  const SHOWN = `gpuspawner-notified:${user}`; // the time of the newest notice that was shown
  const SECONDS = 15;
  const LATE = 15 * 60 * 1000; // older notices are no news when a page opens

  const can = Boolean(window.Notification && window.isSecureContext && navigator.locks);
  const kept = (name) => {
    try {
      return localStorage.getItem(name) || "";
    } catch {
      return ""; // the browser keeps nothing
    }
  };
  const keep = (name, value) => {
    try {
      localStorage.setItem(name, value);
    } catch {
      // It then holds until the page is closed.
    }
  };
  const isOn = () => can && Notification.permission === "granted" && kept(CHOICE) === "on";

  const ask = async () => {
    const answer = await fetch(notices, { cache: "no-store", redirect: "manual" });
    return answer.ok ? answer.json() : null;
  };

  const show = (found) => {
    const since = Math.max(Date.parse(kept(SHOWN)) || 0, Date.parse(found.as_of) - LATE);
    for (const notice of [...found.notices].reverse()) {
      if (Date.parse(notice.at) <= since) continue;
      keep(SHOWN, notice.at);
      const shown = new Notification(notice.title, { body: notice.body, tag: notice.at });
      shown.onclick = () => {
        window.focus();
        shown.close();
      };
    }
  };

  const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

  // Of several open pages one asks. When it is closed, another one goes on.
  let asks = false;
  const follow = async () => {
    if (asks || !isOn()) return;
    asks = true;
    await navigator.locks.request(CHOICE, async () => {
      while (isOn()) {
        try {
          const found = await ask();
          if (found) show(found);
        } catch {
          // The hub is not responding.
        }
        await pause(SECONDS);
      }
    });
    asks = false;
  };

  // What the page of notifications offers.
  const offer = document.querySelector("[data-notify]");
  const state = () => {
    if (!can) return "unable";
    if (Notification.permission === "denied") return "denied";
    return isOn() ? "on" : "off";
  };
  const draw = () => {
    if (!offer) return;
    offer.hidden = false;
    for (const part of offer.querySelectorAll("[data-when]")) {
      part.hidden = part.dataset.when !== state();
    }
  };
  const turnOn = async () => {
    if ((await Notification.requestPermission()) === "granted") {
      const found = await ask().catch(() => null);
      keep(SHOWN, found ? found.as_of : new Date().toISOString());
      keep(CHOICE, "on");
    }
    draw();
    follow();
  };
  const turnOff = () => {
    keep(CHOICE, "off");
    draw();
  };
  if (offer) {
    offer.querySelector("[data-when=off] button").addEventListener("click", turnOn);
    offer.querySelector("[data-when=on] button").addEventListener("click", turnOff);
  }
  addEventListener("storage", () => {
    draw();
    follow();
  });
  draw();
  follow();
})();
